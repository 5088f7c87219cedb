"""Small networks for tests of backbones: the golden one, some of transformers, torchvision weights."""

from pathlib import Path

import pytest
import torch

from driftgen.features.backbones import Backbone
from driftgen.interop.convnext_names import convnext_config_from, official_convnext_names
from driftgen.interop.flax_msgpack import read_parameters

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parents[1] / "data"
ARTIFACT = DATA / "artifacts" / "convnext_tiny" / "params.msgpack"
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
DEPTHS, WIDTH = (3, 4, 6, 3), 4


def to_ours(name, tensor):
    if not name.endswith("/kernel"):
        return tensor
    return (tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.T).contiguous()


def golden_model(dtype=torch.float32):
    parameters = read_parameters(ARTIFACT)
    config = convnext_config_from(parameters)
    names = official_convnext_names(config)
    with torch.device("meta"):
        model = Backbone.from_convnext(**config)
    state = {names[name]: to_ours(name, tensor) for name, tensor in parameters.items()}
    model.load_state_dict(state, assign=True)
    return model.to(dtype)


def normalized(x):
    return ((x + 1) / 2 - MEAN[:, None, None]) / STD[:, None, None]


def scramble(model):
    """Randomize every tensor, including the statistics of batch norms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                value = tensor if tensor.ndim > 1 else 0.3 * noise + (1 if "weight" in name else 0)
                tensor.copy_(noise.abs() + 0.5 if "running_var" in name else value)
    return model.eval()


def tiny_convnext():
    config = transformers.ConvNextV2Config(
        depths=[1, 2, 1, 1], hidden_sizes=[8, 12, 16, 24], num_labels=5, drop_path_rate=0.5
    )
    return scramble(transformers.ConvNextV2ForImageClassification(config))


def tiny_resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[1, 2, 4, 1], num_labels=5
    )
    return scramble(transformers.ResNetForImageClassification(config))


def tiny_dinov2():
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=8, num_attention_heads=2, image_size=56, patch_size=14, mlp_ratio=2
    )
    return scramble(transformers.Dinov2Model(config))


def torchvision_state(width=WIDTH):
    """Return random weights under torchvision's names."""
    generator = torch.Generator().manual_seed(7)
    state = {}

    def convolution(name, inputs, outputs, kernel):
        scale = (2 / (inputs * kernel**2)) ** 0.5
        state[f"{name}.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=generator) * scale

    def norm(name, channels):
        # Small at the end of a block, because sixteen residual blocks add up.
        size = 0.1 if name.endswith(("bn3", "downsample.1")) else 1.0
        state[f"{name}.weight"] = size * (0.5 + torch.rand(channels, generator=generator))
        state[f"{name}.bias"] = 0.2 * torch.randn(channels, generator=generator)
        state[f"{name}.running_mean"] = 0.2 * torch.randn(channels, generator=generator)
        state[f"{name}.running_var"] = 0.5 + torch.rand(channels, generator=generator)
        state[f"{name}.num_batches_tracked"] = torch.tensor(11)

    convolution("conv1", 3, width, 7)
    norm("bn1", width)
    inputs = width
    for i, count in enumerate(DEPTHS):
        middle = width * 2**i
        for k in range(count):
            block = f"layer{i + 1}.{k}"
            for part, (a, b, kernel) in enumerate(
                [(inputs, middle, 1), (middle, middle, 3), (middle, 4 * middle, 1)]
            ):
                convolution(f"{block}.conv{part + 1}", a, b, kernel)
                norm(f"{block}.bn{part + 1}", b)
            if k == 0:
                convolution(f"{block}.downsample.0", inputs, 4 * middle, 1)
                norm(f"{block}.downsample.1", 4 * middle)
            inputs = 4 * middle
    return state


class Evil:
    def __reduce__(self):
        return (print, ("executed",))
