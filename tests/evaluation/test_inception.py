"""The FID Inception: the published graph's features with seeded weights, its file layouts, its resize."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driftgen.errors import InputError
from driftgen.evaluation import inception
from driftgen.evaluation.encoders import load_encoder
from tests.support.inception_weights import pytorch_fid_state, torchscript

# Features that the TorchScript graph of the FID Inception computes with seeded weights in place of its own.
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "fid_inception_seeded.npz")


@pytest.fixture(scope="module")
def weight_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(pytorch_fid_state(), path)
    return path


@torch.no_grad()
def test_features_are_those_of_the_published_graph(weight_file):
    network, _ = inception.load_inception(weight_file, force=True)
    features, logits = network(torch.from_numpy(GOLDEN["images"][:1]))
    assert features.shape == (1, inception.FEATURES)
    torch.testing.assert_close(features, torch.from_numpy(GOLDEN["features"][:1]), rtol=2e-4, atol=2e-4)
    assert logits.shape == (1, inception.CLASSES)


def test_layouts_hold_the_same_network(weight_file, tmp_path):
    script = tmp_path / "inception.pt"
    torchscript().save(str(script))
    first, second = (inception.load_inception(path, force=True) for path in (weight_file, script))
    assert first.checksum == second.checksum
    expected = {
        name: value for name, value in first.network.state_dict().items() if not name.startswith("fc")
    }
    state = second.network.state_dict()
    assert state.keys() == expected.keys()  # the script holds no classifier
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_other_weights_are_refused(weight_file):
    with pytest.raises(InputError, match=r"other weights .* is no FID"):
        inception.load_inception(weight_file)


def test_encoder_of_gray_images_names_its_distance_fid(weight_file):
    encoder = load_encoder(weight_file, force=True)
    gray = torch.from_numpy(GOLDEN["images"][:1, :1])
    assert encoder.distance == "FID"
    assert torch.equal(encoder(gray), encoder(gray.expand(-1, 3, -1, -1)))
    with pytest.raises(InputError, match="expected uint8"):
        encoder(gray.float())


@pytest.mark.parametrize("size", [(5, 7), (32, 32), (400, 300)])
def test_resize_interpolates_without_a_half_pixel_shift(size):
    image = torch.rand(1, 1, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    resized = inception.resize_tf1(image)[0, 0]
    for i, j in [(0, 0), (298, 298), (17, 250), (150, 3)]:
        y, x = i * size[0] / 299, j * size[1] / 299
        top, left = int(y), int(x)
        bottom, right = min(top + 1, size[0] - 1), min(left + 1, size[1] - 1)
        a, b = y - top, x - left
        p = image[0, 0]
        expected = (1 - a) * ((1 - b) * p[top, left] + b * p[top, right])
        expected += a * ((1 - b) * p[bottom, left] + b * p[bottom, right])
        assert float(resized[i, j]) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "is not a file"), (b"no archive", "or is damaged"), ({"a": torch.zeros(2)}, "does not hold")],
)
def test_wrong_files_are_one_line(tmp_path, content, text):
    path = tmp_path / "inception.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError, match=text):
        inception.load_inception(path)
