"""Loss of large groups on a GPU, at the sizes of training: results, memory, CUDA graphs."""

import pytest
import torch

import driftgen as dg
from driftgen.drift.fused import strip_plan, tile_sizes
from driftgen.drift.fused.tile_sizes import Tile
from driftgen.ops.launch import Launch
from tests.support.accuracy import error
from tests.support.interpreter import _kernels_at_all_temperatures  # noqa: F401
from tests.support.kernel_losses import ALLOWED, KINDS, error_of_distant_clusters, run, samples

pytestmark = pytest.mark.cuda
LARGE = [(256, 32, 256), (640, 0, 640), (512, 64, 2048), (65, 17, 130), (1024, 96, 4000)]


@pytest.fixture
def launched(monkeypatch):
    """Record the names of all kernels that are launched."""
    names, real = [], Launch.__call__

    def call(self, *tensors):
        names.append(self.kernel.__name__)
        real(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", call)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 256, 1024])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_large_groups(sizes, width, dtype, launched):
    """Against the eager path, whose distances are in float64."""
    compare_with_eager(*samples("random", sizes, width, dtype=dtype))
    assert launched.count("tiled_scale_kernel") == 1
    by_strips = launched.count("strip_gradient_kernel") > 0
    assert launched.count("tiled_gradient_kernel") == (0 if by_strips else 1)
    assert by_strips or width < 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_samples(kind, dtype):
    # All affinities of an outlier are nearly equal, and so are the affinities of duplicates: their rounding
    # errors do not average out. Bfloat16 rounds by up to 2^-8, attraction and repulsion independently. An
    # outlier lies up to 330 mean distances away. Float32 rounds that by up to 2^-24 of it, which changes its
    # affinities at temperature 0.02 by 330 / 2^24 / 0.02 = 2^-10.
    sets = samples(kind, (256, 32, 256), 128, dtype=dtype)
    allowed = {torch.bfloat16: 2**-7, torch.float32: 2**-10 if kind == "outlier" else None}
    compare_with_eager(*sets, allowed=allowed.get(dtype) if kind in ("outlier", "duplicate") else None)


@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("gap", [1e3, 1e5])
@pytest.mark.parametrize(
    ("sizes", "width"),
    [((64, 16, 64), 64), ((200, 30, 300), 24), ((200, 30, 300), 64), ((200, 30, 300), 256)],
)
def test_distant_clusters(sizes, width, gap, convention):
    """Whole problems, sweeps, sweeps of the gradient alone, and strips."""
    assert error_of_distant_clusters(convention, gap, sizes, width) < 1e-5


@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("width", [24, 64, 256])
def test_large_groups_with_weights(convention, width):
    sets = samples("random", (200, 30, 300), width, dtype=torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    weights = {
        f"{name}_weight": torch.rand(2, n, generator=rng) + 0.1
        for name, n in (("generated", 200), ("negative", 30), ("positive", 300))
    }
    weights["negative_weight"][:] = 0
    compare_with_eager(*sets, weights, convention=convention)


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_sweeps_and_strips(convention, dtype, strips, monkeypatch, launched):
    """Both ways at a width that both take, with ragged tiles."""
    use_strips(monkeypatch, strips)
    compare_with_eager(*samples("random", (200, 30, 300), 64, dtype=dtype), convention=convention)
    assert ("strip_products_kernel" in launched) is strips
    assert ("tiled_products_kernel" in launched) is not strips


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperatures", [(0.05,), (0.02, 0.05, 0.1, 0.3)], ids=len)
def test_temperatures_of_strips(temperatures, dtype):
    sets = samples("random", (200, 30, 300), 320, dtype=dtype)
    compare_with_eager(*sets, temperatures=temperatures)


@pytest.mark.parametrize("options", [{"attraction": 0.0}, {"repulsion": 0.0}], ids=str)
def test_factors_of_strips(options):
    compare_with_eager(*samples("random", (200, 30, 300), 320, dtype=torch.bfloat16), **options)


def test_turns_of_strips(monkeypatch, launched):
    """Memory full of NaN; the number of strips of a turn changes no bit."""
    real, runs = torch.empty, []
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: real(*a, **k).fill_(float("nan") if k.get("dtype") != torch.int64 else 0),
    )
    gen, neg, pos = samples("random", (256, 32, 256), 512, groups=16, dtype=torch.bfloat16)
    for most in (1, 7, 64):
        monkeypatch.setattr(strip_plan, "_best_slots", lambda *a, most=most: most)
        launched.clear()
        runs.append(run(dg.DriftingLoss(), gen, pos, neg))
        assert launched.count("strip_products_kernel") == -(-64 // most)
    (first, gradient), *others = runs
    assert gradient.isfinite().all()
    for out, other_gradient in others:
        assert torch.equal(out.loss, first.loss)
        assert torch.equal(out.drift, first.drift)
        assert torch.equal(other_gradient, gradient)


def use_strips(monkeypatch, strips):
    """Set the mode of both passes, with the tiles of the narrowest vectors for sweeps."""
    for name in ("TILES", "DIRECT"):
        table = getattr(tile_sizes, name)
        modes = {key: (Tile(strips=True),) if strips else table[key][:1] for key in tile_sizes.STRIPS}
        monkeypatch.setattr(tile_sizes, name, table | modes)


def compare_with_eager(gen, neg, pos, weights=None, allowed=None, **options):
    allowed = allowed or ALLOWED[gen.dtype]
    neg = neg if neg.shape[1] else None
    out, gradient = run(dg.DriftingLoss(**options), gen, pos, neg, **(weights or {}))
    doubles = [None if t is None else t.double() for t in (gen, pos, neg)]
    exact, expected = run(dg.DriftingLoss(**options), *doubles, **(weights or {}))
    for name in ("loss", "per_group", "scale", "drift"):
        assert error(getattr(out, name), getattr(exact, name)) < allowed, name
    rounded = expected.to(gen.dtype).double()
    assert error(gradient, expected) < max(allowed, 1.2 * error(rounded, expected))


@pytest.mark.parametrize("width", [64, 256, 1024])
@pytest.mark.parametrize("sizes", LARGE[:3], ids=str)
def test_memory(sizes, width):
    gen, neg, pos = (torch.randn(4, n, 16, width, dtype=torch.bfloat16, device="cuda") for n in sizes)
    gen.requires_grad_()
    sets = [{"f": gen}, {"f": pos}, *([{"f": neg}] if sizes[1] else [])]
    loss = dg.DriftingLoss()
    torch.autograd.grad(loss(*sets).loss, gen)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(loss(*sets).loss, gen)
    torch.cuda.synchronize()
    inputs = 2 * (gen.numel() + pos.numel() + neg.numel())
    peak = inputs + torch.cuda.max_memory_allocated() - held
    assert peak <= 1.3 * (inputs + 2 * gen.numel())


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_two_equal_runs_of_a_large_group(width):
    gen, neg, pos = samples("random", (640, 20, 640), width, groups=8, dtype=torch.bfloat16)
    first, second = (run(dg.DriftingLoss(), gen, pos, neg) for _ in range(2))
    assert torch.equal(first[0].loss, second[0].loss)
    assert torch.equal(first[0].drift, second[0].drift)
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("width", [64, 512])
def test_a_captured_loss_of_large_groups(width):
    gen, neg, pos = (t.cuda() for t in samples("random", (256, 32, 256), width, dtype=torch.bfloat16))
    gen.requires_grad_()
    loss = dg.DriftingLoss()

    def call():
        out = loss(gen, pos, neg)
        return out.loss, *torch.autograd.grad(out.loss, gen)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    with torch.no_grad():
        gen.normal_()
    graph.replay()
    for got, want in zip(replayed, call(), strict=True):
        assert torch.equal(got, want)
