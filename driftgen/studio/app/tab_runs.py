"""The Runs tab."""

from __future__ import annotations

from typing import Any

from driftgen.errors import InputError
from driftgen.studio.app.tab_html import show_message
from driftgen.studio.app.workshop import Workshop, say_errors

__all__ = ["RUNS_SECONDS", "build_runs_tab"]

RUNS_SECONDS = 2.0  # between two looks at the files
NONE = "(none)"


def build_runs_tab(gr: Any, tab: Any, timer: Any, workshop: Workshop) -> None:
    """Add the tab to a page; its timer runs while the tab is shown."""
    with gr.Row():
        run = gr.Dropdown([], label="Run", elem_id="run", min_width=240)
        other = gr.Dropdown([NONE], value=NONE, label="Compare with", elem_id="other-run", min_width=240)
    output = gr.HTML(show_message("Reading the runs ..."), apply_default_css=False, elem_id="run-page")
    version = gr.State("")

    def box(names: list[str], before: str | None, after: str) -> Any:
        """Return the update of a dropdown. A choice that stays is not sent: there may be a newer one."""
        return gr.Dropdown(choices=names) if before == after else gr.Dropdown(choices=names, value=after)

    def look(chosen: str | None, compared: str | None, before: str) -> tuple[Any, ...]:
        names = workshop.runs.names()
        if not names:
            text = f"There is no run in {workshop.folders.runs} yet: start one on the Train tab."
            return gr.Dropdown(choices=[], value=None), gr.skip(), show_message(text), ""
        first = chosen if chosen in names else names[0]
        second = compared if compared in names else None
        shown = [first] if second is None else [first, second]
        now = f"{names} {shown} {workshop.runs.version(*shown)}"
        if now == before:
            return gr.skip(), gr.skip(), gr.skip(), gr.skip()
        try:
            html = workshop.runs.show(first) if second is None else workshop.runs.compare(first, second)
        except (InputError, OSError) as error:
            html = say_errors(error)
        others = box([NONE, *names], compared, second or NONE)
        return box(names, chosen, first), others, html, now

    inputs, outputs = [run, other, version], [run, other, output, version]
    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    # One event with four triggers: a page has one question under way, and asks again with its newest choices
    # if one of them came up meanwhile. Of two at once, the answer to an older choice could come last.
    triggers = [timer.tick, tab.select, run.input, other.input]
    gr.on(triggers, look, inputs, outputs, trigger_mode="always_last", **quiet)
