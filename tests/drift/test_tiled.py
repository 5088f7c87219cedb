"""Kernels of the loss for large groups against float64, with tiles so small that few samples need several."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import driftgen as dg
from driftgen.drift.fused import shapes, tile_sizes, tiled_plan
from driftgen.drift.fused.strip_plan import plan_strips
from driftgen.drift.fused.tile_sizes import Tile
from driftgen.drift.interfaces import LossCall, Statistics
from driftgen.ops import dispatch
from driftgen.ops.launch import Launch
from tests.support import twin
from tests.support.accuracy import error
from tests.support.interpreter import (  # noqa: F401
    DEVICE,
    _bfloat16_on_the_cpu,
    _kernels_at_all_temperatures,
    _kernels_everywhere,
)
from tests.support.kernel_losses import (
    ALLOWED,
    KINDS,
    compare,
    error_of_distant_clusters,
    features,
    run,
    samples,
)

pytest.importorskip("triton")
SIZES = 18, 5, 17  # generated, negatives, positives: two tiles, one, and two, all of them ragged


@pytest.fixture
def tiles(monkeypatch):
    """Cut all problems into tiles of 16 samples. Returns a function that sets other tiles."""
    monkeypatch.setattr(shapes, "MAX_GENERATED", 0)
    monkeypatch.setattr(tiled_plan, "CENTER_TILE", 16)

    def use(slots=2, **sizes):
        options = {"rows": 16, "columns": 16, "inner": 32, "outer": 32, "strips": True} | sizes
        tile = Tile(**{"one_sweep": options["strips"]} | options)  # wide vectors have both
        for table in ("TILES", "DIRECT"):
            monkeypatch.setattr(tile_sizes, table, dict.fromkeys(tile_sizes.TILES, (tile,)))
        monkeypatch.setattr(
            tiled_plan, "plan_strips", lambda *a, **k: replace(plan_strips(*a, **k), slots=slots)
        )

    use()
    return use


@pytest.fixture
def launched(monkeypatch):
    """Record the names of all kernels that are launched, except statistics."""
    names, real = [], Launch.__call__

    def call(self, *tensors):
        if "statistics" not in self.kernel.__name__:
            names.append(self.kernel.__name__)
        real(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", call)
    return names


def kernel_names(direct, strips):
    """Names of the launched kernels. ``strips`` is the number of strips, two of which make a turn."""
    turns = -(-strips // 2)
    return [
        *(["center_kernel", "norms_kernel"] if not direct else []),
        *("tiled_scale_kernel", "softmax_kernel"),
        *(["column_terms_kernel"] if strips else []),
        *(["affinity_strips_kernel", "strip_products_kernel"] * turns or ["tiled_products_kernel"]),
        *(["gradient_strips_kernel", "strip_gradient_kernel"] * turns or ["tiled_gradient_kernel"]),
    ]


def test_several_tiles(tiles, launched):
    tiles(inner=64, outer=64)
    gen, neg, pos = samples("random", (17, 2, 3), 34, groups=1, dtype=torch.bfloat16)
    compare(gen, pos, neg, twin.release_loss, temperatures=(0.05, 0.2))
    assert launched == kernel_names(direct=False, strips=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_release(kind, dtype, tiles, launched):
    groups = 2 if kind == "random" else 1
    gen, neg, pos = samples(kind, SIZES, 34, groups, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert launched == kernel_names(dtype == torch.float32, strips=2 * groups)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "offset"])
def test_sweeps(kind, dtype, tiles, launched):
    tiles(strips=False)
    gen, neg, pos = samples(kind, SIZES, 34, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert launched == kernel_names(dtype == torch.float32, strips=0)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1e3, 1e5])
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_distant_clusters(convention, strips, gap, tiles):
    """Sample by sample: one origin for both clusters would cost the far one gap · 2⁻²⁴ of its spread."""
    tiles(strips=strips)
    assert error_of_distant_clusters(convention, gap, SIZES, 5) < 1e-6


@pytest.mark.slow
def test_distant_clusters_of_wide_vectors(tiles):
    """Each program of a strip has a part of the coordinates, 16 of 40 here."""
    tiles(outer=16)
    assert error_of_distant_clusters("release", 1e4, SIZES, 40) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_full_tiles(convention, strips, tiles):
    """Sets that fill their tiles need no masks."""
    tiles(strips=strips)
    gen, neg, pos = samples("random", (32, 16, 48), 34, groups=2, dtype=torch.bfloat16)
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg, exact, temperatures=(0.1, 0.3), convention=convention)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 70])
def test_widths(width, dtype, tiles):
    gen, neg, pos = samples("random", SIZES, width, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((16, 0, 16), (16, 16)),
        ((17, 16, 33), (16, 32)),
        ((33, 1, 15), (32, 16)),
        ((32, 3, 1), (16, 32)),
        ((2, 3, 20), (16, 16)),
    ],
    ids=str,
)
def test_borders_of_tiles(sizes, shape, convention, tiles):
    """A sample is masked as its own neighbor wherever rows and columns of tiles end."""
    tiles(rows=shape[0], columns=shape[1])
    gen, neg, pos = samples("random", sizes, 8, groups=1)
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg if sizes[1] else None, exact, temperatures=(0.1, 0.3), convention=convention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "normalization", "strips"),
    [
        ("laplace", "both", True),
        ("laplace", "y", True),
        ("gaussian", "both", False),
        ("gaussian", "y", False),
        ("inverse_multiquadric", "both", True),
        ("inverse_multiquadric", "y", False),
    ],
)
def test_paper(kernel, normalization, strips, tiles):
    tiles(strips=strips)
    gen, neg, pos = samples("random", SIZES, 10, groups=1)
    rng = np.random.default_rng(1)
    compare(
        gen, pos, neg,
        lambda *a: twin.paper_loss(*a, kernel=kernel, normalization=normalization),
        [rng.uniform(0.2, 2, (1, n)) for n in SIZES],
        convention="paper", kernel=kernel, normalization=normalization, temperatures=(0.1, 0.3),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("strips", [False, True])
def test_weights_may_be_zero(convention, strips, tiles):
    """Whole tiles have no weight, the first of them and the nearest ones among them."""
    tiles(strips=strips)
    gen, _, pos = samples("random", (18, 0, 34), 10)
    neg = gen[:, :17] + 1e-3
    weights = [np.ones((2, 18)), np.zeros((2, 17)), np.ones((2, 34))]
    weights[0][:, :16] = 0
    weights[2][1, :32] = 0
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg, exact, weights, convention=convention, temperatures=(0.05, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"convention": "paper", "attraction": 1.5, "normalize_drift": False}], ids=str
)
def test_whole_problems_and_tiles_agree(options, tiles, monkeypatch):
    """Several features and widths, several vectors, and gradients of single groups."""
    pos, neg = features(1, 4, torch.float32), features(2, 2, torch.float32)
    weight, results = torch.tensor([0.0, 2.5]), []
    for most in (0, 64):
        monkeypatch.setattr(shapes, "MAX_GENERATED", most)
        gen = features(0, 17, torch.float32, requires=True)
        out = dg.DriftingLoss(**options)(gen, pos, neg, negative_weight=weight)
        (out.loss + 0.3 * out.per_group[1]).backward()
        results.append([out.loss, out.per_group, *out.scale.values(), *out.drift.values()])
        results[-1] += [tensor.grad for tensor in gen.values()]
    for tiled, whole in zip(*results, strict=True):
        assert error(tiled, whole) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("processors", [1, 2, 100])
@pytest.mark.usefixtures("_poisoned")
def test_columns_of_a_row_shared_by_programs(processors, tiles, monkeypatch):
    """Sums of distances: one, two and five programs for five column tiles."""
    monkeypatch.setattr(tiled_plan, "processors", lambda device: processors)
    monkeypatch.setattr(tiled_plan, "PROGRAMS", 2)
    gen, neg, pos = samples("random", SIZES, 34, groups=1, dtype=torch.bfloat16)
    compare(gen, pos, neg, twin.release_loss, temperatures=(0.05, 0.2))


@pytest.fixture
def _poisoned(monkeypatch):
    """Fill all allocated memory with NaN."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: real(*a, **k).fill_(math.nan))


def results(sizes, width, dtype, groups=1, **options):
    """Loss, statistics and gradient of a call."""
    gen, neg, pos = (t[:, :, None].to(DEVICE) for t in samples("random", sizes, width, groups, dtype))
    gen.requires_grad_()
    out = dg.DriftingLoss((0.05, 0.2), **options)({"": gen}, {"": pos}, {"": neg})
    out.loss.backward()
    return [out.loss.detach(), out.per_group.detach(), *out.drift.values(), gen.grad]


@pytest.mark.slow
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_poisoned")
def test_two_runs_are_the_same_to_the_bit_and_nothing_is_left_unwritten(dtype, strips, tiles):
    tiles(strips=strips)
    for first, second in zip(*(results((17, 2, 4), 34, dtype) for _ in range(2)), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.usefixtures("_poisoned")
def test_turns_change_no_bit(convention, tiles, launched):
    """Six strips of three problems: turns of one, of parts of problems, and of all. Some are not full."""
    runs = []
    for slots in (1, 4, 6, 7):
        tiles(slots=slots, columns=32, inner=16)
        launched.clear()
        runs.append(results((18, 3, 17), 34, torch.bfloat16, groups=3, convention=convention))
        for name in ("affinity_strips_kernel", "strip_gradient_kernel"):
            assert launched.count(name) == -(-6 // slots)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"attraction": 0.0}, {"repulsion": 0.0}, {"attraction": 2.5}], ids=str)
def test_factors(options, tiles, monkeypatch):
    """Strips divide by attraction · S⁻, which may be 0."""
    gen, neg, pos = samples("random", SIZES, 34, dtype=torch.bfloat16)
    found = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss((0.05, 0.2), **options), gen, pos, neg)
        found.append([out.loss, out.per_group, out.drift, gradient])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < ALLOWED[torch.bfloat16]


@pytest.mark.slow
def test_rows_that_nothing_repels(tiles, monkeypatch):
    """Without a floor, S⁻ of samples that are far from all others is 0 to the last digit."""
    gen, _, pos = samples("random", (18, 0, 17), 34, groups=1)
    gen[:, :3] += 1e3 * torch.arange(1, 4)[:, None]
    pos[:, :3] = gen[:, :3] + 1e-2
    found = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss((0.001, 0.2), convention="paper"), gen, pos)
        found.append([out.loss, out.drift, gradient])
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        assert error(a, b) < 1e-5


@pytest.mark.slow
def test_engines_all_reduce_the_same_sums(tiles, monkeypatch):
    reduced = []
    monkeypatch.setattr(LossCall, "all_reduce", lambda call, sums: reduced.append(sums.clone()))
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", SIZES, 6))
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        loss = dg.DriftingLoss((0.1, 0.5), process_group=dist.ProcessGroup(0, 2))
        out, gradient = run(loss, gen, pos, neg, negative_weight=torch.tensor([0.5, 2.0]))
        results.append([out.loss, out.per_group, out.scale, out.drift, gradient])
    for left, right in (results, (reduced[:2], reduced[2:])):
        for a, b in zip(left, right, strict=True):
            assert error(a, b) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_a_single_generated_sample(convention, tiles, monkeypatch):
    """Its column of A is empty without the release's constants."""
    gen, neg, pos = samples("random", (1, 3, 20), 6)
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss(convention=convention), gen, pos, neg)
        results.append([out.loss, out.per_group, out.drift, gradient])
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.slow
def test_given_statistics(tiles, monkeypatch):
    gen, neg, pos = samples("random", SIZES, 6)
    given = Statistics(torch.full((1,), 3.0, device=DEVICE), torch.full((1, 3), 0.2, device=DEVICE), 8)
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss(), gen, pos, neg, statistics=given)
        results.append([out.loss, out.per_group, out.drift, gradient])
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.slow
def test_no_gradient_is_needed(tiles, launched):
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", SIZES, 6))
    out = dg.DriftingLoss()(gen, pos, neg)
    assert out.loss.isfinite()
    assert "tiled_gradient_kernel" not in launched


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(65, 30, 100), (8, 0, 129)], ids=str)
def test_tiles_of_the_table(sizes, launched):
    """Groups that do not fit one program are cut into tiles."""
    gen, neg, pos = samples("random", sizes, 3, groups=1)
    compare(gen, pos, neg if sizes[1] else None, twin.release_loss, temperatures=(0.05, 0.2))
    assert launched == kernel_names(direct=True, strips=0)
