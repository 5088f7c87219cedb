"""Compiled pipelines generate the same images; the number of captured graphs is bounded."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.generators import Noise, batched_call
from driftgen.ops import cuda_graphs as graphs
from driftgen.ops import host_copy
from driftgen.ops.cuda_graphs import CapturedGraph, GraphedFunction
from driftgen.ops.host_copy import HostCopy
from driftgen.ops.padding import batch_sizes, padded_size
from tests.support.artifacts import PIXEL
from tests.support.helpers import fails
from tests.support.pipelines import Own, small

compiled: list[int] = []


def counted(graph, inputs):
    """A compiler backend that only counts: code generation would take minutes."""
    compiled.append(len(inputs))
    return graph.forward


@pytest.fixture(autouse=True)
def _without_a_backend(monkeypatch):
    compiled.clear()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend=counted))
    monkeypatch.setattr(batched_call, "check_compiler", lambda device: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_images_of_a_seed_do_not_change():
    network = small()
    want = dg.DriftPipeline(network, batch_size=4)(1, num_images=9, seed=3, output="tensor")
    pipe = dg.DriftPipeline(network, batch_size=4).compile()
    rows = []
    network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))

    def same(n, **options):
        got = pipe(1, num_images=n, seed=3, output="tensor", **options)
        torch.testing.assert_close(got, want[:n], rtol=0, atol=1e-5)

    same(9)
    assert rows == [4, 4, 4]  # the last batch is padded
    forms = len(compiled)
    same(5)
    same(3)
    assert len(compiled) == forms == 3  # one batch size: condition, block and last layer are compiled once
    same(2)
    same(1)
    assert rows[-2:] == [2, 1]
    assert len(compiled) == 9
    pipe.batch_size = 3  # not a power of two
    same(9)
    same(3)
    same(2)
    assert rows[-5:] == [3, 3, 3, 3, 2]
    assert len(compiled) == 12  # known sizes are not compiled again, and shapes stay static
    rest = list(pipe.stream([1] * 9, seed=3, output="tensor", skip=5))
    torch.testing.assert_close(torch.cat(rest), want[5:], rtol=0, atol=1e-5)
    assert list(pipe.stream([1] * 3, seed=3, skip=3)) == []


def test_the_only_batch_of_a_captured_call_is_split(monkeypatch):
    network = small()
    want = dg.DriftPipeline(network, batch_size=9)(1, num_images=9, seed=3, output="tensor")
    pipe = dg.DriftPipeline(network, batch_size=9).capture()
    rows = []
    network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    monkeypatch.setattr(batched_call, "FIRST", {"cpu": 2})
    for n, expected in ((9, [2, 7]), (8, [4, 4]), (7, [8]), (10, [9, 9])):
        rows.clear()
        got = pipe(1, num_images=n, seed=3, output="tensor")
        assert rows == expected
        torch.testing.assert_close(got[:9], want[:n], rtol=0, atol=1e-5)
    rows.clear()
    dg.DriftPipeline(network, batch_size=9)(1, num_images=9)  # not captured: host-bound
    assert rows == [9]


@pytest.mark.parametrize(
    ("count", "most", "size"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 6, 6), (8, 8, 8), (99, 8, 8), (1, 1, 1)]
)
def test_sizes(count, most, size):
    assert padded_size(count, most) == size
    assert size in batch_sizes(most)


def test_a_users_network():
    network = Own()
    want = dg.DriftPipeline(network)([5, 6, 7], seed=0, output="latent")
    pipe = dg.DriftPipeline(network).compile()
    torch.testing.assert_close(pipe([5, 6, 7], seed=0, output="latent"), want)
    assert compiled
    network.sample_noise = lambda n, generator=None: SimpleNamespace(gaussian=torch.ones(n, 3, 4, 4))
    assert pipe([5, 6, 7], seed=0, output="latent").shape == (3, 3, 4, 4)


def ordered(pipe, monkeypatch):
    """Record the order in which a pipeline draws noise, launches batches and hands them out."""
    order = []
    for owner, name in ((pipe, "_noise"), (pipe, "_launch"), (HostCopy, "wait")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real: (order.append(name), real(*a))[1])
    return order


def test_the_next_noise_is_drawn_while_the_gpu_computes(monkeypatch):
    pipe = dg.DriftPipeline(small(), batch_size=2)
    order = ordered(pipe, monkeypatch)
    pipe(0, num_images=5, seed=0)
    batch = ["_launch", "_noise", "wait"]
    assert order == ["_noise", *batch, *batch, "_launch", "wait"]


def test_a_gpu_has_the_next_batch_before_the_last_one_is_handed_out(monkeypatch):
    pipe = dg.DriftPipeline(small(), batch_size=2)
    want = pipe([0, 1, 2, 3, 0], seed=0, output="tensor")
    monkeypatch.setattr(host_copy, "AHEAD", {"cpu": 1})
    order = ordered(pipe, monkeypatch)
    assert torch.equal(pipe([0, 1, 2, 3, 0], seed=0, output="tensor"), want)
    first, rest = ["_noise", "_launch", "_noise", "_launch", "_noise", "wait"], ["_launch", "wait"]
    assert order == [*first, *rest, "wait"]


def test_rows_of_a_batch_have_their_own_noise_label_and_guidance(monkeypatch):
    pipe = dg.DriftPipeline(small(), batch_size=8).capture()
    rows = []
    pipe.generator.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    calls = [([1, 2], 1.5, 7), ([3], 1.0, 8), ([0, 0, 1], 2.0, 7)]
    alone = [pipe(labels, guidance=alpha, seed=seed, output="tensor") for labels, alpha, seed in calls]
    noises = [pipe.noise(len(labels), seed) for labels, _, seed in calls]
    noise = Noise(*(torch.cat(parts) for parts in zip(*noises, strict=True)))
    labels = [label for labels, _, _ in calls for label in labels]
    guidance = [alpha for labels, alpha, _ in calls for _ in labels]
    together = pipe.generate(noise, labels, guidance, output="tensor")
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert pipe.generate(noise, labels, guidance).dtype == np.uint8
    pipe.generate(noise, labels, guidance, size=16)
    assert rows == [2, 1, 4, 8, 8, 16]


def test_saved_as_before(tmp_path):
    network = small()
    pipe = dg.DriftPipeline(network).compile()
    want = pipe([0, 1], seed=0, output="latent")
    pipe.save_pretrained(tmp_path)
    back = dg.DriftPipeline.from_pretrained(tmp_path)
    torch.testing.assert_close(back([0, 1], seed=0, output="latent"), want)


def test_without_a_working_compiler(monkeypatch, here, tmp_path):
    def broken(graph, inputs):
        raise OSError("no compiler\nand a page more")

    real = torch._dynamo.optimize
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(backend=broken)(f))
    pipe = dg.DriftPipeline(small()).compile()
    fails(lambda: pipe(0, seed=0), "torch.compile fails: .*; sample without compile")

    def missing(device):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(batched_call, "check_compiler", missing)
    fails(lambda: dg.DriftPipeline(small()).compile(), "torch.compile fails: No working C.. compiler")
    done = here("sample", PIXEL, "--compile", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_sample(here, tmp_path):
    words = ["sample", PIXEL, "--labels", "1,2,3", "--seed", "0", "--out"]
    assert here(*words, tmp_path / "plain").returncode == 0
    done = here(*words, tmp_path / "fast", "--compile")
    assert done.returncode == 0, done.stderr
    assert compiled
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "fast").iterdir())
    other = here(*words, tmp_path / "plain", "--compile")
    assert "holds other samples (another compile)" in other.stderr
    done = here(*words, tmp_path / "eight", "--fp8")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "fp8 needs an NVIDIA GPU of compute capability 8.9 or more" in done.stderr
    assert not (tmp_path / "eight").exists()


class Replayed(GraphedFunction):
    """Captured graphs without a GPU: a replay computes from the copied inputs."""

    def _capture(self, inputs):
        while len(self.captured) >= self.max_graphs:
            del self.captured[next(iter(self.captured))]
        static = [x.clone() for x in inputs]
        output = self.function(*static)
        self.sizes = [*getattr(self, "sizes", []), len(inputs[0])]
        graph = SimpleNamespace(replay=lambda: output.copy_(self.function(*static)))
        return CapturedGraph(graph, static, output)


def test_the_most_recent_graphs_are_kept():
    double = Replayed(lambda x: 2 * x, max_graphs=2)
    results = {}
    for n in (1, 2, 1, 3, 1, 2):
        x = torch.randn(n)
        results[n] = double(x), 2 * x
    assert all(torch.equal(*pair) for pair in results.values())  # later calls do not overwrite results
    assert double.sizes == [1, 2, 3, 2]
    assert len(double.captured) == 2
    assert double(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]  # another dtype is captured separately
    double.forget()
    assert not double.captured


def test_a_missing_compiler_is_detected(monkeypatch):
    import torch._inductor.cpp_builder as builder

    def none():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(builder, "get_cpp_compiler", none)
    with pytest.raises(RuntimeError, match="No working"):
        graphs.check_compiler(torch.device("cpu"))
    graphs.check_compiler(torch.device("cuda"))
