"""Find the folder of a model by what a user writes: a path, a name of the package, or a name on the Hub."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from driftgen.errors import InputError
from driftgen.interop import hub
from driftgen.interop.official import is_official
from driftgen.interop.packaged import find_packaged, packaged_names
from driftgen.interop.run_models import RUN_CONFIG, choose_weights, find_run_model
from driftgen.interop.saved_config import CONFIG, read_config
from driftgen.support.checked_arguments import checked
from driftgen.support.user_paths import expand_user

__all__ = ["find_model", "holds_policy", "is_missing_folder"]


@checked
def find_model(source: str, weights: str | None = None) -> Path:
    """Return the folder of a model, downloaded if need be.

    ``source`` is the name of a model that ships with the package (``digits``), a folder of
    :func:`~driftgen.model_io.save_model`, a training run, one of the authors' artifacts,
    ``owner/repository``, or ``hf://name``. ``weights`` is one of
    :func:`~driftgen.interop.run_models.weight_sets`; a run's first average if None.
    """
    folder = expand_user(source)
    packaged = find_packaged(source)
    if packaged is not None and not _is_model(folder):  # a folder of this name may hold anything else
        folder = packaged
    elif source.startswith("hf://") or not folder.exists():
        if is_missing_folder(source):
            # A name on the Hub whose owner is also the name of a folder here.
            online = hub.is_hub_name(source) and not source.startswith("runs/")
            advice = f"; on the Hugging Face Hub: hf://{source}" if online else ""
            raise InputError(f"{source} not found: {_neighbors(folder)}{advice}", topic="not-found")
        if not hub.is_hub_name(source):
            raise InputError(
                f"{source} does not exist: give a folder, owner/repository, hf://name, or a model of the "
                f"package ({', '.join(packaged_names())})",
                topic="not-found",
            )
        folder = hub.fetch(source)
    return (find_run_model(folder) or folder) if weights is None else choose_weights(folder, weights)


def is_missing_folder(source: str) -> bool:
    """Return True for a local path that does not exist: one below a folder that exists, or below runs.

    It is no name on the Hub, which must not be asked for it.
    """
    place = expand_user(source)
    if source.startswith("hf://") or place.exists():
        return False
    local = place.is_absolute() or source.startswith(("./", "../", "runs/"))
    return local or Path(place.parts[0]).is_dir()


def _neighbors(place: Path) -> str:
    """Say what is there instead of a missing folder."""
    parent = place.parent
    names = sorted(path.name for path in parent.iterdir() if _is_model(path)) if parent.is_dir() else []
    if not names:
        return f"{parent} holds no run or model; make one with driftgen train or driftgen policy train"
    near = get_close_matches(place.name, names, n=3) or names[:3]
    more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
    return f"{parent} has {', '.join(near)}{more}"


def holds_policy(source: str, weights: str | None = None) -> bool:
    """Return True if a model is a policy; the arguments are those of :func:`find_model`."""
    folder = find_model(source, weights)
    return not is_official(folder) and read_config(folder).architecture == "PolicyNetwork"


def _is_model(folder: Path) -> bool:
    """Return True if the folder is a saved model, a run, or an artifact."""
    return any((folder / name).is_file() for name in (CONFIG, RUN_CONFIG)) or is_official(folder)
