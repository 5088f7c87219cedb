"""Inspect the machine: Python, torch, devices and the optional extras."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import driftgen

__all__ = ["EXTRAS", "Extra", "Finding", "examine", "install_command"]


@dataclass(frozen=True)
class Extra:
    """An optional extra: its modules and their purpose."""

    modules: tuple[str, ...]
    purpose: str


# The extras that something in the package uses.
EXTRAS = {
    "latent": Extra(("diffusers",), "tokenizers: SD-VAE and tiny autoencoders"),
    "encoders": Extra(("transformers",), "pretrained feature encoders"),
    "eval": Extra(("torchmetrics",), "FID, KID, Inception score"),
    "datasets": Extra(("datasets",), "Hugging Face datasets"),
    "policy": Extra(
        ("gymnasium", "gym_pusht", "zarr", "h5py", "imageio"), "robot policies: PushT, demonstrations, videos"
    ),
    "serve": Extra(("fastapi", "uvicorn", "prometheus_client"), "sampling as a service"),
    "onnx": Extra(("onnx", "onnxruntime", "onnxscript"), "export of models to ONNX"),
    "studio": Extra(("gradio", "psutil"), "the studio, a page to sample, watch and train"),
    "tracking": Extra(("tensorboard", "wandb"), "experiment tracking"),
    "dev": Extra(("pytest", "hypothesis", "mypy", "ruff"), "tests and checks"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``ok`` is None for an optional part that is absent."""

    name: str
    value: str
    ok: bool | None
    advice: str = ""


def examine() -> list[Finding]:
    """Inspect the machine without importing any extra."""
    old = sys.version_info < (3, 11)
    threads = torch.get_num_threads()
    findings = [
        Finding("driftgen", driftgen.__version__, True),
        Finding("Python", platform.python_version(), not old, "install Python 3.11 or newer" if old else ""),
        Finding("torch", torch.__version__, True),
        Finding("CPU", f"{platform.machine()}, {threads} thread{'s' if threads > 1 else ''}", True),
        *_accelerators(),
    ]
    for name, extra in EXTRAS.items():
        missing = [m for m in extra.modules if not _installed(m)]
        if missing:
            advice = f"to install: {install_command(name)}"
            value = f"{extra.purpose}: {', '.join(missing)} not installed"
            findings.append(Finding(f"[{name}]", value, None, advice))
        else:
            versions = ", ".join(f"{m} {_version(m)}" for m in extra.modules)
            findings.append(Finding(f"[{name}]", f"{extra.purpose}: {versions}", True))
    return findings


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout if this is one, else by name."""
    root = Path(__file__).resolve().parents[1]
    constraints = root / "constraints.txt"
    if not (root / "pyproject.toml").is_file() or not constraints.is_file():
        return f"pip install 'driftgen[{extra}]'"
    if root == Path.cwd():
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install -c {shlex.quote(str(constraints))} -e {shlex.quote(f'{root}[{extra}]')}"


def _accelerators() -> list[Finding]:
    gpus = [
        Finding(
            f"GPU {i}",
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}",
            True,
        )
        for i, p in enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    ]
    if torch.backends.mps.is_available():
        gpus.append(Finding("GPU", "Apple (mps)", True))
    if gpus:
        return gpus
    if torch.version.cuda is None:
        advice = "for an NVIDIA GPU, install a CUDA build of torch"
        return [Finding("GPU", "none: this torch is a CPU build", None, advice)]
    advice = "check the driver with nvidia-smi"
    return [Finding("GPU", f"none found by torch (CUDA {torch.version.cuda})", None, advice)]


def _installed(module: str) -> bool:
    # A folder of that name in the working directory has a spec too, but no origin.
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _version(module: str) -> str:
    return importlib.metadata.version(module.replace("_", "-"))
