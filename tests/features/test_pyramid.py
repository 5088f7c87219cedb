import numpy as np
import pytest
import torch

from driftgen.errors import InputError
from driftgen.features import feature_pyramid


def test_pyramid_values():
    feature_map = torch.randn(2, 3, 4, 8)
    got = feature_pyramid({"f": feature_map})
    assert list(got) == ["f", "f_mean", "f_std", "f_mean_2", "f_mean_4", "f_std_2", "f_std_4"]
    array = feature_map.double().numpy()
    for i, (row, column) in enumerate([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]):
        patch = array[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_allclose(got["f_mean_2"][:, i], patch.mean((2, 3)), atol=1e-6)
        np.testing.assert_allclose(got["f_std_2"][:, i], np.sqrt(patch.var((2, 3)) + 1e-6), atol=1e-6)
    np.testing.assert_allclose(got["f_std"][:, 0], np.sqrt(array.var((2, 3)) + 1e-6), atol=1e-6)
    assert torch.equal(got["f"][:, 9], feature_map[:, :, 1, 1])
    assert got["f_std_4"].shape == (2, 2, 3)


def test_pyramid_switches():
    """The switches cover the paper's study of feature sets: (a,b), (a-c), (a-d)."""
    maps = {"f": torch.randn(1, 2, 8, 8)}
    assert set(feature_pyramid(maps, patch_sizes=())) == {"f", "f_mean", "f_std"}
    assert set(feature_pyramid(maps, patch_sizes=(2,))) == {"f", "f_mean", "f_std", "f_mean_2", "f_std_2"}
    assert set(feature_pyramid(maps, vectors=False, mean_std=False, patch_sizes=(4,))) == {
        "f_mean_4",
        "f_std_4",
    }
    assert set(feature_pyramid(maps, mean_std=False, patch_sizes=(3,))) == {"f"}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pyramid_of_no_images(layout):
    features = feature_pyramid({"f": torch.zeros(0, 3, 8, 8).to(memory_format=layout)})
    one = feature_pyramid({"f": torch.zeros(1, 3, 8, 8)})
    assert {name: (0, *value.shape[1:]) for name, value in one.items()} == {
        name: tuple(value.shape) for name, value in features.items()
    }


def test_pyramid_of_a_constant_map():
    """A standard deviation of 0 must not have an infinite gradient."""
    feature_map = torch.full((1, 2, 4, 4), 300.0, requires_grad=True)
    features = feature_pyramid({"f": feature_map})
    assert torch.allclose(features["f_std"], torch.tensor(1e-3))
    sum(f.sum() for f in features.values()).backward()
    assert feature_map.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"maps": {"f": torch.zeros(2, 3, 4)}}, "maps"),
        ({"maps": {"f": torch.zeros(2, 3, 0, 4)}}, "maps"),
        ({"maps": {}, "patch_sizes": (0,)}, "patch_sizes"),
        ({"maps": {}, "patch_sizes": (2, 2)}, "patch_sizes"),
    ],
)
def test_pyramid_wrong_input(options, argument):
    with pytest.raises(InputError, match=f"^{argument}") as error:
        feature_pyramid(options.pop("maps"), **options)
    assert "\n" not in str(error.value)
