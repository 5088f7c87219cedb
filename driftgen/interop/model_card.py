"""The model card: the ``README.md`` of a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import driftgen

__all__ = ["model_card"]

_GENERATOR = """import driftgen as dg

pipe = dg.DriftPipeline.from_pretrained("this/folder")
images = pipe(labels=[0], guidance={guidance:g}, seed=0)  # one network call per image"""
_ENCODER = """import driftgen as dg

encoder = dg.load_model("this/folder")
features = encoder.features(images)"""


def model_card(
    architecture: str,
    kind: str,
    parameters: int,
    options: Mapping[str, Any],
    source: Mapping[str, Any],
    guidance: float,
) -> str:
    """Return the text of the card, with the metadata block that the Hugging Face Hub reads."""
    usage = _GENERATOR.format(guidance=guidance) if kind == "generator" else _ENCODER
    rows = "\n".join(f"| {key} | {value} |" for key, value in options.items())
    origin = "".join(f"- {key}: {value}\n" for key, value in source.items()) or "- not recorded\n"
    return f"""---
library_name: driftgen
tags:
- drifting-models
- one-step-generation
---
# {architecture}, {parameters / 1e6:.1f}M parameters

{kind.capitalize()} for [Drifting Models](https://lambertae.github.io/projects/drifting), saved by driftgen
{driftgen.__version__}.

```python
{usage}
```

Origin of the weights:

{origin}
| option | value |
|---|---|
{rows}
"""
