"""Training of the masked autoencoder: memory format of its maps, and a few steps."""

import copy

import numpy as np
import pytest
import torch

from driftgen.features import ResNetMAE, resnet_layers


def small(**options):
    return ResNetMAE(**{"in_channels": 3, "base_channels": 8, "blocks": (1, 2), "num_classes": 5} | options)


def test_upsampling_in_channels_last_is_the_same():
    """On a GPU maps and gradients are channels-last; the values stay."""
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    want = resnet_layers.upsample(x, (8, 8))
    got = resnet_layers._upsample_channels_last(x, (8, 8))
    assert got.is_contiguous(memory_format=torch.channels_last)
    formats = []
    inner = got.grad_fn.next_functions[0][0]
    inner.register_prehook(
        lambda grads: formats.append(grads[0].is_contiguous(memory_format=torch.channels_last))
    )
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (want, got)]
    assert formats == [True]
    assert torch.allclose(got, want, rtol=0, atol=1e-15)
    assert torch.allclose(*grads, rtol=0, atol=1e-14)


def test_maps_keep_their_memory_format():
    """From a channels-last input every map is channels-last, the decoder's too."""
    model, seen = small(), []
    for module in model.modules():
        if isinstance(module, resnet_layers.Norm | resnet_layers.Conv):
            module.register_forward_hook(lambda _m, _a, out: seen.append(out))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model.reconstruct(x, model.sample_mask(2, size=(8, 8)))
    assert len(seen) > 10
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in seen)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_a_gpu_is_channels_last(compiled, monkeypatch):
    """No contiguous map reaches the upsampling; loss and gradients are those of the CPU."""
    # Gradients amplify the rounding of TF32, and any rounding where a norm has one channel per group.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, seen = small(base_channels=64), []
    x, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    mask = model.sample_mask(4, torch.Generator().manual_seed(0), size=(8, 8))
    want = model.loss(x, mask, labels, 0.1).loss
    want.backward()
    grads = [p.grad for p in model.parameters()]
    model = copy.deepcopy(model).cuda()
    model.zero_grad()
    if compiled:
        model.compile_parts()
    for up in model.decoder.ups:
        up.register_forward_pre_hook(lambda _m, args: seen.extend(args))
    got = model.loss(x.cuda(), mask.cuda(), labels.cuda(), 0.1).loss
    got.backward()
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in seen)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        largest = float(grad.abs().max())
        torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=1e-3, atol=1e-3 * largest)


def test_training_learns():
    model = small(base_channels=16)
    x = torch.nn.functional.interpolate(torch.randn(8, 3, 2, 2), size=(8, 8), mode="bilinear")
    labels = torch.arange(8) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        out = model(x, None, labels, 0.1, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert np.mean(losses[-5:]) < 0.3 * losses[0]
