"""The patch statistics kernels against float64; ``tests.support.interpreter`` decides where they run."""

import pytest
import torch

from driftgen.features import ResNetMAE, feature_pyramid
from driftgen.features.pyramid import patch_statistics
from driftgen.ops import dispatch
from driftgen.ops.compile import to_channels_last
from driftgen.ops.patch_statistics import fused_patch_statistics, supports_patch_statistics
from tests.support.accuracy import error
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401

pytest.importorskip("triton")
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def feature_map(*shape, dtype=torch.float32, offset=0.0, spread=1.0):
    x = offset + spread * torch.randn(shape, dtype=torch.float64)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def refuse(*_):
    raise AssertionError("PyTorch was asked")


def features(x, patch_sizes, **options):
    return feature_pyramid({"f": x}, patch_sizes=patch_sizes, **options)


def compare(x, patch_sizes=(2, 4), only=None, allowed=1e-6):
    """Compare features and gradients with float64, allowing for one rounding to the dtype."""
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found = features(leaf, patch_sizes, statistics=refuse)
    wanted = features(exact, patch_sizes)
    assert list(found) == list(wanted)
    for name, value in found.items():
        of = wanted[name].detach()
        assert value.dtype == (torch.float32 if "std" in name else x.dtype)
        assert value.is_contiguous()
        assert error(value, of) < allowed + 1.1 * error(of.to(value.dtype), of)
    names = only or list(found)
    given = [torch.randn_like(found[name]) for name in names]
    (gradient,) = torch.autograd.grad([found[name] for name in names], leaf, given)
    (of,) = torch.autograd.grad([wanted[name] for name in names], exact, [g.double() for g in given])
    assert gradient.dtype == x.dtype
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert error(gradient, of) < allowed + 1.1 * error(of.to(x.dtype), of)


@pytest.mark.parametrize(
    ("shape", "patch_sizes", "dtype"),
    [
        ((2, 16, 8, 8), (2, 4), torch.float32),
        ((2, 16, 8, 8), (2, 4), torch.bfloat16),
        ((2, 16, 8, 8), (2, 4), torch.float16),
        ((1, 64, 16, 16), (4, 2), torch.bfloat16),
        ((2, 33, 4, 4), (2, 4), torch.float32),
        ((1, 33, 4, 4), (2, 4), torch.bfloat16),
        ((1, 5, 16, 24), (2, 4, 8), torch.float32),
        ((1, 1, 8, 8), (8, 2), torch.float16),
        ((1, 6, 20, 12), (4,), torch.float32),
        ((1, 40, 6, 10), (2, 4), torch.float32),
        ((2, 7, 7, 9), (2,), torch.float32),
        ((2, 12, 1, 1), (), torch.bfloat16),
    ],
    ids=str,
)
def test_against_float64(shape, patch_sizes, dtype):
    compare(feature_map(*shape, dtype=dtype), patch_sizes)


@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (1, 33, 21, 3), (1, 64, 28, 12)], ids=str)
def test_several_tiles(shape):
    compare(feature_map(*shape), ())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(256, 32, 32), (512, 16, 16), (1024, 8, 8), (2048, 4, 4), (640, 32, 32)])
def test_maps_of_the_paper(shape, dtype):
    compare(feature_map(8, *shape, dtype=dtype))


@pytest.mark.cuda
def test_offsets_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 32e9:
        pytest.skip("needs 32 GB")
    x = torch.zeros(2049, 256, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)
    x[-1] = torch.randn_like(x[-1])
    few, many = x[-1:].clone().requires_grad_(), x.requires_grad_()
    for leaf in (few, many):
        found = features(leaf, (2, 4), statistics=refuse)
        sum(v[-1].float().square().sum() for v in found.values()).backward()
    assert torch.equal(many.grad[-1:], few.grad)


@pytest.mark.parametrize(
    "only",
    [["f"], ["f_mean"], ["f_std"], ["f_mean_2"], ["f_std_2"], ["f", "f_std_4"], ["f_mean_4", "f_std_2"]],
    ids="-".join,
)
def test_missing_gradients(only):
    compare(feature_map(1, 6, 4, 4), (2, 4), only)


def test_missing_gradients_of_large_patches():
    compare(feature_map(1, 6, 8, 8), (8, 4), ["f_mean_8", "f_std_4"])


@pytest.mark.slow
def test_gradients_in_any_memory_format():
    x = feature_map(2, 6, 4, 4).requires_grad_()
    found = features(x, (2,))
    layouts = [lambda g: g.mT.contiguous().mT, lambda g: g[:1, :1, :1].expand_as(g)]
    for layout in layouts:
        given = [layout(torch.randn_like(v)) for v in found.values()]
        (gradient,) = torch.autograd.grad(list(found.values()), x, given, retain_graph=True)
        dense = [g.contiguous() for g in given]
        assert torch.equal(gradient, *torch.autograd.grad(list(found.values()), x, dense, retain_graph=True))


@pytest.mark.parametrize(
    ("dtype", "offset", "spread", "allowed"),
    [(torch.float32, 100.0, 0.1, 1e-4), (torch.float32, 1e4, 1.0, 1e-3), (torch.bfloat16, 60.0, 0.5, 1e-5)],
)
def test_a_mean_larger_than_the_spread(dtype, offset, spread, allowed):
    """E[x²] − E[x]² would have no correct digit, nor would x minus a mean rounded to 16 bits."""
    x = feature_map(1, 32, 16, 16, dtype=dtype, offset=offset, spread=spread)
    compare(x, allowed=allowed)
    compare(x, (4,), ["f_std", "f_std_4"], allowed=allowed)


def test_a_constant_map():
    x = torch.full_like(feature_map(1, 4, 8, 8), 300.0).requires_grad_()
    found = features(x, (2, 4), statistics=refuse)
    assert all((v - 1e-3).abs().max() < 1e-9 for k, v in found.items() if "std" in k)
    sum(v.sum() for v in found.values()).backward()
    assert x.grad.isfinite().all()


WHOLE = (16, 16)


@pytest.mark.parametrize(
    ("x", "sizes", "supported"),
    [
        (feature_map(2, 8, 16, 16), [WHOLE, (2, 2), (4, 4)], True),
        (feature_map(2, 8, 16, 16), [(8, 8)], True),
        (feature_map(2, 8, 64, 16), [(64, 16), (8, 8)], True),
        (feature_map(2, 8, 8, 8), [(8, 8), (8, 8)], True),  # whole map and patch
        (feature_map(2, 8, 7, 7), [(7, 7)], True),
        (feature_map(2, 8, 16, 16)[1:], [WHOLE], True),
        (feature_map(2, 8, 16, 16), [], False),
        (feature_map(2, 8, 16, 16), [(1, 1)], False),
        (feature_map(2, 8, 16, 16), [(2, 4)], False),
        (feature_map(2, 8, 16, 16), [WHOLE, WHOLE], False),
        (feature_map(2, 8, 12, 12), [(12, 12), (3, 3)], False),
        (feature_map(2, 8, 16, 68), [(16, 68)], False),
        (feature_map(2, 8, 16, 16).contiguous(), [WHOLE], False),
        (feature_map(2, 8, 16, 16)[:, 1:], [WHOLE], False),
        (feature_map(2, 8, 16, 16, dtype=torch.float64), [WHOLE], False),
        (feature_map(0, 8, 16, 16), [WHOLE], False),
    ],
    ids=lambda value: str(value) if not isinstance(value, torch.Tensor) else "x".join(map(str, value.shape)),
)
def test_supported_maps(x, sizes, supported):
    assert supports_patch_statistics(x, sizes) == supported
    with dispatch.without_kernels():
        assert not supports_patch_statistics(x, sizes)


def test_unsupported_maps_use_pytorch():
    x = feature_map(2, 6, 12, 12).contiguous()
    compare_with = features(x.double(), (2, 3))
    for leaf in (x, x.contiguous(memory_format=torch.channels_last)):
        found = features(leaf.requires_grad_(), (2, 3))
        assert all(error(found[k], v) < 1e-6 for k, v in compare_with.items())


def test_dense_without_kernels():
    """The loss reads vectors: channels-last maps need no copy."""
    x = feature_map(2, 6, 8, 8, dtype=torch.bfloat16)
    for pair in patch_statistics(x, [(8, 8), (2, 2)]):
        assert all(statistic.is_contiguous() for statistic in pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradient_nothing_is_saved(dtype):
    x = feature_map(1, 6, 4, 4, dtype=dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        wanted = features(x, (2, 4))
        assert [t.shape for t in kept] == [x.shape, (1, 2, 6)]
        kept.clear()
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            found = features(x, (2, 4))
    assert not kept
    for name, value in found.items():
        assert value.grad_fn is None
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name])
    assert found["f"].data_ptr() == x.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("only", [None, ["f"], ["f_std_2", "f_mean"]], ids=str)
def test_inside_a_compiled_function(only):
    torch._dynamo.reset()
    x = feature_map(2, 6, 4, 4)

    def function(x):
        found = features((1.5 * x).relu(), (2, 4), statistics=refuse)
        return [v for k, v in found.items() if only is None or k in only]

    found = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        values = run(leaf)
        sum(v.square().sum() for v in values).backward()
        found.append([*values, leaf.grad])
    for plain, compiled in zip(*found, strict=True):
        assert error(compiled, plain.double()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_of_an_encoder(compiled):
    """Maps that also feed the next layer; also between compiled blocks, whose maps have any layout (those of
    PyTorch's group norm are not channels-last on a GPU).
    """
    mae = ResNetMAE(in_channels=3, base_channels=8, blocks=(2,), decoder=False).to(DEVICE)
    to_channels_last(mae.requires_grad_(False))
    if compiled:
        for block in mae.encoder.stages[0]:
            block.compile(backend="aot_eager")
    x, found = feature_map(2, 3, 4, 4), []
    for kernels in (False, True):
        leaf = x.clone().requires_grad_()
        mae._statistics = refuse if kernels and not compiled else patch_statistics
        with torch.enable_grad() if kernels else dispatch.without_kernels():
            values = mae.features(leaf)
        sum(v.square().mean() for v in values.values()).backward()
        found.append({**values, "gradient": leaf.grad})
    # float32 convolutions use TF32 on a GPU, and cuDNN may choose another algorithm each time.
    atol, rtol = (1e-2, 1e-2) if DEVICE == "cuda" else (1e-5, 1e-4)
    torch.testing.assert_close(*found, atol=atol, rtol=rtol)


def test_an_unsupported_map_is_refused():
    with pytest.raises(
        ValueError, match=r"the kernels do not take patches \[\(3, 3\)\] of a map \[1, 2, 6, 6\]"
    ):
        fused_patch_statistics(feature_map(1, 2, 6, 6), [(3, 3)])
