"""Descriptions of models: the model card (``README.md`` of a saved model), and one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import driftgen

__all__ = ["describe_generator", "model_card"]

SHOWN_CLASSES = 3  # of more than one too many
LONGEST_OPTION = 200  # characters of the table; a policy has the range of every dimension
APART = ("license", "evaluation")  # entries of a model's source that are not in the list of its origin

_GENERATOR = """import driftgen as dg

pipe = dg.DriftPipeline.from_pretrained("this/folder")
images = pipe(labels=[0], guidance={guidance:g}, seed=0)  # one network call per image"""
_ENCODER = """import driftgen as dg

encoder = dg.load_model("this/folder")
features = encoder.features(images)  # images [B, C, H, W] in [-1, 1]"""
_POLICY = """import driftgen as dg

policy = dg.DriftingPolicy.from_pretrained("this/folder")
policy.reset()
action = policy.select_action(observation)  # a dict by key, such as observation.state"""
_USAGE = {"generator": _GENERATOR, "encoder": _ENCODER, "policy": _POLICY}
# What a model is, and its tag on the Hub.
_KINDS = {
    "policy": ("A policy", "robotics"),
    "generator": ("A one-step generator", "one-step-generation"),
    "encoder": ("An encoder", "feature-extraction"),
}


def model_card(
    architecture: str,
    kind: str,
    parameters: int,
    options: Mapping[str, Any],
    source: Mapping[str, Any],
    guidance: float,
) -> str:
    """Return the text of the card, with the metadata block that the Hugging Face Hub reads.

    ``source["license"]`` and ``source["evaluation"]`` have places of their own. An evaluation has the entries
    ``columns``, ``rows`` (of cells) and ``about``.
    """
    what, tag = _KINDS[kind]
    usage = _USAGE[kind].format(guidance=guidance)
    rows = "\n".join(f"| {key} | {_option(value)} |" for key, value in options.items())
    told = {key: value for key, value in source.items() if key not in APART}
    origin = "".join(f"- {key}: {value}\n" for key, value in told.items()) or "- not recorded\n"
    licensed = f"license: {_line(source['license'])}\n" if source.get("license") else ""
    return f"""---
library_name: driftgen
{licensed}tags:
- drifting-models
- {tag}
---
# {architecture}, {_count(parameters)}

{what} for [Drifting Models](https://lambertae.github.io/projects/drifting), saved by driftgen
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


def _evaluation(facts: Any) -> str:
    """Return the section of an evaluation; empty without one, or if another program wrote something else."""
    try:
        cells = [[_line(cell) for cell in row] for row in (facts["columns"], *facts["rows"])]
        about = _line(facts["about"], 600)
    except (KeyError, TypeError):
        return ""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(
        ["Evaluation:", "", lines[0], "|" + "---|" * len(cells[0]), *lines[1:], "", about, "", ""]
    )


def _option(value: Any) -> str:
    text = str(value)
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
