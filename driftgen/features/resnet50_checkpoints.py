"""Read published ResNet-50 checkpoints under the names of transformers; every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftgen.errors import InputError, unknown_name
from driftgen.support.untrusted_files import read_tensors

__all__ = ["IMAGENET", "LAYOUTS", "listed", "read_resnet50", "resnet50_arguments"]

DEPTHS = (3, 4, 6, 3)
IMAGENET: tuple[tuple[float, ...], tuple[float, ...]] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Mean and standard deviation that each network was trained with, for images in 0 ... 1.
LAYOUTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "torchvision": IMAGENET,
    "moco": IMAGENET,
    "simclr": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "simclr-v2": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
MOCO = "module.encoder_q."
# Classifiers, projection heads, the momentum encoder and its queue do not contribute to the feature maps.
UNUSED = {
    "torchvision": ("fc.",),
    "moco": (f"{MOCO}fc.", "module.encoder_k.", "module.queue"),
    "simclr": ("fc.",),
    "simclr-v2": ("fc.",),
}
NORM = ("weight", "bias", "running_mean", "running_var")
COUNTER = "num_batches_tracked"  # missing in old files; a frozen network does not use it


def read_resnet50(path: Path, layout: str | None = None) -> tuple[dict[str, Tensor], str]:
    """Return the weights under the names of ``transformers.ResNetModel``, and their layout.

    - ``torchvision``: ``conv1.weight``, ``layer1.0.conv1.weight``, ..., optionally prefixed by ``module.``;
    - ``moco``: the same prefixed by ``module.encoder_q.`` in the entry ``state_dict`` (MoCo v1 and v2);
    - ``simclr``: torchvision's names in the entry ``state_dict`` (tonylins/simclr-converter);
    - ``simclr-v2``: ``net.1.blocks.0.net.0.weight``, ... in the entry ``resnet``, without selective kernels
      (Separius/SimCLRv2-Pytorch, ``r50_1x_sk0``).

    Args:
        path: a ``.safetensors`` file, or a file that ``torch.load`` reads with ``weights_only=True``.
        layout: one of the above; None to detect it.
    """
    if layout is not None and layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    content = _read(path)
    entry = next((e for e in ("state_dict", "resnet") if isinstance(content.get(e), Mapping)), None)
    tensors: dict[str, Any] = dict(content if entry is None else content[entry])
    if layout is None:
        # torchvision's training script writes further entries, SimCLR's converter only this one. The two
        # expect differently normalized inputs, so a wrong guess would go unnoticed.
        only_entry = entry == "state_dict" and len(content) == 1
        layout = _detect_layout(path, tensors, ambiguous=only_entry)
    if layout == "torchvision" and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    names = _names(layout)
    unknown = [n for n in tensors if n not in names and not n.startswith(UNUSED[layout])]
    missing = [n for n in names if n not in tensors and not n.endswith(COUNTER)]
    if unknown or missing:
        problems = "; ".join(listed(w, n) for w, n in (("unknown", unknown), ("missing", missing)) if n)
        raise InputError(f"{path} is not a ResNet-50 in the layout {layout!r}; {problems}")
    state = {}
    for theirs, ours in names.items():
        tensor = tensors.get(theirs, torch.zeros((), dtype=torch.int64))
        if not isinstance(tensor, Tensor):
            raise InputError(f"{path}: {theirs} is of type {type(tensor).__name__}, expected a tensor")
        state[ours] = tensor
    return state, layout


def resnet50_arguments(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of ``transformers.ResNetConfig``; the widths come from the tensors."""
    last = [f"encoder.stages.{i}.layers.0.layer.2.convolution.weight" for i in range(len(DEPTHS))]
    return {
        "embedding_size": len(state["embedder.embedder.convolution.weight"]),
        "hidden_sizes": [len(state[name]) for name in last],
        "depths": list(DEPTHS),
        "layer_type": "bottleneck",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,  # the stride is on the 3x3 convolution, as in torchvision
    }


def listed(label: str, names: list[str]) -> str:
    """Return ``label: name, name, ...`` with at most five names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{label}: {', '.join(names[:5])}{more}"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a .pth or .safetensors file")
    return read_tensors(path)


def _detect_layout(path: Path, tensors: Mapping[str, Any], ambiguous: bool) -> str:
    if any(name.startswith(MOCO) for name in tensors):
        return "moco"
    if "net.0.0.weight" in tensors:
        return "simclr-v2"
    if "conv1.weight" in tensors and ambiguous:
        raise InputError(
            f"{path} may come from SimCLR or from torchvision, whose inputs differ: set layout='simclr' or "
            "layout='torchvision'"
        )
    if "conv1.weight" in tensors or "module.conv1.weight" in tensors:
        return "torchvision"
    names = ", ".join(map(str, list(tensors)[:3])) or "nothing"
    raise InputError(
        f"{path} is not a ResNet-50 of a known layout ({', '.join(LAYOUTS)}): it holds {names} ..."
    )


def _names(layout: str) -> dict[str, str]:
    """Map the name of every tensor in the file to its name in transformers."""
    prefix = MOCO if layout == "moco" else ""
    names = {}
    for ours, torchvision, simclr in _units():
        convolution, norm = simclr if layout == "simclr-v2" else torchvision
        names[f"{prefix}{convolution}.weight"] = f"{ours}.convolution.weight"
        for leaf in (*NORM, COUNTER):
            names[f"{prefix}{norm}.{leaf}"] = f"{ours}.normalization.{leaf}"
    return names


def _units() -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Yield each convolution and its norm: the transformers prefix, then both names in the two layouts."""
    yield "embedder.embedder", ("conv1", "bn1"), ("net.0.0", "net.0.1.0")
    for i, count in enumerate(DEPTHS):
        for k in range(count):
            ours, block, net = (
                f"encoder.stages.{i}.layers.{k}",
                f"layer{i + 1}.{k}",
                f"net.{i + 1}.blocks.{k}",
            )
            for part in range(3):
                torchvision = (f"{block}.conv{part + 1}", f"{block}.bn{part + 1}")
                yield (
                    f"{ours}.layer.{part}",
                    torchvision,
                    (f"{net}.net.{2 * part}", f"{net}.net.{2 * part + 1}.0"),
                )
            if k == 0:
                torchvision = (f"{block}.downsample.0", f"{block}.downsample.1")
                yield (
                    f"{ours}.shortcut",
                    torchvision,
                    (f"{net}.projection.shortcut", f"{net}.projection.bn.0"),
                )
