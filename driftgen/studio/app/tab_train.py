"""The Train tab."""

from __future__ import annotations

from typing import Any

from driftgen.errors import InputError
from driftgen.studio.app.tab_html import show_folder, show_job, show_message, show_text
from driftgen.studio.app.workshop import Workshop, say_errors

__all__ = ["TRAIN_SECONDS", "build_train_tab"]

TRAIN_SECONDS = 2.0  # between two looks at the training
SIZES = ("auto", "tiny", "small", "base")


def build_train_tab(gr: Any, tab: Any, timer: Any, workshop: Workshop) -> None:
    """Add the tab to a page; its timer runs while the tab is shown."""
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            data = gr.Dropdown(
                [],
                label="Images",
                info=f"A folder in {workshop.folders.data.resolve()}, with one folder per class",
                allow_custom_value=True,
                elem_id="data",
            )
            size = gr.Radio(list(SIZES), value="auto", label="Size", info="auto fits this machine")
            name = gr.Textbox("", label="Name of the run", placeholder="that of the folder", max_length=100)
            check = gr.Button("Check the images", elem_id="check")
            cost = gr.Button("Estimate time and memory", elem_id="cost")
            command = gr.Textbox(
                "", label="Command", lines=2, interactive=False, buttons=["copy"], elem_id="command"
            )
            with gr.Row():
                start = gr.Button("Start training", variant="primary", elem_id="start", min_width=110)
                stop = gr.Button("Stop", variant="stop", elem_id="stop", min_width=110)
        with gr.Column(scale=2, min_width=300):
            output = gr.HTML(
                show_message("Choose a folder of images, then check it."),
                apply_default_css=False,
                elem_id="folder",
            )
            # Apart from the images: an estimate takes minutes, and would replace a newer check.
            estimated = gr.HTML("", apply_default_css=False, elem_id="estimate", elem_classes="told")
            told = gr.HTML("", apply_default_css=False, elem_id="job-told", elem_classes="told")
            job = gr.HTML("", apply_default_css=False, elem_id="job")
    shown = gr.State("")
    inputs = [data, size, name]

    def planned(chosen: str | None, how_large: str, run: str) -> Any:
        from driftgen.studio.folder_check import train_command

        return train_command(str(chosen or ""), str(how_large), str(run or ""), workshop.folders)

    def open_tab() -> tuple[Any, ...]:
        from driftgen.studio.folder_check import list_datasets

        html = show_job(workshop.job.state())
        return gr.Dropdown(choices=list_datasets(workshop.folders)), html, html

    def describe(*values: Any) -> str:
        try:
            return str(planned(*values).text)
        except (InputError, OSError):
            return ""

    def look(chosen: str | None) -> str:
        from driftgen.studio.folder_check import check_folder

        try:
            return show_folder(str(chosen), check_folder(str(chosen or ""), workshop.folders))
        except (InputError, OSError) as error:
            return say_errors(error)

    def estimate(*values: Any) -> str:
        from driftgen.studio.folder_check import measure_cost

        try:
            plan = planned(*values)
            return show_text(f"Estimate from two steps of {plan.text}", measure_cost(plan))
        except (InputError, OSError) as error:
            return say_errors(error)

    def begin(*values: Any) -> tuple[str, str, str]:
        try:
            html = show_job(workshop.job.start(planned(*values)))
        except (InputError, OSError) as error:
            html = show_job(workshop.job.state())
            return say_errors(error), html, html
        return "", html, html

    def end() -> tuple[str, str, str]:
        try:
            html = show_job(workshop.job.stop())
        except (InputError, OSError) as error:
            html = show_job(workshop.job.state())
            return say_errors(error), html, html
        return "", html, html

    def watch(before: str) -> tuple[Any, Any, Any]:
        state = workshop.job.state()
        html = show_job(state)
        if html == before:
            return gr.skip(), gr.skip(), gr.skip()
        # A training that ends also ends the reason why another one was refused.
        return (gr.skip() if state.running else ""), html, html

    hidden = {"api_visibility": "private"}
    # One event with three triggers, so that one question is under way: of two, the older answer could come
    # last, and its command would be copied.
    gr.on(
        [box.change for box in inputs],
        describe,
        inputs,
        command,
        trigger_mode="always_last",
        show_progress="hidden",
        **hidden,
    )
    check.click(look, data, output, api_name="check")
    cost.click(estimate, inputs, estimated, api_name="estimate", concurrency_limit=1)
    # One at a time, so that the newest state of the training is the last to arrive. A refusal has a place of
    # its own, which the timer leaves alone while a training prints.
    queue = {"concurrency_limit": 1, "concurrency_id": "training"}
    tab.select(open_tab, None, [data, job, shown], **hidden, **queue)
    start.click(begin, inputs, [told, job, shown], api_name="train", **queue)
    stop.click(end, None, [told, job, shown], api_name="stop", **queue)
    timer.tick(watch, shown, [told, job, shown], show_progress="hidden", **hidden, **queue)
