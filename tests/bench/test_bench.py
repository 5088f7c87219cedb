"""``driftgen bench``: real runs at tiny sizes. Tests check derived figures, never times."""

import json
from dataclasses import replace

import pytest
import torch

from driftgen import pipeline
from driftgen.bench import profiler as profile
from driftgen.bench import sampling_bench as sampling
from driftgen.bench import scaling_bench as scaling
from driftgen.bench import step_bench as step
from driftgen.bench.clock import Timing
from driftgen.bench.loss_bench import TEMPERATURES, Case, default_cases, plain
from driftgen.bench.step_bench import Sizes, build_step, count_operations, step_operations
from driftgen.drift.loss import DriftingLoss
from driftgen.errors import InputError
from driftgen.generators import UNet2D, batched_call
from driftgen.ops import dispatch
from driftgen.ops.cuda_graphs import GraphedFunction
from tests.support.bench_records import CPU, H200, fits

TINY_LOSS = ["--groups", 4, "--generated", 6, "--positives", 5, "--negatives", 3, "--width", 8]
TINY_STEP = [
    "--classes",
    2,
    "--generated",
    2,
    "--positives",
    2,
    "--unconditional",
    1,
    "--depth",
    1,
    "--base",
    8,
]
ROW_FIELDS = {
    "what",
    "detail",
    "fits",
    "seconds",
    "best_seconds",
    "queued_seconds",
    "first_call_seconds",
    "peak_bytes",
    "references",
    "release",
    "floor",
}


def read(path, command):
    record = json.loads(path.read_text())
    for name in ("hardware", "gpu", "torch", "driftgen", "arguments", "evaluator"):
        assert name in record
    assert record["command"].startswith(f"driftgen bench {command} ")
    for row in record["rows"]:
        assert row.keys() >= ROW_FIELDS
        assert row["seconds"] >= row["best_seconds"] > 0
        assert row["first_call_seconds"] > 0
    return record


def test_loss(here, tmp_path):
    done = here(
        "bench", "loss", *TINY_LOSS, "--repeats", 2, "--device", "cpu", "--json", tmp_path / "a/b.json"
    )
    assert done.returncode == 0, done.stderr
    assert "4 x 6/5/3 x 8" in fits(done.stdout)
    record = read(tmp_path / "a" / "b.json", "loss")
    assert record["gpu"] is None
    assert record["arguments"]["groups"] == 4
    (row,) = record["rows"]
    assert row["engine"] == "PyTorch"
    assert row["references"].keys() == {"eager", "plain"}
    assert row["references"]["plain"]["ratio"] == row["references"]["plain"]["seconds"] / row["seconds"]
    assert row["release"] is None
    inputs, outputs = 4 * 14 * 8 * 4, 4 * 6 * 8 * 4
    assert row["floor"]["bytes"] == inputs + outputs
    assert row["floor"]["operations"] == 2 * 4 * 6 * 14 * 8 * 5
    assert row["floor"]["seconds"] is None
    assert row["peak_bytes"] > inputs + outputs
    assert row["peak_ratio"] == row["peak_bytes"] / (inputs + outputs)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.mark.slow
def test_large_groups_are_compared_with_small_ones(here, tmp_path):
    words = ["--groups", 2, "--generated", 80, "--positives", 90, "--unconditional", 0, "--width", "4,8"]
    path = tmp_path / "loss.json"
    done = here("bench", "loss", *words, "--repeats", 1, "--device", "cpu", "--json", path)
    assert done.returncode == 0, done.stderr
    shown = fits(done.stdout)
    assert "per pair" in shown
    assert " ns" in shown
    rows = read(path, "loss")["rows"]
    expected = [name for width in (4, 8) for name in (f"3 x 64/64/16 x {width}", f"2 x 80/90/0 x {width}")]
    assert [row["what"] for row in rows] == expected
    for small, large in (rows[:2], rows[2:]):
        assert small["pair_ratio"] is None
        assert large["pair_ratio"] == pytest.approx(large["pair_seconds"] / small["pair_seconds"])
    assert rows[1]["pair_seconds"] == pytest.approx(rows[1]["seconds"] / (2 * 80 * 170 * 4))


def test_cases():
    paper = Case.paper(256, 2, 16, 16, 4)
    assert len(paper.features) == 86
    assert paper.numbers == 2_474_500  # what the authors' encoder gives
    assert sum(vectors for vectors, _ in paper.features.values()) == 6_734
    # Every default case on a GPU has a figure of the authors' code there.
    cases = default_cases(torch.device("cuda"))
    assert {(c.groups, c.generated, c.positives, c.negatives, c.numbers) for c in cases} == H200.loss.keys()
    assert [len(c.features) for c in default_cases(CPU)] == [86, 1]


@pytest.mark.parametrize("negatives", [0, 3])
def test_plain_is_the_same_loss(negatives):
    case = Case("", 2, 6, 5, negatives, {"a": (3, 8), "b": (1, 4)})
    sets = case.draw(torch.float32, CPU)[: 3 if negatives else 2]
    leaves = [t.requires_grad_() for t in sets[0].values()]
    got, want = plain(*sets), DriftingLoss(TEMPERATURES)(*sets).loss
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_step(here, tmp_path):
    words = [*TINY_STEP, "--repeats", 1, "--device", "cpu", "--profile", "--json", tmp_path / "step.json"]
    done = here("bench", "step", *words)
    assert done.returncode == 0, done.stderr
    assert "2 x 2/2/1" in fits(done.stdout)
    (row,) = read(tmp_path / "step.json", "step")["rows"]
    assert row["references"]["eager"]["ratio"] == 1  # whole, eager, without kernels: the reference itself
    assert row["floor"]["operations"] > 0
    found = {(cost["phase"], cost["name"]) for cost in row["profile"]}
    assert {phase for phase, _ in found} == set(profile.PHASES)
    # Also of the backward pass, which no call of ours goes through.
    assert ("encoder", "aten::convolution_backward") in found
    assert ("generator", "aten::convolution_backward") not in found


@pytest.mark.parametrize(("words", "float32"), [([], True), (["--attention-16"], False)])
def test_attention_is_in_float32_by_default(words, float32, here, tmp_path, monkeypatch):
    """Rows with attention in bfloat16 say so."""
    monkeypatch.setattr(step, "_time_step", lambda *_: (Timing(1.0, 1.0, 1.0, 8), 0))
    options = [*TINY_STEP, "--dtype", "bfloat16", "--device", "cpu", "--json", tmp_path / "step.json"]
    assert here("bench", "step", *options, *words).returncode == 0
    (row,) = read(tmp_path / "step.json", "step")["rows"]
    assert row["sizes"]["attention_float32"] is float32
    assert ("16-bit attention" in row["detail"]) is not float32


def test_variants_of_a_step(monkeypatch):
    """All variants share one reference: whole, eager, without kernels. A variant may run out of memory."""
    timing, seen = Timing(1.0, 1.0, 1.0, 8), []

    def fake(sizes, device, repeats):
        seen.append((sizes.micro, sizes.compile, bool(dispatch.DEVICES)))
        return (None if sizes.micro == 2 else timing), 100

    monkeypatch.setattr(dispatch, "DEVICES", {"cpu"})
    monkeypatch.setattr(step, "_time_step", fake)
    sizes = Sizes(2, 2, 2, 1, preset="S/2-32px", depth=1, base=8, dtype=torch.float32)
    variants = [replace(sizes, compile=True), replace(sizes, micro=2), sizes]
    rows = step.measure_steps(variants, CPU, 1)
    assert seen == [(1, False, False), (1, True, True), (2, False, True), (1, False, True)]
    assert [row.detail for row in rows] == ["whole, compiled", "2 parts, exact", "whole"]
    assert [row.timing for row in rows] == [timing, None, timing]
    assert [row.as_record()["peak_bytes"] for row in rows if row.timing] == [108, 108]
    assert all(row.references == {"eager": timing} for row in rows)


def test_operations_of_a_step_are_those_that_run():
    """The count by formula equals the count of a real step."""
    sizes = Sizes(1, 2, 2, 1, preset="S/2-32px", depth=1, base=32, dtype=torch.float32)
    built = build_step(sizes, CPU)
    want = step_operations(sizes, built)
    counted = count_operations(torch.enable_grad()(built.run))
    assert want == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
def test_operations_of_an_image():
    """B/2 takes 49 GFLOP, attention included."""
    network = sampling.make_generator("B/2").eval()
    assert count_operations(sampling._call(network, 1)) == pytest.approx(49e9, rel=0.01)


def _uncompiled(monkeypatch):
    """Compiling takes a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for module in (sampling, batched_call):
        monkeypatch.setattr(module, "check_compiler", lambda device: None)


@pytest.mark.slow
def test_sampling(here, tmp_path, monkeypatch):
    _uncompiled(monkeypatch)
    words = ["--preset", "28px", "--batch", 1, "--batch", 2, "--repeats", 1, "--device", "cpu"]
    done = here("bench", "sampling", *words, "--json", tmp_path / "sampling.json")
    assert done.returncode == 0, done.stderr
    assert "UNet2D 28px x 2" in fits(done.stdout)
    rows = read(tmp_path / "sampling.json", "sampling")["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (1, "eager"),
        (1, "compiled"),
        (2, "eager"),
        (2, "compiled"),
    ]
    for row in rows:
        assert row["images_per_second"] == row["batch"] / row["seconds"]
        assert row["floor"]["operations"] == row["batch"] * row["operations_an_image"] > 1e8
        assert row["references"].keys() == ({"eager"} if row["mode"] == "compiled" else set())
        assert (row["peak_bytes"] is None) == (row["mode"] == "compiled")


def test_sampling_by_the_pipeline(here, tmp_path, monkeypatch):
    """From labels to samples on the host, each batch at once."""
    _uncompiled(monkeypatch)
    tiny = {"widths": (16,), "blocks": (1,), "attention_levels": (), "style_codebooks": 1}
    monkeypatch.setattr(sampling, "make_generator", lambda preset: UNet2D(input_size=8, **tiny))
    called = []
    real = pipeline.DriftPipeline.__call__

    def record(self, labels, **options):
        called.append((labels, options))
        return real(self, labels, **options)

    monkeypatch.setattr(pipeline.DriftPipeline, "__call__", record)
    words = [
        "--preset",
        "28px",
        "--batch",
        3,
        "--repeats",
        1,
        "--device",
        "cpu",
        "--json",
        tmp_path / "s.json",
    ]
    assert here("bench", "sampling", *words, "--mode", "pipeline").returncode == 0
    (row,) = read(tmp_path / "s.json", "sampling")["rows"]
    assert (row["mode"], row["detail"], row["peak_bytes"]) == ("pipeline", "pipeline", None)
    assert row["references"].keys() == {"eager"}
    assert len(called) >= 5  # cold, three times warm, by the clock
    assert all(call == ([0, 0, 0], {"seed": 0, "output": "latent"}) for call in called)
    called.clear()
    assert here("bench", "sampling", *words, "--mode", "stream").returncode == 0
    (row,) = read(tmp_path / "s.json", "sampling")["rows"]
    assert (row["mode"], row["detail"]) == ("stream", "pipeline, 8 batches")
    assert all(call == ([0] * 24, {"seed": 0, "output": "latent"}) for call in called)
    assert row["images_per_second"] == pytest.approx(3 / row["seconds"])
    monkeypatch.setattr(sampling, "timed", lambda *a, **k: Timing(8.0, 4.0, 9.0, None, 7.0))
    assert here("bench", "sampling", *words, "--mode", "stream").returncode == 0
    (row,) = read(tmp_path / "s.json", "sampling")["rows"]
    assert (row["seconds"], row["best_seconds"], row["queued_seconds"]) == (1.0, 0.5, None)  # of one batch


def test_modes_without_being_told(monkeypatch):
    assert sampling.default_modes(CPU, ["32px"]) == ["eager", "compiled"]
    gpu = torch.device("cuda")
    monkeypatch.setattr(sampling, "check_fp8", lambda device: None)
    assert sampling.default_modes(gpu, ["B/2", "L/2"]) == list(sampling.MODES)
    without = ["eager", "compiled", "graph", "pipeline", "stream"]
    assert sampling.default_modes(gpu, ["B/2", "32px"]) == without
    monkeypatch.undo()
    assert sampling.default_modes(CPU, ["B/2"]) == ["eager", "compiled"]

    def old(device):
        raise InputError("an old card")

    monkeypatch.setattr(sampling, "check_fp8", old)
    assert sampling.default_modes(gpu, ["B/2"]) == without


def test_what_starts_at_zero_is_drawn():
    network = sampling.make_generator("S/2-32px")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    sampling.randomize_zero_weights(network, 0.02)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("modulation.weight")} | {
        "final.output.weight"
    }


@pytest.mark.slow
def test_scaling(here, tmp_path):
    words = ["--what", "loss", "--points", 2, "--repeats", 1, "--device", "cpu", "--out", tmp_path]
    done = here("bench", "scaling", *words)
    assert done.returncode == 0, done.stderr
    assert "loss  width" in fits(done.stdout.replace(str(tmp_path), ""))
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["axis"] for row in record["rows"]] == ["classes", "samples", "features", "width"]
    for row in record["rows"]:
        assert row["points"][1]["value"] == 2 * row["points"][0]["value"]
        assert row["exponents"].keys() == {"seconds", "peak_bytes"}
    classes = record["rows"][0]
    assert classes["exponents"]["peak_bytes"] == pytest.approx(1, abs=0.1)  # memory is counted, not measured


@pytest.mark.distributed
@pytest.mark.slow
def test_collectives_of_two_processes():
    (two,) = scaling.measure_processes((2,), repeats=1)
    assert two["processes"] == 2
    assert two["loss_collectives"] == 2
    assert two["gradient_collectives"] == 1
    assert set(two["collectives"]) == {"c10d::allreduce_"}
    # The gradient of every parameter once, and a few sums of the loss.
    assert 0 < two["collective_bytes"] - 4 * two["parameters"] < 1024


def test_exponent():
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert scaling.exponent(x, [3 * v**1.5 for v in x]) == pytest.approx(1.5)
    assert scaling.exponent(x, [7.0, 7.0, 4.0, 8.0, 16.0]) == pytest.approx(1)  # the upper half
    assert scaling.exponent(x[:2], [1.0, 4.0]) == pytest.approx(2)
    assert scaling.exponent(x[:1], [1.0]) is None
    assert scaling.exponent([], []) is None
    assert scaling.exponent(x[:2], [0.0, 4.0]) is None


HUGE = str(10**30)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss", "--groups", "0"], "groups=0 must be at least 1"),
        (["loss", "--width", "0"], "width=0 must be at least 1"),
        (["loss", "--width", "64,x"], "width='64,x': give a whole number or several"),
        (["loss", "--negatives", "-1"], "negatives=-1 must be at least 0"),
        (["loss", "--base", "8", "--width", "8"], "base and width are given"),
        (["loss", "--dtype", "float8"], "dtype='float8' is not known"),
        (["loss", "--device", "tpu"], "device=tpu"),
        (["loss", "--device", "meta"], "device=meta is not supported: choose from cpu, cuda"),
        (["loss", "--repeats", "0"], "repeats=0 must be from 1 to 100,000"),
        (["loss", "--repeats", HUGE], f"repeats={HUGE} must be from 1 to 100,000"),
        (["loss", "--json", "{tmp}"], "is a folder: give a file"),
        (["loss", "--json", "{tmp}/file/x.json"], "cannot write json="),
        (["step", "--micro", "3", "--classes", "2"], "micro=3 must not be above classes=2"),
        (["step", "--mode", "exakt"], "mode='exakt' is not known: did you mean 'exact'?"),
        (["step", "--preset", "B/3"], "preset='B/3' is not known"),
        (["step", "--depth", "0"], "depth=0 must be at least 1"),
        (["step", "--graph", "--micro", "2", "--classes", "2"], "micro=2: only a whole step is captured"),
        (["step", "--graph", "--device", "cpu"], "--graph needs an NVIDIA GPU"),
        (["step", "--without", "atention"], "without='atention' is not known: did you mean 'attention'?"),
        (["step", "--set", "seed=1"], "--set seed=1: there is no recipe to change; give --recipe"),
        (["step", "--recipe", "digits", "--depth", "2"], "--depth does not apply to --recipe"),
        (["step", "--recipe", "digits", "--compile"], "--compile does not apply to --recipe"),
        (["step", "--recipe", "cifar"], "did you mean"),
        (["step", "--recipe", "mae-digits"], "is a recipe for driftgen pretrain"),
        (["step", "--recipe", "digits", "--without", "los"], "without='los' is not known"),
        (["step", "--recipe", "imagenet256-latent-b2"], "data.kind=latents: only recipes of images"),
        (["pretrain", "--recipe", "digits"], "is a recipe for driftgen train"),
        (["pretrain", "--set", "optim.lt=1"], "optim.lt"),
        (["step", "--repeats", HUGE], f"repeats={HUGE} must be"),
        (["step", "--recipe", "digits", "--repeats", HUGE], f"repeats={HUGE} must be"),
        (["pretrain", "--repeats", HUGE], f"repeats={HUGE} must be"),
        (["sampling", "--repeats", HUGE], f"repeats={HUGE} must be"),
        (["scaling", "--repeats", HUGE], f"repeats={HUGE} must be"),
        (["scaling", "--points", HUGE], f"points={HUGE} must be from 2 to 20"),
        (["sampling", "--preset", "33px"], "preset='33px' is not known"),
        (["sampling", "--batch", "0"], "batch=0 must be from 1 to 2,147,483,647"),
        (["sampling", "--mode", "fast"], "mode='fast' is not known"),
        (["sampling", "--mode", "graph", "--device", "cpu"], "mode=graph needs an NVIDIA GPU"),
        (["sampling", "--mode", "fp8", "--device", "cpu"], "fp8 needs an NVIDIA GPU of compute capability"),
        (["scaling", "--what", "los"], "what='los' is not known: did you mean 'loss'?"),
        (["scaling", "--points", "1"], "points=1 must be from 2 to 20"),
        (["scaling", "--out", "{tmp}/file"], "cannot write to"),
        (["speed"], "No such command 'speed'"),
    ],
)
def test_wrong_options_are_one_line(here, tmp_path, words, message):
    (tmp_path / "file").touch()
    done = here("bench", *(word.format(tmp=tmp_path) for word in words))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", [[], ["loss"], ["step"], ["pretrain"], ["sampling"], ["scaling"]])
def test_help_fits(here, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    done = here("bench", *command, "--help")
    assert done.returncode == 0
    assert "--help" in fits(done.stdout)


@pytest.mark.cuda
def test_on_a_gpu(here, tmp_path):
    """Run every command at a small size: events, memory statistics, profiler, CUDA graphs."""
    words = [*TINY_LOSS, "--repeats", 2, "--json", tmp_path / "loss.json"]
    assert here("bench", "loss", *words).returncode == 0
    record = read(tmp_path / "loss.json", "loss")
    assert record["gpu"] == torch.cuda.get_device_name()
    assert record["rows"][0]["queued_seconds"] > 0
    assert record["rows"][0]["peak_bytes"] > record["rows"][0]["floor"]["bytes"]
    words = ["--preset", "28px", "--batch", 2, "--mode", "eager", "--mode", "graph", "--repeats", 2]
    assert here("bench", "sampling", *words, "--json", tmp_path / "sampling.json").returncode == 0
    rows = read(tmp_path / "sampling.json", "sampling")["rows"]
    assert [row["detail"] for row in rows] == ["eager", "graph, eager"]
    assert all(row["peak_bytes"] > 0 for row in rows)
    words = [
        *TINY_STEP,
        "--preset",
        "S/2-32px",
        "--repeats",
        2,
        "--profile",
        "--json",
        tmp_path / "step.json",
    ]
    assert here("bench", "step", *words).returncode == 0
    costs = read(tmp_path / "step.json", "step")["rows"][0]["profile"]
    known = sum(cost["seconds"] for cost in costs if cost["phase"] != "other")
    assert {cost["phase"] for cost in costs} >= set(profile.PHASES)
    assert known > 0.95 * sum(cost["seconds"] for cost in costs)


@pytest.mark.cuda
def test_replays_of_a_graph_draw_new_noise():
    network = sampling.make_generator("28px").cuda().eval()
    for parameter in network.parameters():
        parameter.data.normal_(std=0.1)
    graph = GraphedFunction(sampling._call(network, 2))
    first = graph()
    assert first.isfinite().all()
    assert not torch.equal(first, graph())
