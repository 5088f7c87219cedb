"""Descriptions of models: the model card (``README.md`` of a saved model), and one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import driftgen

__all__ = ["HERE", "describe_generator", "model_card", "saved_source"]

# In the code of a card: its own folder, whose path no file can know.
HERE = '".")  # run in this folder; elsewhere, give its path'

SHOWN_CLASSES = 3  # of more than one too many
LONGEST_OPTION = 200  # characters of the table; a policy has the range of every dimension
APART = ("license", "evaluation")  # entries of a model's source that are not in the list of its origin

_GENERATOR = """import driftgen as dg

pipe = dg.DriftPipeline.from_pretrained({load}
images = pipe(labels=[0], guidance={guidance:g}, seed=0)  # one network call per image"""
_ENCODER = """import driftgen as dg
import torch

encoder = dg.load_model({load}
images = torch.zeros({images})  # yours: [B, C, H, W], pixels in [-1, 1]
features = encoder.features(images)"""
_POLICY = """import driftgen as dg
import numpy as np

policy = dg.DriftingPolicy.from_pretrained({load}
policy.reset()
# One step of the environment, in its units.
observation = {{{observation}}}
action = policy.select_action(observation)"""
_USAGE = {"generator": _GENERATOR, "encoder": _ENCODER, "policy": _POLICY}
_TAGS = {"policy": "robotics", "generator": "one-step-generation", "encoder": "feature-extraction"}
_PAPER = "[Drifting Models](https://lambertae.github.io/projects/drifting)"


def model_card(
    architecture: str,
    kind: str,
    parameters: int,
    options: Mapping[str, Any],
    source: Mapping[str, Any],
    guidance: float,
    place: str | None = None,
) -> str:
    """Return the text of the card, with the metadata block that the Hugging Face Hub reads.

    ``source["license"]`` and ``source["evaluation"]`` have places of their own. An evaluation has the entries
    ``columns``, ``rows`` (of cells) and ``about``. ``place`` is the name to load the model by; None for the
    card's own folder.
    """
    usage = _USAGE[kind].format(
        load=HERE if place is None else f'"{place}")',
        guidance=guidance,
        observation=_zeros(options.get("observations")),
        images=", ".join(map(str, _shape(options))),
    )
    rows = "\n".join(f"| {key} | {_option(value)} |" for key, value in options.items())
    told = {key: value for key, value in source.items() if key not in APART}
    origin = "".join(f"- {key}: {_plain(value)}\n" for key, value in told.items()) or "- not recorded\n"
    licensed = f"license: {_line(source['license'])}\n" if source.get("license") else ""
    return f"""---
library_name: driftgen
{licensed}tags:
- drifting-models
- {_TAGS[kind]}
---
# {architecture}, {_count(parameters)}

{_sentence(kind, options)}, saved by driftgen
{driftgen.__version__}.

```python
{usage}
```

{_evaluation(source.get("evaluation"))}Origin of the weights:

{origin}
| option | value |
|---|---|
{rows}
"""


def _sentence(kind: str, options: Mapping[str, Any]) -> str:
    if kind == "generator":
        return f"A one-step generator for {_PAPER}"
    if kind == "encoder":
        return f"An encoder for {_PAPER}"
    method = options.get("method", "drifting")
    if method == "drifting":
        return f"A robot policy of one network call per chunk of actions, trained as in {_PAPER}"
    return f"A robot policy trained by {_line(method)}, a baseline of {_PAPER}"


def _zeros(observations: Any) -> str:
    """Return the entries of an observation of zeros, as code."""
    if not isinstance(observations, Mapping):
        return ""
    shapes = {str(key): tuple(shape) for key, shape in observations.items()}
    return ", ".join(
        f'"{key}": np.zeros({list(shape)}, np.{"uint8" if len(shape) == 3 else "float32"})'
        for key, shape in shapes.items()
    )


def _shape(options: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return a shape of images that an encoder takes. Backbones take what those of ImageNet have."""
    channels, patch = options.get("in_channels"), options.get("patchify", 1)
    if isinstance(channels, int) and isinstance(patch, int):
        return 2, channels, 32 * patch, 32 * patch
    return 2, 3, 224, 224


def saved_source(source: Mapping[str, Any], model: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the source of a model that is saved in a dtype.

    An evaluation then belongs to the weights before they were rounded, and says so.
    """
    facts = source.get("evaluation")
    stored = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtype in (None, torch.float32) or stored == {dtype} or not isinstance(facts, Mapping):
        return dict(source)
    note = f"Measured before the weights were rounded to {str(dtype).removeprefix('torch.')}."
    about = str(facts.get("about", ""))
    return {**source, "evaluation": {**facts, "about": about if note in about else f"{about} {note}".strip()}}


def _evaluation(facts: Any) -> str:
    """Return the section of an evaluation; empty without one, or if another program wrote something else."""
    try:
        cells = [[_line(cell) for cell in row] for row in (facts["columns"], *facts["rows"])]
        about = _line(facts["about"], 1000)
    except (KeyError, TypeError):
        return ""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(
        ["Evaluation:", "", lines[0], "|" + "---|" * len(cells[0]), *lines[1:], "", about, "", ""]
    )


def _plain(value: Any) -> str:
    """Return a value as text without the brackets and quotes of Python."""
    if value is None or (isinstance(value, Mapping | Sequence) and not value):
        return "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return ", ".join(_plain(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _option(value: Any) -> str:
    text = _plain(value)
    return text if len(text) <= LONGEST_OPTION else "see config.json"


def _line(value: Any, longest: int = 100) -> str:
    return " ".join(str(value).replace("|", " ").split())[:longest]


def describe_generator(
    generator: nn.Module,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> list[str]:
    """Return what is known of a generator: class, parameters, samples, classes.

    ``tokenizer`` decodes its latents; None for images, or for latents without a tokenizer.
    """
    count = sum(p.numel() for p in generator.parameters())
    facts = [type(generator).__name__, _plural(count, "parameter")]
    config = getattr(generator, "config", None)
    side, channels = getattr(config, "input_size", None), getattr(config, "in_channels", None)
    if side is not None and channels is not None:
        latents = tokenizer is not None or channels not in (1, 3)
        kind = "latents" if latents else "pixels"
        facts.append(f"{side}x{side} {kind} with {_plural(channels, 'channel')}")
    if tokenizer is not None:
        decoded = "" if side is None else f" to {side * tokenizer.factor}x{side * tokenizer.factor} pixels"
        facts[-1] += f", decoded by {type(tokenizer).__name__}{decoded}"
    if num_classes is not None:
        facts.append(f"{num_classes} class{'' if num_classes == 1 else 'es'}")
        if class_names:
            more = len(class_names) > SHOWN_CLASSES + 1
            shown = [*class_names[:SHOWN_CLASSES], "..."] if more else class_names
            facts[-1] += f" ({', '.join(shown)})"
    return facts


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M parameters" if parameters >= 10**6 else _plural(parameters, "parameter")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
