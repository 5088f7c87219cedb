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
from driftgen.ops import attention as attention_ops

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of a run before the first test is timed."""
    import_module("matplotlib.pyplot")
    import_module("torch._dynamo")  # an optimizer imports it
    import_module("driftgen.training.run")


def load(path):
    return json.loads((ROOT / "results" / path).read_text())


def assert_figures(path, *figures):
    """Assert that a document shows these figures outside its generated tables, in bold or not."""
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", (ROOT / path).read_text(), flags=re.DOTALL)
    text = " ".join(text.replace("**", "").split())
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", text), f"{path}: {figure}"


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
    "folder",
    [
        "collapse-digits",
        "loss-cpu",
        "loss-h200",
        "playground",
        "serve",
        "speed-cpu",
        "speed-h200",
        "step-h200",
        "studio",
    ],
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
        blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
        fenced = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
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
        if words[:1] == ["torchrun"] and "driftgen" in words:
            words = words[words.index("driftgen") :]
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
    assert_figures("README.md", f"{time:.0%}", f"{memory:.0%}")


@pytest.mark.slow
def test_readme_example_runs(tmp_path, monkeypatch):
    """The ten lines, as they stand, with fewer steps."""
    code, pretrained = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "from_pretrained" in pretrained
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    monkeypatch.chdir(tmp_path)
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
    code = (ROOT / "examples" / "train_own_network.py").read_text()
    short = code.replace('"steps": 900, "warmup": 200', '"steps": 10, "warmup": 5')
    assert short != code
    exec(compile(short, "train_own_network.py", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "runs" / "digits" / "three.png").is_file()


def test_no_placeholder_is_left():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]:
        assert not re.search(r"\{[a-z_]+\}", page.read_text()), page.name


def test_reconstruction_figure_comes_from_results():
    figures = load("tokenizer-taef2/metrics.json")["figures"]
    assert_figures("docs/models.md", f"{figures['psnr_db']['mean']:.1f} dB", f"{figures['images']:,}")


def test_figures_of_the_text_on_scaling_come_from_the_estimate():
    from tools.cluster_estimate import PARAMETERS, loss_bytes

    assert_figures("docs/scaling.md", f"{loss_bytes():,} bytes", f"{4 * PARAMETERS / 1e6:.0f} MB")


def test_figures_of_the_text_on_performance_come_from_results():
    """Figures beside the table, which ``make tables`` writes."""
    (step,) = load("speed-h200/step.json")["rows"]
    assert (step["release"]["seconds"], step["release"]["peak_bytes"]) == (0.560, 127 * 2**30)
    (small,) = load("speed-h200/cifar10.json")["rows"]
    cold, warm, launches = (load(f"speed-h200/cifar10-{name}.json") for name in ("cold", "third", "launches"))
    figures = [f"{run['steps_per_second']:.1f}" for run in (small, launches)]
    figures += [f"{run['first_step_seconds']:.0f} s" for run in (cold, warm)]
    sampled = {(r["preset"], r["batch"], r["mode"]): r for r in load("speed-h200/sampling.json")["rows"]}
    graph, pipeline = sampled["B/2", 1, "graph"], sampled["B/2", 256, "pipeline"]
    figures += [f"{1000 * row['seconds']:.3g} ms" for row in (graph, graph["references"]["eager"], pipeline)]
    _, _, plain, checkpointed, _ = load("speed-h200/levers.json")["rows"]
    for row in (plain, checkpointed):
        figures += [f"{row['peak_bytes'] / 2**30:.0f}", f"{1000 * row['seconds']:.0f}"]
    loss, sampling = (load(f"speed-cpu/{name}.json")["rows"][0] for name in ("loss", "sampling"))
    figures += [f"{loss['seconds']:.2f} s", f"{loss['references']['plain']['ratio']:.1f} times"]
    figures += [f"{1000 * sampling['seconds']:.0f} ms"]
    assert_figures("docs/performance.md", *figures)


def test_figures_of_the_text_on_cifar10_come_from_results():
    muon_fast, adamw, two = (
        load(f"cifar10/experiments/{name}.json") for name in ("muon-fast", "adamw", "two-encoders")
    )
    rates = (f"{run['samples_per_second']:,.0f}" for run in (muon_fast, adamw, two))
    assert_figures("results/cifar10/experiments.md", *rates)
    curve = [point["ema"]["0.999"]["FID"] for point in two["curve"]]
    assert_figures("results/cifar10/README.md", f"{min(curve):.1f}", f"{curve[-1]:.1f}")
    assert_figures("docs/index.md", f"{muon_fast['seconds'] / 3600:.2f} hours")


def test_figures_of_the_text_on_the_h200_come_from_its_results():
    """Figures beside the tables, which ``make tables`` writes."""
    figures = []
    (recorded,) = load("speed-h200/step-graph.json")["rows"]
    cold, warm, launches = (load(f"speed-h200/cifar10-{name}.json") for name in ("cold", "third", "launches"))
    rates = (f"{run['steps_per_second']:.1f}" for run in (launches, warm))
    peaks = (f"{run['peak_bytes'] / 2**30:.1f}" for run in (launches, warm))
    figures += [f"{' to '.join(rates)} steps", f"{' to '.join(peaks)} GiB"]
    figures += [f"{run['first_step_seconds']:.0f} s" for run in (cold, warm)]
    losses = load("speed-cpu/cifar10-losses.json")
    assert losses["first"] == losses["now"]
    _, overlapped, plain, checkpointed, pytorch = load("speed-h200/levers.json")["rows"]
    figures += [f"{row['peak_bytes'] / 2**30:.0f}" for row in (plain, checkpointed, pytorch)]
    figures += [f"{1000 * row['seconds']:.0f}" for row in (plain, checkpointed, overlapped, pytorch)]
    figures += [f"{row['seconds']:.3f} s" for row in (recorded, plain)]
    for name in ("-float32", ""):
        pytorch, *rows = load(f"speed-h200/attention{name}.json")["rows"]
        (ours,) = (row for row in rows if attention_ops.BACKWARD.items() <= row.items())
        figures += [f"{row['forward'] + row['backward']:.2f}" for row in (pytorch, ours)]
    first, now = (load(f"speed-cpu/{name}.json")["rows"] for name in ("host-first", "host"))
    for before, after in zip(first, now, strict=True):
        figures += [f"{1000 * before['seconds']:.3g}", f"{1000 * after['seconds']:.2g} ms"]
    (waits,) = load("speed-cpu/prefetch.json")["rows"]
    figures += [f"{1000 * waits['waits_seconds']:.1f}", f"{1000 * waits['waits_seconds_without']:.0f} ms"]
    assert_figures("results/speed-h200/README.md", *figures)
