"""Numbers, links and examples of the documents agree with the results and the code."""

import functools
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer

import driftgen as dg
from benchmarks.tune import save
from driftgen import model_io
from driftgen.ops import attention as attention_ops

ROOT = Path(__file__).parent.parent
INITS = ("between", "far", "collapsed")


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of a run before the first test is timed."""
    import_module("matplotlib.pyplot")
    import_module("driftgen.training.run")


def load(path):
    return json.loads((ROOT / "results" / path).read_text())


def readme_figures():
    """The cells of the README's table of numbers, from the results."""
    toy = {
        kind: [load(f"toy-bimodal/{kind}-{init}/metrics.json") for init in INITS]
        for kind in ("points", "generator")
    }
    study = load("toy-antisymmetry/generator/metrics.json")["runs"]
    good, *broken = (run["energy_distance"] for run in study.values())
    rows = load("loss-cpu/base8.json")["rows"]
    speed = (
        rows["plain, one call per feature and temperature"]["seconds"]
        / rows["driftgen.DriftingLoss"]["seconds"]
    )
    sampled = load("speed-h200/sampling.json")["rows"]
    wanted = {"preset": "B/2", "mode": "graph", "batch": 256}
    (best,) = (row["images_per_second"] for row in sampled if wanted.items() <= row.items())
    (step,) = load("speed-h200/step.json")["rows"]
    whole = load("speed-h200/step64.json")["rows"][0]
    digits = load("demo-digits/evaluation.json")["figures"]
    recognized = digits["recognized" if "recognized" in digits else "recognised"]  # the key of older files
    least = {
        k: (min(r["least_mode_share"] for r in v), min(r["drift_ratio"] for r in v)) for k, v in toy.items()
    }
    return [
        f"{recognized:.1%} recognized; precision {digits['precision_heldout']:.2f}, "
        f"recall {digits['recall_heldout']:.2f}",
        f"points {least['points'][0]:.2f}, generator {least['generator'][0]:.2f}",
        f"points {least['points'][1]:.0f}x, generator {least['generator'][1]:.0f}x",
        f"{good:.3f} against {min(broken):.3f}",
        f"{step['seconds']:.3f} s, {step['peak_bytes'] / 2**30:.0f} GiB",
        f"{whole['seconds']:.2f} s, {whole['peak_bytes'] / 2**30:.0f} GiB",
        f"{best:,.0f} images/s",
        f"{speed:.1f}x as fast",
    ]


@pytest.mark.parametrize("cell", range(8))
def test_readme_numbers_come_from_results(cell):
    assert f"| {readme_figures()[cell]} |" in (ROOT / "README.md").read_text()


def test_results_say_where_they_come_from():
    records = sorted((ROOT / "results").glob("toy-*/**/metrics.json"))
    assert len(records) == 10
    for path in records:
        record = json.loads(path.read_text())
        assert record["command"].startswith("driftgen toy ")
        assert {"hardware", "torch", "driftgen"} <= record.keys()
        for run in record.get("runs", {"": record}).values():
            assert {"seed", "temperature", "steps", "samples"} <= run["config"].keys()
            assert run["evaluator"]


@pytest.mark.parametrize(
    "folder", ["collapse-digits", "loss-cpu", "loss-h200", "speed-cpu", "speed-h200", "step-h200"]
)
def test_measurements_say_where_they_come_from(folder):
    for path in (ROOT / "results" / folder).glob("*.json"):
        record = json.loads(path.read_text())
        missing = {"command", "torch", "hardware", "evaluator"} - {k for k, value in record.items() if value}
        assert not missing, path.name
        assert " /" not in record["command"], path.name


def test_a_benchmark_says_where_its_figures_come_from(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["/somewhere/tune.py", "loss", "--repeats", "3", "--json", str(path)])
    save(None, "by the clock", {"rows": [1]})
    assert not list(tmp_path.iterdir())
    save(path, "by the clock", {"rows": [1]})
    found = json.loads(path.read_text())
    assert found["command"] == "python -m benchmarks.tune loss --repeats 3 --json found.json"
    assert found["evaluator"] == "by the clock"
    assert found["rows"] == [1]
    assert {"torch", "hardware", "driftgen", "gpu"} <= found.keys()


def commands():
    """Every ``driftgen`` command of the documents and of the records in results/."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]:
        text = page.read_text()
        fenced = [
            line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
        ]
        inline = re.findall(r"`(driftgen [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in [*fenced, *inline]:
            for command in line.split("#")[0].split("&&"):
                yield page.name, command.strip()
    for path in (ROOT / "results").rglob("*.json"):
        yield path.name, json.loads(path.read_text()).get("command") or ""


def test_commands_exist_with_their_options():
    from driftgen.cli.root import app

    checked, root = 0, typer.main.get_command(app)
    for where, line in commands():
        words = shlex.split(line)
        if words[:1] != ["driftgen"]:
            continue
        command, words = root, words[1:]
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{where}: {line}"
            command, words = command.commands[words[0]], words[1:]
        known = {"--help"} | {option for parameter in command.params for option in parameter.opts}
        known |= {option for parameter in command.params for option in parameter.secondary_opts}
        unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]
        assert not unknown, f"{where}: {line}"
        checked += 1
    assert checked > 60


def test_antisymmetry_tables_are_those_of_the_runs():
    for kind in ("points", "generator"):
        table = (ROOT / f"results/toy-antisymmetry/{kind}/table.md").read_text()
        for name, run in load(f"toy-antisymmetry/{kind}/metrics.json")["runs"].items():
            assert re.search(
                rf"^\| {re.escape(name)} \|.*\| {run['energy_distance']:.4f} \|", table, re.MULTILINE
            )


def _anchors(page):
    """The headings of a page, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        for target in targets:
            if target.startswith("http"):
                continue
            path, _, heading = target.partition("#")
            place = page.parent / path if path else page
            assert place.exists(), f"{page.name}: {target}"
            if heading:
                assert heading in _anchors(place), f"{page.name}: {target}"


def test_readme_ratios_come_from_results():
    (step,) = load("speed-h200/step.json")["rows"]
    time, memory = (step[key] / step["release"][key] for key in ("seconds", "peak_bytes"))
    assert f"takes {time:.0%} of the time and {memory:.0%} of the memory" in (ROOT / "README.md").read_text()


def test_readme_example_runs(tmp_path, monkeypatch):
    """The ten lines, as they stand, with fewer steps."""
    code, pretrained = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "from_pretrained" in pretrained
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_io, "_REGISTRY", dict(model_io._REGISTRY))
    short = {"optim": {"steps": 40, "warmup": 5}, "output": {"metrics_every": 5}}
    short["batch"] = {"generated": 16, "positives": 32}
    monkeypatch.setattr(dg, "train", functools.partial(dg.train, **short))
    torch.manual_seed(0)
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    run = names["run"]
    first, last = (row["drift"][-1] for row in (run.metrics[0], run.metrics[-1]))
    assert last < 0.6 * first
    assert len(run.pipeline()(labels=[3, 5], seed=0)) == 2
    assert run.evaluate(100).keys() >= {"precision", "recall"}
    assert run.report.is_file()


def test_the_loop_written_out_runs(capsys):
    code = (ROOT / "examples" / "train_two_moons.py").read_text().replace("range(1000)", "range(101)")
    exec(compile(code, "train_two_moons.py", "exec"), {"__name__": "__main__"})
    first, last = ([float(x) for x in line.split()[1:]] for line in capsys.readouterr().out.splitlines())
    assert all(after < before / 2 for before, after in zip(first, last, strict=True))


def test_the_example_of_an_own_network_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_io, "_REGISTRY", dict(model_io._REGISTRY))
    code = (ROOT / "examples" / "train_own_network.py").read_text()
    short = code.replace('"steps": 900, "warmup": 200', '"steps": 10, "warmup": 5')
    assert short != code
    exec(compile(short, "train_own_network.py", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "runs" / "digits" / "three.png").is_file()


def test_no_placeholder_is_left():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]:
        assert not re.search(r"\{[a-z_]+\}", page.read_text()), page.name


def test_the_table_of_parameters_is_what_the_code_has():
    from tests.support.parameter_table import table

    assert table() in (ROOT / "docs" / "models.md").read_text()


def test_reconstruction_figure_comes_from_results():
    figures = load("tokenizer-taef2/metrics.json")["figures"]
    text = (ROOT / "docs" / "models.md").read_text()
    assert f"{figures['psnr_db']['mean']:.1f} dB PSNR" in text
    assert f"{figures['images']:,} validation images" in text


def test_figures_of_earlier_versions_come_from_results():
    text = (ROOT / "results" / "README.md").read_text()
    for row in load("step-h200/step.json")["rows"]:
        if "seconds" in row:
            assert f"{row['seconds']:.2f} s and {row['memory_gib']:.0f} GiB" in text
    found = load("cifar10-first/summary.json")
    assert f"{found['generator']['steps_per_second']:.2f} steps a second" in text
    assert f"{found['generator']['memory_gib']:.1f} GiB for the generator" in text
    assert f"{found['encoder']['steps_per_second']:.1f} steps of 512 images" in text
    (small,), (step,) = (load(f"speed-h200/{name}.json")["rows"] for name in ("cifar10", "step"))
    now = f"{small['steps_per_second']:.1f} steps a second and {small['peak_bytes'] / 2**30:.1f} GiB now"
    assert now in text
    assert f"{step['seconds']:.3f} s and {step['peak_bytes'] / 2**30:.0f} GiB for the same step" in text


def test_the_trial_of_initializations_comes_from_results():
    text = (ROOT / "docs" / "training.md").read_text()
    for row in load("collapse-digits/metrics.json")["rows"].values():
        cells = " | ".join(f"{row[name]:.2f}" for name in ("diversity", "precision", "recall"))
        assert f"| {cells} |" in text


def test_the_estimate_for_many_cards_comes_from_what_one_was_measured_at():
    from tests.support.cluster_estimate import (
        PARAMETERS,
        efficiency,
        exchange_seconds,
        loss_bytes,
        table,
    )

    text = (ROOT / "docs" / "scaling.md").read_text()
    assert table() in text
    assert f"{loss_bytes():,} bytes" in text
    assert f"{4 * PARAMETERS / 1e6:.0f} MB" in text
    # One card exchanges nothing; two exchange the gradient once.
    assert exchange_seconds(1, 1e9) == (0, 0)
    assert exchange_seconds(2, 1e9)[0] == pytest.approx(4 * PARAMETERS / 1e9, rel=1e-3)
    worst, best = efficiency(1.0, 64, 50e9)
    assert worst < best < 1


def test_headline_figures_come_from_results():
    """The guide of performance repeats a few figures of the results."""
    text = (ROOT / "docs/performance.md").read_text()
    (step,) = load("speed-h200/step.json")["rows"]
    assert f"| {step['seconds']:.3f} s | {step['peak_bytes'] / 2**30:.0f} GiB | 0.560 s, 127 GiB |" in text
    assert step["release"]["seconds"] == 0.560
    assert step["release"]["peak_bytes"] == 127 * 2**30
    for row in load("speed-h200/step64.json")["rows"]:
        assert f"| {row['seconds']:.2f} s | {row['peak_bytes'] / 2**30:.0f} GiB | does not fit |" in text
    (small,) = load("speed-h200/cifar10.json")["rows"]
    cold, warm, launches = (load(f"speed-h200/cifar10-{name}.json") for name in ("cold", "third", "launches"))
    rate = small["steps_per_second"]
    assert f"`cifar10`, {rate:.1f} steps per second" in text
    assert f"| {1 / rate:.3f} s | {small['peak_bytes'] / 2**30:.1f} GiB | |" in text
    assert (
        f"`cifar10` runs at {rate:.1f} steps per second with it and {launches['steps_per_second']:.1f}"
        in text
    )
    seconds = cold["first_step_seconds"], warm["first_step_seconds"]
    assert "takes {:.0f} s without compiler caches and {:.0f} s with them".format(*seconds) in text
    pretrain = load("speed-h200/pretrain.json")["rows"][0]
    assert f"`mae-cifar10`, {pretrain['samples_per_second']:,.0f} samples per second" in text
    assert f"| {pretrain['queued_seconds']:.3f} s | {pretrain['peak_bytes'] / 2**30:.1f} GiB | |" in text
    largest = load("speed-h200/loss.json")["rows"][0]
    assert (
        f"| {1000 * largest['seconds']:.3g} ms | {largest['peak_ratio']:.2f} times inputs + outputs |" in text
    )
    sampled = {(r["preset"], r["batch"], r["mode"]): r for r in load("speed-h200/sampling.json")["rows"]}
    for mode in ("graph", "fp8"):
        row = sampled["B/2", 256, mode]
        assert f"{row['images_per_second']:,.0f} images/s" in text
        assert f"| {1000 * row['seconds']:.3g} ms |" in text
    graph = sampled["B/2", 1, "graph"]
    one = [1000 * seconds for seconds in (graph["seconds"], graph["references"]["eager"]["seconds"])]
    assert "{:.3g} ms instead of {:.3g} ms for a batch of one".format(*one) in text
    _, _, plain, checkpointed, _ = load("speed-h200/levers.json")["rows"]
    memory = [row["peak_bytes"] / 2**30 for row in (checkpointed, plain)]
    times = [1000 * row["seconds"] for row in (checkpointed, plain)]
    assert "{:.0f} instead of {:.0f} GiB for {:.0f} instead of {:.0f} ms".format(*memory, *times) in text


def test_diary_figures_come_from_results():
    text = (ROOT / "results/speed-h200/README.md").read_text()
    for row in load("speed-h200/loss.json")["rows"]:
        ours, queued = (f"{1000 * row[name]:.3g} ms" for name in ("seconds", "queued_seconds"))
        assert f"| {ours} | {queued} |" in text
        assert f"| {row['peak_ratio']:.2f} |" in text
    parts = []
    for name in ("step-first", "step-second", "step-third", "step"):
        (step,) = load(f"speed-h200/{name}.json")["rows"]
        found = {}
        for cost in step["profile"]:
            found[cost["phase"]] = found.get(cost["phase"], 0) + 1000 * cost["seconds"]
        parts.append([found["generator"], found["encoder"], found["loss"], 1000 * step["seconds"]])
    labels, columns = ("generator,", "encoder,", "loss", "whole step"), zip(*parts, strict=True)
    for label, figures in zip(labels, columns, strict=True):
        line = next(line for line in text.splitlines() if line.startswith(f"| {label}"))
        assert line.endswith("| " + " | ".join(f"{x:.0f}" for x in figures) + " |"), line
    for row in load("speed-h200/sampling.json")["rows"]:
        assert f"{1000 * row['seconds']:.3g} ms" in text, row["detail"]
    for row in load("speed-h200/sampling-large.json")["rows"]:
        assert f"{1000 * row['seconds']:.3g} ms" in text, row["detail"]
    for row in load("speed-h200/step64.json")["rows"]:
        assert f"| **{row['seconds']:.2f} s** | **{row['peak_bytes'] / 2**30:.0f} GiB** |" in text
    (step,), (half,) = (load(f"speed-h200/{name}.json")["rows"] for name in ("step", "step-16"))
    for row, digits, mark in ((step, 3, "**"), (half, 3, ""), (step["references"]["eager"], 2, "")):
        cells = f"{row['seconds']:.{digits}f} s", f"{row['peak_bytes'] / 2**30:.0f} GiB"
        assert "| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |" in text
    (recorded,) = load("speed-h200/step-graph.json")["rows"]
    assert f"[{recorded['seconds']:.3f} s](step-graph.json)" in text
    (small,) = load("speed-h200/cifar10.json")["rows"]
    cold, warm, launches = (load(f"speed-h200/cifar10-{name}.json") for name in ("cold", "third", "launches"))
    for run, mark in ((small, "**"), (warm, ""), (launches, "")):
        cells = f"{run['steps_per_second']:.1f}", f"{run['peak_bytes'] / 2**30:.1f} GiB"
        assert "| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |" in text
    assert f"takes {cold['first_step_seconds']:.0f} s without compiler caches" in text
    assert f"and {warm['first_step_seconds']:.0f} s with them" in text
    losses = load("speed-cpu/cifar10-losses.json")
    assert losses["first"] == losses["now"]
    _, overlapped, plain, checkpointed, pytorch = load("speed-h200/levers.json")["rows"]
    peaks = [f"{row['peak_bytes'] / 2**30:.0f}" for row in (plain, checkpointed, pytorch)]
    times = [f"{1000 * row['seconds']:.0f}" for row in (plain, checkpointed, overlapped, pytorch)]
    assert f"| {peaks[0]} to {peaks[1]} GiB for {times[0]} to {times[1]} ms " in text
    assert f"| {times[2]} against {times[0]} ms" in text
    assert f"| {times[3]} to {times[0]} ms, {peaks[2]} to {peaks[0]} GiB " in text
    assert f"[{plain['seconds']:.3f} s](levers.json)" in text
    for name, words in (("-float32", "of a layer"), ("", "in bfloat16")):
        pytorch, *rows = load(f"speed-h200/attention{name}.json")["rows"]
        (ours,) = (row for row in rows if attention_ops.BACKWARD.items() <= row.items())
        before, after = (row["forward"] + row["backward"] for row in (pytorch, ours))
        assert f"{words} {before:.2f} to {after:.2f} ms" in text
    first, now = (load(f"speed-cpu/{name}.json")["rows"] for name in ("host-first", "host"))
    for before, after in zip(first, now, strict=True):
        assert f"from {1000 * before['seconds']:.3g} to {1000 * after['seconds']:.2g} ms" in " ".join(
            text.split()
        )
    (waits,) = load("speed-cpu/prefetch.json")["rows"]
    found = [1000 * waits[name] for name in ("waits_seconds", "waits_seconds_without")]
    assert "waits {:.1f} instead of {:.0f} ms".format(*found) in text
    pretrain = load("speed-h200/pretrain.json")["rows"][0]
    eager, contiguous = (pretrain["references"][name] for name in ("eager", "contiguous"))
    for row, mark in ((pretrain, "**"), (eager, ""), (contiguous, "")):
        seconds = row["queued_seconds"]
        cells = f"{512 / seconds:,.0f}", f"{1000 * seconds:.1f} ms", f"{row['peak_bytes'] / 2**30:.1f} GiB"
        assert "| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |" in text
