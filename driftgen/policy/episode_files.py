"""Readers of demonstrations: Diffusion Policy, robomimic, Relay Kitchen, BlockPush and LeRobot."""

from __future__ import annotations

import lzma
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.episodes import STATE, Episodes
from driftgen.policy.observation_keys import BLOCKPUSH, PUSHT, ROBOMIMIC, choose_keys, observe
from driftgen.policy.zarr_chunks import array_names, check_chunks
from driftgen.support.untrusted_files import check_memory, check_regular, read_array, read_arrays, reading

__all__ = ["open_episodes"]

KITCHEN = ("observations_seq.npy", "actions_seq.npy", "existence_mask.npy")
HDF5 = (".hdf5", ".h5")
FORMS = (
    "a .zarr folder or .zarr.zip file of Diffusion Policy, a robomimic .hdf5 file, an .npz file, a folder "
    f"with {KITCHEN[0]}, or a LeRobot folder"
)


def open_episodes(
    path: str | Path, observe: str | None = None, *, limit: int | None = None, subset: str | None = None
) -> Episodes:
    """Open demonstrations of any known layout.

    ============================== ==================================================================
    ``NAME.zarr``, ``.zarr.zip``   Diffusion Policy and BlockPush: ``data/*``, ``meta/episode_ends``
    ``NAME.npz``                   the same arrays in one file, with ``episode_ends``
    ``NAME.hdf5``                  robomimic: ``data/demo_k/obs/*``, ``data/demo_k/actions``
    folder, ``existence_mask.npy`` Relay Kitchen: ``observations_seq.npy``, ``actions_seq.npy``
    folder, ``meta/info.json``     LeRobot: ``data/chunk-*/*.parquet``, frames stored as images
    folder with one such file      that file
    ============================== ==================================================================

    Args:
        path: file or folder.
        observe: observations of the policy: a preset or array names separated by commas. PushT:
            ``keypoints`` (default), ``pose``, ``image``. robomimic: ``state`` (default), ``image``.
        limit: number of episodes to read, from the first; None for all.
        subset: list of episodes stored in a robomimic file under ``mask/``, such as ``train``.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist: pass {FORMS}")
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: read at least one episode")
    reader = _recognize(path)
    if reader is None and path.is_dir():
        inner = [entry for entry in sorted(path.iterdir()) if _recognize(entry)]
        if len(inner) > 1:
            names = ", ".join(entry.name for entry in inner[:5])
            raise InputError(f"{path} holds several data sets ({names}): pass one of them")
        if inner:
            path, reader = inner[0], _recognize(inner[0])
    if reader is None:
        raise InputError(f"{path} is not a known data set: pass {FORMS}")
    if subset is not None and reader is not _read_robomimic:
        raise InputError(f"subset={subset!r}: {path} is no robomimic file; leave the option out")
    with reading(path, "demonstrations"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, about other files in its folder; of NumPy, about casts
        return reader(path, observe, limit, subset)


Reader = Callable[[Path, str | None, int | None, str | None], Episodes]


def _recognize(path: Path) -> Reader | None:
    if path.is_dir():
        if (path / ".zgroup").exists() or (path / "zarr.json").exists():
            return _read_zarr
        if any((path / name).exists() for name in KITCHEN):
            return _read_kitchen
        return _read_lerobot if (path / "meta" / "info.json").exists() else None
    if path.suffix in HDF5:
        return _read_robomimic
    if path.name.endswith(".zarr.zip"):
        return _read_zarr
    return _read_npz if path.suffix == ".npz" else None


def _read_zarr(path: Path, wanted: str | None, limit: int | None, subset: str | None) -> Episodes:
    try:
        import zarr
    except ImportError:
        raise InputError(
            f"{path}: reading zarr needs zarr: pip install 'driftgen[policy]'", topic="missing-extra"
        ) from None
    for file in [path] if path.is_file() else path.rglob("*"):
        if not file.is_dir():
            check_regular(file)
    with reading(path, "zarr"):
        store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
        root: Any = zarr.open_group(store, mode="r")
        members = {name: root[name] for name in array_names(path)}
        check_chunks(path, members)
    if "meta/episode_ends" not in members:
        raise InputError(f"{path} has no meta/episode_ends: store the end of each episode there")
    stored = {key: _ZarrArray(f"{path}: {key}", array) for key, array in members.items()}
    arrays = {key.removeprefix("data/"): a for key, a in stored.items() if key.startswith("data/")}
    return _from_arrays(path, arrays, stored["meta/episode_ends"][:], wanted, limit)


def _read_npz(path: Path, wanted: str | None, limit: int | None, subset: str | None) -> Episodes:
    arrays = read_arrays(path)
    if "episode_ends" not in arrays:
        raise InputError(
            f"{path} has no episode_ends but {', '.join(arrays)}: store the end of each episode there"
        )
    ends = arrays.pop("episode_ends")
    if "img" not in arrays and (frames := _frames_beside(path, len(next(iter(arrays.values()), ())))):
        arrays["img"] = frames
    return _from_arrays(path, arrays, ends, wanted, limit)


class _ZarrArray:
    """An array of a zarr store; what is read is compared with the memory before."""

    def __init__(self, where: str, array: Any) -> None:
        self.where, self.array = where, array

    def __getitem__(self, part: slice) -> NDArray[Any]:
        count, *rest = self.array.shape or (1,)
        rows = len(range(*part.indices(count)))
        check_memory(self.where, rows * math.prod(rest) * self.array.dtype.itemsize)
        return np.asarray(self.array[part])


class _CompressedFrames:
    """Frames in an xz file ``NAME_u8_25650x96x96x3.raw.xz``; decompressed when they are read."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        count = self.shape[0] if part.stop is None else min(part.stop, self.shape[0])
        size = int(np.prod(self.shape[1:])) * count
        check_memory(self.path, size)
        with reading(self.path, "frames"), lzma.open(check_regular(self.path)) as file:
            frames = np.frombuffer(file.read(size), np.uint8)
        if len(frames) != size:
            raise InputError(f"{self.path} holds {len(frames)} bytes, its name says {size}")
        return frames.reshape(count, *self.shape[1:])


def _frames_beside(path: Path, steps: int) -> _CompressedFrames | None:
    for file in sorted(path.parent.glob("*.raw.xz")):
        sizes = re.search(r"_u8_(\d+)x(\d+)x(\d+)x(\d+)\.raw\.xz$", file.name)
        if sizes and int(sizes[1]) == steps:
            return _CompressedFrames(file, tuple(int(size) for size in sizes.groups()))
    return None


def _from_arrays(
    path: Path, arrays: Mapping[str, Any], ends: NDArray[Any], wanted: str | None, limit: int | None
) -> Episodes:
    """Build episodes from arrays over all steps; presets depend on the names of the arrays."""
    names = {key.removeprefix("obs_"): key for key in arrays}
    action = next((name for name in ("action", "actions") if name in names), None)
    if action is None:
        raise InputError(f"{path} has no action but {', '.join(names) or 'nothing'}: store the actions there")
    stored = [name for name in names if name != action]
    robomimic = "robot0_eef_pos" in stored
    presets = PUSHT if "keypoint" in stored else ROBOMIMIC if robomimic else BLOCKPUSH
    keys = choose_keys(wanted, presets, stored, str(path))
    ends = np.asarray(ends)[:limit]
    steps = int(ends[-1]) if limit is not None and ends.ndim == 1 and len(ends) else None
    part = slice(None, steps)

    def read(name: str) -> NDArray[Any]:
        return np.asarray(arrays[names[name]][part])

    return Episodes(observe(keys, read, str(path)), read(action), ends, str(path))


def _read_robomimic(path: Path, wanted: str | None, limit: int | None, subset: str | None) -> Episodes:
    try:
        import h5py
    except ImportError:
        raise InputError(
            f"{path}: reading HDF5 needs h5py: pip install 'driftgen[policy]'", topic="missing-extra"
        ) from None
    with reading(path, "HDF5"), h5py.File(check_regular(path), "r") as file:
        demos = _demo_names(path, file, subset)[:limit]
        parts, actions = [], []
        for name in demos:
            demo = file["data"][name]
            if "obs" not in demo or "actions" not in demo:
                raise InputError(
                    f"{path}: data/{name} has {', '.join(demo) or 'nothing'}, expected obs and actions; "
                    "extract observations with robomimic's dataset_states_to_obs.py"
                )
            where, stored = f"{path}: data/{name}/obs", demo["obs"]
            keys = choose_keys(wanted, ROBOMIMIC, stored, where)
            parts.append(observe(keys, partial(_whole, stored), where))
            actions.append(demo["actions"][:])
    different = next((i for i, part in enumerate(parts) if _shapes(part) != _shapes(parts[0])), None)
    if different is not None:
        raise InputError(
            f"{path}: observations of {demos[different]} have the shapes {_shapes(parts[different])}, those "
            f"of {demos[0]} {_shapes(parts[0])}: store one kind of episode per file"
        )
    observations = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    ends = np.cumsum([len(part) for part in actions])
    return Episodes(observations, np.concatenate(actions), ends, str(path))


def _whole(group: Any, key: str) -> NDArray[Any]:
    return np.asarray(group[key][:])


def _demo_names(path: Path, file: Any, subset: str | None) -> list[str]:
    """Names of the episodes in the order of their numbers, not of their spelling."""
    names = [name for name in file.get("data", {}) if re.fullmatch(r"demo_\d+", name)]
    if not names:
        raise InputError(f"{path} has no data/demo_0: expected a robomimic file")
    if subset is not None:
        masks = file.get("mask", {})
        if subset not in masks:
            raise InputError(f"subset={subset!r}: {path} has the subsets {', '.join(masks) or '(none)'}")
        chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in masks[subset][:]}
        names = [name for name in names if name in chosen]
        if not names:
            raise InputError(f"subset={subset!r} of {path} is empty: choose another one")
    return sorted(names, key=lambda name: int(name[5:]))


def _read_kitchen(path: Path, wanted: str | None, limit: int | None, subset: str | None) -> Episodes:
    arrays = []
    for name in KITCHEN:
        arrays.append(read_array(path / name, f"expected {KITCHEN}"))
    observations, actions, mask = arrays
    if wanted not in (None, "state"):
        raise InputError(f"observe={wanted!r}: {path} has state alone")
    if mask.ndim != 2 or observations.shape[:2] != mask.shape or actions.shape[:2] != mask.shape:
        shapes = (f"{name} {list(array.shape)}" for name, array in zip(KITCHEN, arrays, strict=True))
        raise InputError(
            f"{path}: shapes are {', '.join(shapes)}: expected [episodes, steps, ...], "
            "episodes and steps of all three equal"
        )
    # The authors of the data publish [steps, episodes]; Diffusion Policy reads [episodes, steps].
    if not _is_prefix(mask):
        observations, actions, mask = (np.swapaxes(a, 0, 1) for a in (observations, actions, mask))
        if not _is_prefix(mask):
            raise InputError(f"{path / KITCHEN[2]}: an episode has gaps: the mask is 1 up to its last step")
    lengths = (mask > 0).sum(axis=1).astype(np.int64)
    kept = [i for i, length in enumerate(lengths.tolist()) if length][:limit]
    if not kept:
        raise InputError(f"{path / KITCHEN[2]} is 0 everywhere: the data set has no step")
    state = np.concatenate([observations[i, : lengths[i]] for i in kept])
    action = np.concatenate([actions[i, : lengths[i]] for i in kept])
    return Episodes({STATE: state}, action, np.cumsum(lengths[kept]), str(path))


def _is_prefix(mask: NDArray[Any]) -> bool:
    """True if every row is 1 up to some step and 0 from there on."""
    return bool((np.diff((mask > 0).astype(np.int8), axis=1) <= 0).all())


def _read_lerobot(path: Path, wanted: str | None, limit: int | None, subset: str | None) -> Episodes:
    from driftgen.policy.lerobot_files import read_lerobot

    return read_lerobot(path, wanted, limit)


def _shapes(observations: Mapping[str, NDArray[Any]]) -> dict[str, list[int]]:
    return {key: list(array.shape[1:]) for key, array in observations.items()}
