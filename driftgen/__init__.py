"""Drifting Models: generators that turn noise into a sample in one network call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from driftgen.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from driftgen import data, evaluation, features, generators, tokenizers
    from driftgen.data.queue import SampleQueue
    from driftgen.drift import guidance
    from driftgen.drift.field import drift_field, mmd_field
    from driftgen.drift.loss import DriftingLoss, LossOutput
    from driftgen.interop.official import load_official
    from driftgen.model_io import load_model, register_encoder, register_generator, save_model
    from driftgen.pipeline import DriftPipeline
    from driftgen.policy.drifting_policy import DriftingPolicy
    from driftgen.training.config import PretrainConfig, TrainConfig
    from driftgen.training.policy_config import PolicyConfig
    from driftgen.training.run import Run

__version__ = "0.1.0"
__all__ = [
    "DriftPipeline",
    "DriftingLoss",
    "DriftingPolicy",
    "InputError",
    "LossOutput",
    "Run",
    "SampleQueue",
    "data",
    "drift_field",
    "evaluation",
    "features",
    "generators",
    "guidance",
    "load_model",
    "load_official",
    "mmd_field",
    "pretrain",
    "register_encoder",
    "register_generator",
    "save_model",
    "tokenizers",
    "train",
]

# Imported on first use: importing torch takes seconds, and help texts need none of them.
_LAZY = {
    "DriftPipeline": "driftgen.pipeline",
    "DriftingLoss": "driftgen.drift.loss",
    "DriftingPolicy": "driftgen.policy.drifting_policy",
    "LossOutput": "driftgen.drift.loss",
    "Run": "driftgen.training.run",
    "SampleQueue": "driftgen.data.queue",
    "drift_field": "driftgen.drift.field",
    "load_model": "driftgen.model_io",
    "load_official": "driftgen.interop.official",
    "mmd_field": "driftgen.drift.field",
    "register_encoder": "driftgen.model_io",
    "register_generator": "driftgen.model_io",
    "save_model": "driftgen.model_io",
}
_ROOMS = ("data", "features", "generators", "tokenizers")


def train(
    recipe: str | Path | TrainConfig | PolicyConfig,
    out: str | Path | None = None,
    *,
    data: Any = None,
    generator: Any = None,
    encoders: Any = None,
    init: str | Path | None = None,
    state: str | Path | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
    override: bool = False,
    size: str | None = None,
    pretrain: bool | Callable[[str], bool] = False,
    **changes: Any,
) -> Run:
    """Train a one-step generator or a policy, as ``driftgen train`` does: same loop, checkpoints, resume and
    report.

    Example::

        run = dg.train("digits", data=(images, labels), generator=net, optim={"steps": 500})
        run.pipeline()(labels=[0, 1], seed=0)
        dg.train("photos", pretrain=True)  # a folder of images; trains an encoder for them first

    Args:
        recipe: name of a packaged recipe, path of a ``.yaml`` file, a configuration, or the path of a folder
            or an array of images for the recipe ``folder``.
        out: folder of the run; a run in it is resumed. None creates ``runs/RECIPE``, with a number if that
            exists.
        data: arrays ``(images, labels)`` or ``images``, from NumPy or PyTorch; a dataset of (image, label);
            a ``datasets.Dataset``; or a path as in :func:`driftgen.data.images.open_images`. See
            :func:`driftgen.data.in_memory.open_memory`. For a policy, :class:`driftgen.policy.episodes.
            Episodes` or a path as in :func:`driftgen.policy.episode_files.open_episodes`.
        generator: a network of your own with the methods of :class:`~driftgen.generators.Generator`. It is
            trained in place.
        encoders: a list of encoders of your own, each a module with ``features(x)`` or a pair (module,
            switches), or paths of saved encoders. Modules are frozen in place. If two of them have a feature
            of the same name, features are named ``encoder0/NAME``, ``encoder1/NAME``.
        init: initial weights of the generator, from any model that :func:`load_model` loads. Not used if
            ``out`` has a checkpoint.
        state: a compact state of ``driftgen convert state`` to resume from. Not used if ``out`` has a
            checkpoint.
        device: ``"cpu"`` or ``"cuda"``; a GPU if there is one and this is None.
        name: name of the run in its report; that of the recipe if None.
        override: resume a run although its configuration differs.
        size: ``"auto"``, ``"tiny"``, ``"small"`` or ``"base"``, for the recipe ``folder``; None for auto.
        pretrain: permission to pretrain an encoder first, if the recipe says ``encoders: auto`` and there is
            none for this data; a function that gets the question and returns the answer is called. If
            pretraining is interrupted, the run of the encoder is returned.
        changes: values of the recipe, by section (``optim={"steps": 100}``) or by dotted key
            (``**{"optim.steps": 100}``).
    """
    return _start_run(
        "train",
        recipe,
        out,
        changes,
        data=data,
        generator=generator,
        encoders=encoders,
        init=init,
        state=state,
        device=device,
        name=name,
        override=override,
        size=size,
        pretrain=pretrain,
    )


def pretrain(
    recipe: str | Path | PretrainConfig,
    out: str | Path | None = None,
    *,
    data: Any = None,
    state: str | Path | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
    override: bool = False,
    size: str | None = None,
    **changes: Any,
) -> Run:
    """Train an encoder (a masked autoencoder), as ``driftgen pretrain`` does. See :func:`train`."""
    return _start_run(
        "pretrain",
        recipe,
        out,
        changes,
        data=data,
        state=state,
        device=device,
        name=name,
        override=override,
        size=size,
    )


def _start_run(
    task: Any, recipe: Any, out: Any, changes: dict[str, Any], pretrain: Any = False, **options: Any
) -> Run:
    # Training does not know the report: this is where the two meet.
    from driftgen.report.run_page import write_report
    from driftgen.report.terminal import LiveView
    from driftgen.training.run import start_run
    from driftgen.training.run_start import Permission

    if not callable(pretrain) and not isinstance(pretrain, bool):
        raise InputError(f"pretrain is a {type(pretrain).__name__}: pass True, False or a function that asks")
    permission = Permission(ask=pretrain) if callable(pretrain) else Permission(bool(pretrain))
    options |= {"view": LiveView, "report": write_report, "permission": permission, "changes": changes}
    return start_run(task, recipe, out, **options)


def __getattr__(name: str) -> Any:
    if name == "evaluation":
        for module in ("density_coverage", "digits", "neighbors", "points", "precision_recall"):
            import_module(f"driftgen.evaluation.{module}")
        return import_module("driftgen.evaluation")
    if name in _ROOMS:
        return import_module(f"driftgen.{name}")
    if name == "guidance":
        return import_module("driftgen.drift.guidance")
    if name not in _LAZY:
        raise AttributeError(f"module 'driftgen' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
