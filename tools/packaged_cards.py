"""Write README.md of the packaged models from their config.json: ``python -m tools.packaged_cards``."""

from __future__ import annotations

from driftgen.interop.model_card import model_card
from driftgen.interop.packaged import FOLDER, packaged_names
from driftgen.interop.saved_config import CARD, read_config
from driftgen.model_io import load_model

KINDS = {"PolicyNetwork": "policy"}


def packaged_card(name: str) -> str:
    """Return the card of a packaged model, which is loaded by its name."""
    config = read_config(FOLDER / name)
    count = sum(parameter.numel() for parameter in load_model(FOLDER / name).parameters())
    kind = KINDS.get(config.architecture, "generator")
    return model_card(
        config.architecture, kind, count, config.options, config.source, config.guidance, place=name
    )


if __name__ == "__main__":
    for name in packaged_names():
        (FOLDER / name / CARD).write_text(packaged_card(name), encoding="utf-8")
        print(FOLDER / name / CARD)
