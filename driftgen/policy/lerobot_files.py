"""LeRobot's data sets: one row per step in parquet files, frames stored as images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.episodes import IMAGE, STATE, Episodes
from driftgen.support.image_files import open_image
from driftgen.support.untrusted_files import check_regular, reading

__all__ = ["read_lerobot"]


def read_lerobot(path: Path, wanted: str | None, limit: int | None) -> Episodes:
    """Read a folder with ``meta/info.json`` and ``data/**/*.parquet``.

    Steps are ordered by the columns ``episode_index`` and ``frame_index``. Frames must be stored as images:
    videos are not decoded.

    Args:
        path: folder.
        wanted: columns of the observation, separated by commas; None for all.
        limit: number of episodes, from the first.
    """
    try:
        import pyarrow.parquet as parquet
        from pyarrow import concat_tables
    except ImportError:
        raise InputError(
            f"{path}: reading parquet needs pyarrow: pip install pyarrow", topic="missing-extra"
        ) from None
    files = sorted(path.glob("data/**/*.parquet"))
    if not files:
        raise InputError(f"{path} has no data/**/*.parquet: expected a LeRobot data set")
    tables = []
    for file in files:
        with reading(file, "parquet"):
            tables.append(parquet.read_table(check_regular(file)))
    table = concat_tables(tables)
    columns: list[str] = table.column_names
    for name in ("action", "episode_index", "frame_index"):
        if name not in columns:
            raise InputError(
                f"{path} has no column {name} but {', '.join(columns)}: expected a LeRobot data set"
            )
    stored = [name for name in columns if name == STATE or name.startswith(IMAGE)]
    keys = stored if wanted is None else [key.strip() for key in wanted.split(",")]
    missing = [key for key in keys if key not in stored]
    if missing or not keys:
        raise InputError(
            f"{path} has no column {missing[0] if missing else STATE}: choose from "
            f"{', '.join(stored) or '(none)'}; store frames as images, videos are not decoded"
        )
    with np.errstate(invalid="ignore"):  # damaged numbers are refused with the ends of the episodes
        episode, frame = (
            table[name].to_numpy().astype(np.int64) for name in ("episode_index", "frame_index")
        )
    order = np.lexsort((frame, episode))
    ends = np.flatnonzero(np.diff(episode[order], append=episode.max(initial=0) + 1)) + 1
    if limit is not None:
        ends = ends[:limit]
        order = order[: ends[-1]]
    table = table.take(order)
    observations = {key: _frames(table[key]) if key.startswith(IMAGE) else _rows(table[key]) for key in keys}
    return Episodes(observations, _rows(table["action"]), ends, str(path))


def _rows(column: Any) -> NDArray[np.float32]:
    return np.stack([np.asarray(row, np.float32).reshape(-1) for row in column.to_pylist()])


def _frames(column: Any) -> NDArray[np.uint8]:
    """Decode a column of structs with the bytes of an image file."""
    images = [open_image(io.BytesIO(row["bytes"])).convert("RGB") for row in column.to_pylist()]
    return np.stack([np.asarray(image, np.uint8) for image in images])
