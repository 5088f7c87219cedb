"""The matrix form of a 1-D convolution against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from driftgen.ops.conv1d import Conv1d, conv1d


@pytest.mark.parametrize(
    ("stride", "padding", "size", "length"), [(1, 2, 5, 16), (2, 1, 3, 16), (1, 0, 1, 7)]
)
def test_values_and_gradients_are_those_of_pytorch(stride, padding, size, length):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s, dtype=torch.float64) for s in ((3, 4, length), (6, 4, size), (6,)))
    results = []
    for function in (conv1d, F.conv1d):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        out = function(*leaves, stride, padding)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for own, reference in zip(*results, strict=True):
        torch.testing.assert_close(own, reference)
        assert own.is_contiguous()


def test_module_has_the_names_and_the_initial_weights_of_pytorch():
    torch.manual_seed(0)
    own = Conv1d(4, 6, 3, padding=1)
    torch.manual_seed(0)
    reference = torch.nn.Conv1d(4, 6, 3, padding=1)
    assert own.state_dict().keys() == reference.state_dict().keys()
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(own(x), reference(x))


def test_autocast_keeps_its_dtype():
    layer, x = Conv1d(4, 6, 3, padding=1), torch.randn(2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
