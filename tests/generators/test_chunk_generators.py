"""UNet1D, ChunkTransformer and ChunkMLP: shapes, options, noise and conditions that matter, time steps."""

import pytest
import torch

import driftgen as dg
from driftgen.generators import ChunkMLP, ChunkTransformer, UNet1D

SMALL = {
    UNet1D: {"widths": (16, 32), "groups": 4, "kernel_size": 3},
    ChunkTransformer: {"hidden_size": 32, "depth": 2, "heads": 2},
    ChunkMLP: {"hidden_size": 32, "depth": 2},
}
KINDS = pytest.mark.parametrize("kind", list(SMALL))


def build(kind, **options):
    torch.manual_seed(0)
    return kind(**{**SMALL[kind], "action_size": 3, "horizon": 8, "condition_size": 5, **options})


@KINDS
def test_chunks_have_the_shape_of_their_noise(kind):
    net = build(kind)
    noise = net.sample_noise(4)
    assert noise.shape == (4, 8, 3)
    assert net(noise, torch.randn(4, 2, 5)).shape == (4, 8, 3)


@KINDS
def test_chunks_start_apart_and_follow_noise_and_observations(kind):
    """Identical chunks do not repel each other: a generator must not start as a constant."""
    net = build(kind)
    noise, condition = net.sample_noise(256), torch.randn(256, 2, 5)
    assert 0.2 < net(noise, condition).std().item() < 1.0
    same_noise = net(noise[:1].expand(256, -1, -1), condition)
    same_condition = net(noise, condition[:1].expand(256, -1, -1))
    assert same_noise.std(0).mean() > 0.02
    assert same_condition.std(0).mean() > 0.1


@KINDS
def test_every_parameter_has_a_gradient(kind):
    for time_size in (0, 16):
        net = build(kind, time_size=time_size)
        time = [torch.arange(4)] if time_size else []
        net(net.sample_noise(4), torch.randn(4, 2, 5), *time).square().sum().backward()
        assert not [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]


@KINDS
def test_noise_of_a_seed_does_not_depend_on_the_batch(kind):
    net = build(kind)
    few, many = (net.sample_noise(n, torch.Generator().manual_seed(3)) for n in (2, 5))
    assert torch.equal(few, many[:2])


@KINDS
def test_time_steps_change_the_result_and_are_needed(kind):
    net = build(kind, time_size=16)
    noise, condition = net.sample_noise(2), torch.randn(2, 2, 5)
    first, second = (net(noise, condition, torch.full((2,), t)) for t in (0, 50))
    assert (first - second).abs().max() > 1e-3
    with pytest.raises(dg.InputError, match="one time step per chunk"):
        net(noise, condition)
    with pytest.raises(dg.InputError, match="time_size=0"):
        build(kind)(noise, condition, torch.zeros(2))


@KINDS
def test_wrong_shapes_are_one_line(kind):
    net = build(kind)
    with pytest.raises(dg.InputError, match=r"noise has shape \[2, 8, 4\], expected \[2, 8, 3\]"):
        net(torch.randn(2, 8, 4), torch.randn(2, 2, 5))
    with pytest.raises(dg.InputError, match=r"condition has shape \[3, 2, 5\], expected \[2, 2, 5\]"):
        net(torch.randn(2, 8, 3), torch.randn(3, 2, 5))


@KINDS
def test_saved_and_loaded(kind, tmp_path):
    net = build(kind).eval()
    dg.save_model(net, tmp_path / "m")
    loaded = dg.load_model(tmp_path / "m").eval()
    noise, condition = net.sample_noise(2), torch.randn(2, 2, 5)
    assert torch.equal(net(noise, condition), loaded(noise, condition))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (UNet1D, {"horizon": 6, "widths": (8, 8, 8)}, r"horizon=6 can be halved 1 times: set widths=\[8,8\]"),
        (UNet1D, {"kernel_size": 4}, "kernel_size=4 is even: set kernel_size=5"),
        (UNet1D, {"widths": (12, 24), "groups": 8}, "groups=8 does not divide every width: set groups=4"),
        (UNet1D, {"width": 3}, "option='width' is not known: did you mean 'widths'"),
        (ChunkTransformer, {"heads": 3}, "heads=3 does not divide hidden_size=32: set heads=1"),
        (ChunkMLP, {"time_size": 5}, "time_size=5 is odd: set time_size=6"),
        (ChunkTransformer, {"time_size": 5}, "time_size=5 is odd: set time_size=6"),
    ],
)
def test_options_that_do_not_fit(kind, options, message):
    with pytest.raises(dg.InputError, match=message):
        build(kind, **options)


def test_causal_actions_do_not_see_later_ones():
    net = build(ChunkTransformer, causal=True).eval()
    noise, condition = net.sample_noise(1), torch.randn(1, 2, 5)
    changed = noise.clone()
    changed[:, 5:] += 1
    a, b = net(noise, condition), net(changed, condition)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert (a[:, 5:] - b[:, 5:]).abs().max() > 1e-3


def test_presets_grow():
    for kind in SMALL:
        sizes = [sum(p.numel() for p in kind.preset(n).parameters()) for n in ("small", "base")]
        assert sizes[0] < sizes[1]
    with pytest.raises(dg.InputError, match="preset='huge' is not known"):
        UNet1D.preset("huge")


@KINDS
def test_actions_are_float32_under_autocast(kind):
    net = build(kind)
    noise, condition = net.sample_noise(3), torch.randn(3, 2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        chunks = net(noise, condition)
    assert chunks.dtype == torch.float32
    torch.testing.assert_close(chunks, net(noise, condition), atol=0.05, rtol=0)
