"""``driftgen eval --card``: the figures of an evaluation on the card of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from driftgen.errors import InputError
from driftgen.interop.model_sources import find_model
from driftgen.interop.packaged import packaged_names
from driftgen.interop.saved_config import CARD, read_config, write_description
from driftgen.report.evaluation_files import format_rows

__all__ = ["card_folder", "write_evaluation"]


def card_folder(source: str) -> Path:
    """Return the folder whose card is to be written, before the evaluation; the model must be the user's."""
    if not Path(source).is_dir():
        known = source in packaged_names()
        raise InputError(
            f"--card: {source} is {'a model of the package' if known else 'no folder'}; save it to a folder "
            "and evaluate that, or leave --card out"
        )
    return find_model(source)


def write_evaluation(folder: Path, model: nn.Module, record: Mapping[str, Any]) -> Path:
    """Store the figures of a record of ``driftgen eval`` in ``config.json`` and write the card anew."""
    header, cells = format_rows(record["rows"])
    evaluator, reference = record["evaluator"], record["reference"]
    about = (
        f"{record['rows'][0]['samples']:,} samples in {record['dtype']}, seed {record['seed']}, against "
        f"{reference['count']:,} images of {reference['data']}. Evaluator: "
        f"{', '.join(evaluator[key] for key in ('encoder', 'dtype') if key in evaluator)}; "
        f"driftgen {record['driftgen']}."
    )
    config = read_config(folder)
    source = {**config.source, "evaluation": {"columns": header, "rows": cells, "about": about}}
    write_description(folder, config.model_copy(update={"source": source}), "generator", model)
    return folder / CARD
