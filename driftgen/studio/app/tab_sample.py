"""The Sample tab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.studio.app.downloads import file_name
from driftgen.studio.app.tab_html import show_message, show_pictures
from driftgen.studio.app.workshop import Workshop, say_errors, whole
from driftgen.studio.requests_and_answers import MOST_IMAGES, MOST_ROWS, SampleRequest

__all__ = ["build_sample_tab"]

MOST_SEED = 2**31 - 1
MODES = {
    "Images": "samples",
    "Same noise, several guidance values": "guidance",
    "Walk between two noises": "walk",
}
WELCOME = "Choose a model and press Generate: every image takes one network call."


def build_sample_tab(gr: Any, page: Any, workshop: Workshop) -> None:
    """Add the tab to a page."""
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            model = gr.Dropdown(
                [],
                label="Model",
                info="A shipped model, a run, or a name on the Hugging Face Hub: owner/repository",
                allow_custom_value=True,
                # A choice made before the list is there would be replaced by the answer that brings it.
                interactive=False,
                elem_id="model",
            )
            told = gr.HTML("", apply_default_css=False, elem_id="model-told", elem_classes="told")
            classes = gr.Dropdown(
                [],
                label="Classes",
                info="None: all in turn",
                multiselect=True,
                allow_custom_value=True,
                elem_id="classes",
            )
            mode = gr.Radio(list(MODES), value="Images", label="Show", elem_id="mode")
            guidance = gr.Slider(
                1, 8, 1, step=0.1, label="Guidance", info="1 is none; more is closer to the class"
            )
            number = gr.Slider(
                1,
                MOST_IMAGES,
                16,
                step=1,
                label="Number of images or rows",
                info=f"At most {MOST_ROWS} rows",
            )
            with gr.Row():
                seed = gr.Number(0, label="Seed", precision=0, min_width=110, elem_id="seed")
                second = gr.Number(1, label="Second seed", precision=0, min_width=110, visible="hidden")
            generate = gr.Button("Generate", variant="primary", elem_id="generate")
            other = gr.Button("Generate with a new seed", elem_id="new-seed")
            nearest = gr.Button("Nearest training images", elem_id="nearest")
        with gr.Column(scale=3, min_width=300, elem_id="results"):
            output = gr.HTML(show_message(WELCOME), apply_default_css=False, elem_id="images")
    described = gr.State("")  # the model that the classes and the guidance belong to
    # The button that was pressed last, and when. Hidden, but part of the page: it reports its changes.
    pressed = gr.Textbox("", label="Pressed", visible="hidden", elem_id="pressed")

    async def start() -> tuple[Any, ...]:
        try:
            entries = await workshop.sample("list_models", None)
        except InputError as error:
            return (gr.Dropdown(interactive=True), gr.skip(), gr.skip(), say_errors(error), "")
        first = entries[0].name if entries else None
        choices = [(entry.label, entry.name) for entry in entries]
        facts = await describe(first, "")
        workshop.import_views()
        return (gr.Dropdown(choices=choices, value=first, interactive=True), *facts)

    async def describe(chosen: str | None, before: str) -> tuple[Any, ...]:
        """Return the classes and the guidance of a model, and a sentence if it does not load."""
        named = str(chosen or "")
        # The box reports an input whenever it loses the focus. That must not clear the chosen classes.
        if named and named == before:
            return (gr.skip(), gr.skip(), gr.skip(), gr.skip())
        try:
            facts = await workshop.sample("describe", named)
        except InputError as error:
            return gr.Dropdown(choices=[], value=[]), gr.skip(), say_errors(error), ""
        return (
            gr.Dropdown(choices=list(facts.classes), value=[]),
            gr.Slider(value=facts.guidance, maximum=facts.highest),
            "",
            named,
        )

    def request(values: tuple[Any, ...]) -> SampleRequest:
        chosen, names, alpha, first_seed, last_seed, count, shown = values
        if not isinstance(alpha, int | float):
            raise InputError(f"guidance is {alpha!r}: give a number")
        if not isinstance(names, list | None):
            raise InputError(f"classes are {names!r}: give a list of names")
        return SampleRequest(
            model=str(chosen or ""),
            classes=tuple(str(name) for name in names or ()),
            guidance=float(alpha),
            seed=whole("seed", first_seed, 0, MOST_SEED),
            number=whole("number", count, 1, MOST_IMAGES),
            mode=MODES.get(str(shown), "samples"),  # type: ignore[arg-type]
            second_seed=whole("second seed", last_seed, 0, MOST_SEED),
        )

    async def answer(*values: Any) -> str:
        method = "nearest" if str(values[-1]).startswith("nearest") else "sample"
        try:
            asked = request(values[:-1])
            pictures = await workshop.sample(method, asked)
        except (InputError, OSError) as error:
            return say_errors(error)
        name = f"{file_name(Path(asked.model).name).strip('-') or 'model'}-seed-{asked.seed}"
        made = f"{asked.model}, seed {asked.seed}"
        return show_pictures(pictures, name, made, workshop.downloads)

    inputs = [model, classes, guidance, seed, second, number, mode, pressed]
    # One at a time: gradio keeps the order of arrival within a queue.
    queue = {"concurrency_limit": 1, "concurrency_id": "sampling"}
    # Requests may overtake each other on their way to a busy server. So the images are written by the buttons
    # alone: what a choice of a model has to say goes elsewhere.
    facts = [classes, guidance, told, described]
    page.load(start, None, [model, *facts], show_progress="hidden", api_visibility="private")
    # Not `change`, which also follows the answer to `load`.
    # Gradio would drop a choice that is made while another is being answered.
    model.input(
        describe, [model, described], facts, api_visibility="private", trigger_mode="always_last", **queue
    )
    mode.change(
        None,
        mode,
        second,
        js="(mode) => ({__type__: 'update', visible: mode.startsWith('Walk') || 'hidden'})",
        show_progress="hidden",
        api_visibility="private",
    )
    # The buttons share one event, so that one request for images is under way: of two, the older answer could
    # come last. A button that is pressed meanwhile counts as soon as that request is answered.
    hidden = {"show_progress": "hidden", "api_visibility": "private"}
    generate.click(None, None, pressed, js="() => `sample ${Date.now()}`", **hidden)
    nearest.click(None, None, pressed, js="() => `nearest ${Date.now()}`", **hidden)
    draw = f"() => [Math.floor(Math.random() * {MOST_SEED}), `sample ${{Date.now()}}`]"
    other.click(None, None, [seed, pressed], js=draw, **hidden)
    pressed.change(answer, inputs, output, api_name="sample", trigger_mode="always_last", **queue)
