"""The Policy tab."""

from __future__ import annotations

from typing import Any

from driftgen.errors import InputError
from driftgen.studio.app.tab_html import show_message, show_video
from driftgen.studio.app.workshop import Workshop, say_errors, whole
from driftgen.studio.requests_and_answers import RolloutRequest

__all__ = ["build_policy_tab"]

MOST_SEED = 2**31 - 1
CHOOSE = "Choose a policy and a seed: the same seed gives the same episode."


def build_policy_tab(gr: Any, tab: Any, workshop: Workshop) -> None:
    """Add the tab to a page."""
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            model = gr.Dropdown(
                [],
                label="Policy",
                info="A shipped policy, a run, or owner/repository",
                allow_custom_value=True,
                # A choice made before the list is there would be replaced by the answer that brings it.
                interactive=False,
                elem_id="policy",
            )
            told = gr.HTML("", apply_default_css=False, elem_id="policy-told", elem_classes="told")
            seed = gr.Number(100_000, label="Seed of the episode", precision=0)
            go = gr.Button("Roll out", variant="primary", elem_id="roll-out")
        with gr.Column(scale=2, min_width=300):
            output = gr.HTML(show_message(CHOOSE), apply_default_css=False, elem_id="episode")

    async def open_tab(chosen: str | None) -> tuple[Any, Any]:
        try:
            entries = await workshop.roll_out("list_models", None)
        except InputError as error:
            return gr.Dropdown(interactive=True), say_errors(error)
        choices = [(entry.label, entry.name) for entry in entries]
        if chosen or not entries:
            return gr.Dropdown(choices=choices, interactive=True), ""
        return gr.Dropdown(choices=choices, value=entries[0].name, interactive=True), ""

    async def roll_out(chosen: str | None, number: Any) -> str:
        try:
            asked = RolloutRequest(str(chosen or ""), whole("seed", number, 0, MOST_SEED))
            return show_video(await workshop.roll_out("roll_out", asked))
        except (InputError, OSError) as error:
            return say_errors(error)

    # The episode is written by the button alone.
    tab.select(open_tab, model, [model, told], api_visibility="private")
    go.click(roll_out, [model, seed], output, api_name="roll_out", concurrency_limit=1)
