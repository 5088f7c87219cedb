"""TAESD's state dicts against an explicit reference network, and malformed files."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftgen.tokenizers import TinyVAE
from driftgen.tokenizers.taesd import TinyAutoencoder
from tests.support.autoencoders import X, close, taesd_files, taesd_states, tiny_network
from tests.support.helpers import fails

ONE = torch.zeros(1)
ENCODER, DECODER = taesd_states()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return taesd_files(tmp_path_factory.mktemp("taesd"))


def twin_block(s, i, x):
    if f"{i}.pool.0.weight" in s:
        y = F.group_norm(
            F.conv2d(x, s[f"{i}.pool.0.weight"]), 4, s[f"{i}.pool.1.weight"], s[f"{i}.pool.1.bias"]
        )
        x = x + F.conv2d(F.relu(y), s[f"{i}.pool.3.weight"])
    y = x
    for j in (0, 2, 4):
        y = F.conv2d(y, s[f"{i}.conv.{j}.weight"], s[f"{i}.conv.{j}.bias"], padding=1)
        y = F.relu(y) if j < 4 else y
    skip = F.conv2d(x, s[f"{i}.skip.weight"]) if f"{i}.skip.weight" in s else x
    return F.relu(y + skip)


def twin_encode(s, x):
    x = F.conv2d((x + 1) / 2, s["0.weight"], s["0.bias"], padding=1)
    x = F.conv2d(twin_block(s, 1, x), s["2.weight"], stride=2, padding=1)
    x = F.conv2d(twin_block(s, 3, x), s["4.weight"], stride=2, padding=1)
    return F.conv2d(twin_block(s, 5, x), s["6.weight"], s["6.bias"], padding=1)


def twin_decode(s, z):
    def double(x):
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)

    x = F.relu(F.conv2d(3 * torch.tanh(z / 3), s["1.weight"], s["1.bias"], padding=1))
    x = F.conv2d(double(twin_block(s, 3, x)), s["5.weight"], padding=1)
    x = F.conv2d(double(twin_block(s, 6, x)), s["8.weight"], padding=1)
    return 2 * F.conv2d(twin_block(s, 9, x), s["10.weight"], s["10.bias"], padding=1) - 1


def test_tiny_from_files(files):
    encoder, decoder = taesd_states()
    vae = TinyVAE.from_files(*files)
    assert (vae.latent_channels, vae.factor) == (6, 4)
    with torch.no_grad():
        z = vae.encode(X)
        assert close(z, twin_encode(encoder, X))
        assert z.std() > 0.1
        assert close(vae.decode(z), twin_decode(decoder, z))
        far = 20 * z
        assert close(vae.decode(far), twin_decode(decoder, far))


def test_both_tiny_forms_agree():
    """diffusers names the same network differently: the clamp and the upsampling have no index."""
    network = tiny_network()
    encoder = {k.removeprefix("encoder.layers."): v for k, v in network.state_dict().items() if k[0] == "e"}
    decoder = {}
    for key, value in network.state_dict().items():
        if key.startswith("decoder.layers."):
            index, rest = key.removeprefix("decoder.layers.").split(".", 1)
            decoder[f"{int(index) + 1}.{rest}"] = value
    ours = TinyAutoencoder(encoder, decoder)
    with torch.no_grad():
        z = network.encode(X).latents
        assert close(ours.encode(X), z)
        assert close(ours.decode(z), network.decode(z).sample)


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        (ENCODER, taesd_states(latent=7)[1], "together: .* 3 to 6 channels, 4x down, .* 7 to 3 .*, 4x up$"),
        (DECODER, ENCODER, "^encoder is not in TAESD's layout; unexpected: nothing at 0"),
        (ENCODER, ENCODER, "^encoder and decoder do not belong together"),
        (ENCODER | {"a.weight": ONE}, DECODER, "^encoder is not .* unexpected: a.weight$"),
        (ENCODER | {"1.gate.weight": ONE}, DECODER, "^encoder is not .* 1.conv.0.bias.* and 2 more$"),
        ({k: v for k, v in ENCODER.items() if k != "1.conv.4.bias"}, DECODER, "^encoder is not .* 1.conv.0"),
        (ENCODER, {k: v for k, v in DECODER.items() if k[:2] != "9."}, "^decoder is not .* nothing at 9$"),
        (ENCODER | {"1.conv.2.bias": ONE}, DECODER, r"^encoder: unexpected shapes, 1.conv.2.bias \[1\]$"),
        (ENCODER | {"0.weight": ONE}, DECODER, r"^encoder: unexpected shapes, 0.weight \[1\]$"),
        (
            ENCODER | {"0.weight": torch.zeros(9, 3, 3, 3)},
            DECODER,
            "^encoder: layer 1 takes 8 channels, but its input has 9$",
        ),
        ({}, DECODER, "^encoder holds no weights"),
    ],
)
def test_wrong_layouts(encoder, decoder, message):
    fails(lambda: TinyAutoencoder(encoder, decoder), message)


def test_wrong_files(files, tmp_path):
    wrong = tmp_path / "encoder.pth"
    fails(lambda: TinyVAE.from_files(wrong, files[1]), "is not a file")
    wrong.write_bytes(b"nothing")
    fails(lambda: TinyVAE.from_files(wrong, files[1]), "encoder.pth holds more than tensors, or is damaged")
    wrong.with_suffix(".safetensors").write_bytes(b"nothing")
    fails(
        lambda: TinyVAE.from_files(files[0], wrong.with_suffix(".safetensors")),
        "cannot be read as a state dict",
    )
    torch.save([1, 2], wrong)
    fails(lambda: TinyVAE.from_files(wrong, files[1]), "save only the network's state_dict")
    # Unpickling a whole module can run code, so it is refused.
    torch.save(nn.Conv2d(1, 1, 1), wrong)
    fails(lambda: TinyVAE.from_files(wrong, files[1]), "encoder.pth holds more than tensors, or is damaged")
