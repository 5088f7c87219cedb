"""Encoders for evaluation: names, identity, and what they refuse."""

import pytest
import torch

from driftgen.errors import InputError
from driftgen.evaluation.encoders import TF32, Encoder, load_encoder, wrap_encoder
from driftgen.evaluation.image_sources import open_real
from driftgen.evaluation.reference import compute_reference
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.image_mlp import ImageMLP
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.support.tf32 import tf32

IMAGES = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def build_mae(channels=3):
    torch.manual_seed(0)
    return ResNetMAE(in_channels=channels, base_channels=8, blocks=(1, 1), decoder=False)


def test_a_saved_encoder_gives_its_pooled_features(tmp_path):
    mae = build_mae()
    save_model(mae, tmp_path / "mae-photos")
    encoder = load_encoder(tmp_path / "mae-photos")
    assert (encoder.name, encoder.distance) == ("mae-photos", "FD-mae-photos")
    pyramid = mae.eval().features(IMAGES.float() / 127.5 - 1)
    expected = [pyramid[k].flatten(1) for k in pyramid if k.endswith(("_mean", "_std"))]
    assert len(expected) >= 4
    torch.testing.assert_close(encoder(IMAGES), torch.cat(expected, dim=1))


def test_identity_tells_weights_apart():
    first, second = (wrap_encoder(build_mae(), "mae", "cpu").identity for _ in range(2))
    assert first == second
    changed = build_mae()
    with torch.no_grad():
        next(changed.parameters()).mul_(1.0001)
    assert wrap_encoder(changed, "mae", "cpu").identity["weights"] != first["weights"]


def test_gray_images_fill_three_channels():
    encoder = wrap_encoder(build_mae(), "mae", "cpu")
    assert torch.equal(encoder(IMAGES[:, :1]), encoder(IMAGES[:, :1].expand(-1, 3, -1, -1)))


def test_wrong_encoders_and_images_are_one_line(tmp_path):
    save_model(ImageMLP(input_size=8, in_channels=1, num_classes=2, hidden_size=8, depth=1), tmp_path / "g")
    with pytest.raises(InputError, match=r"g is no encoder \(ImageMLP\): give a pretraining run"):
        load_encoder(tmp_path / "g")
    with pytest.raises(InputError, match="takes no images of 3x16x16"):
        wrap_encoder(build_mae(channels=1), "mae", "cpu")(IMAGES)
    with pytest.raises(InputError, match="expected uint8"):
        load_encoder("pixels")(IMAGES.float())


def test_statistics_in_float32_and_tf32_may_be_mixed():
    def encoder(dtype):
        identity = {"encoder": "e", "dtype": dtype}
        return Encoder("e", "FD-e", identity, lambda x: (x.flatten(1).float(), None), torch.device("cpu"))

    reference = compute_reference(open_real("digits-heldout"), encoder("float32"), Distributed.start("cpu"))
    reference.check(encoder(TF32))
    with pytest.raises(InputError, match="dtype is 'float32' there and 'bfloat16' here"):
        reference.check(encoder("bfloat16"))


def test_tf32_is_set_back():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with tf32(True), tf32(False):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
