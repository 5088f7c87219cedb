"""The demonstration: three beginnings and one generator, on one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from driftgen.data.toy import get_toy
from driftgen.files import make_folder
from driftgen.progress import drawing, track
from driftgen.report.page import Section, write_page
from driftgen.report.toy import provenance, title_of, write_evolution
from driftgen.training.toy import INITS, ToyConfig, evolve

__all__ = ["metric_rows", "run_demo"]

INTRODUCTION = """
<p>A Drifting Model is a network that turns noise into a sample in <b>one</b> call. It gets there because
training moves the distribution of its samples (<span class="orange">orange</span>) toward the data (<span
class="blue">blue</span>) along a <i>drifting field</i> V: data attracts, generated samples repel each other,
and where both distributions match the two forces cancel.</p> <p>Watch two things below: samples reach every
mode, wherever they start, and the mean squared drift falls by orders of magnitude until only sampling noise
is left.</p>
"""
TEXTS = {
    "between": "<p>All points start between the two modes. Half of them go each way.</p>",
    "far": "<p>All points start far from both modes, where the kernel is nearly flat.</p>",
    "collapsed": "<p>All points sit on one mode, the state in which other methods stay. Here they repel "
    "each other, and the empty mode attracts them.</p>",
}
GENERATOR_TEXT = """<p>A small network is trained with the plain drifting loss, whose value is the mean
squared drift. The picture shows what the same noise becomes as training goes on; at the end one call of the
network gives these samples.</p>"""


def run_demo(out: Path, seed: int = 0, steps: int | None = None) -> Path:
    """Runs everything and writes ``report.html`` into ``out``; gives its path. ``steps`` shortens every
    run.
    """
    runs = [("bimodal", ToyConfig(init=init, seed=seed, steps=steps), TEXTS[init]) for init in INITS]
    runs.append(("swiss-roll", ToyConfig(generator=True, steps=steps or 2000, seed=seed), GENERATOR_TEXT))
    make_folder(out)
    sections = []
    for name, config, text in runs:
        title = title_of(name, config)
        folder = out / (f"{name}-generator" if config.generator else f"{name}-{config.init}")
        command = _command(name, config, folder)
        with track(folder.name, config.total_steps, "drift") as on_step:
            evolution = evolve(get_toy(name), config, on_step)
        with drawing():
            picture, animation, _ = write_evolution(evolution, folder, command)
        sections.append(Section(title, text, picture, animation, metric_rows(evolution.metrics), command))
    source = provenance("driftgen demo")
    versions = f"driftgen {source['driftgen']}, torch {source['torch']}, {source['hardware']}"
    footer = f"Made by <code>driftgen demo</code> with {versions}, seed {seed}."
    return write_page(out / "report.html", "Drifting Models, seen drifting", INTRODUCTION, sections, footer)


def metric_rows(metrics: dict[str, Any]) -> dict[str, str]:
    """The figures of a toy run, ready to be read."""
    rows = {
        "energy distance to fresh data, at the start": f"{metrics['energy_distance_at_start']:.4f}",
        "energy distance at the end": f"{metrics['energy_distance']:.4f}",
        "energy distance of data to data": f"{metrics['energy_distance_of_data_to_itself']:.4f}",
        "mean squared drift, at the start": f"{metrics['drift_at_start']:.1e}",
        "mean squared drift at the end": f"{metrics['drift_at_end']:.1e}",
        "fell by a factor of": f"{metrics['drift_ratio']:.3g}",
    }
    if "mode_shares" in metrics:
        rows["poorest mode has, of its due"] = f"{metrics['least_mode_share']:.2f}"
    rows["seconds"] = f"{metrics['seconds']:.1f}"
    return rows


def _command(name: str, config: ToyConfig, out: Path) -> str:
    words = ["driftgen", "toy", name, "--init", config.init]
    if config.generator:
        words += ["--generator", "--steps", str(config.total_steps)]
    return shlex.join([*words, "--seed", str(config.seed), "--out", str(out)])
