"""Random weights of a small EfficientNet-lite0 under the published names."""

import torch

# Widths of the stages of the small EfficientNet-lite0; equal ones keep the sums of its blocks.
LITE_STEM, LITE_WIDTHS, LITE_BLOCKS = 4, (4, 6, 8, 8, 10, 12, 14), (1, 2, 2, 3, 3, 4, 1)
LITE_KERNELS, LITE_STRIDES = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1)


def efficientnet_state():
    """Return random weights of an EfficientNet-lite0 under the published names."""
    generator = torch.Generator().manual_seed(9)
    state = {}

    def unit(convolution, norm, outputs, inputs, kernel):
        scale = (2 / (inputs * kernel**2)) ** 0.5
        state[f"{convolution}.weight"] = (
            torch.randn(outputs, inputs, kernel, kernel, generator=generator) * scale
        )
        state[f"{norm}.weight"] = 0.5 + torch.rand(outputs, generator=generator)
        state[f"{norm}.bias"] = 0.2 * torch.randn(outputs, generator=generator)
        state[f"{norm}.running_mean"] = 0.2 * torch.randn(outputs, generator=generator)
        state[f"{norm}.running_var"] = 0.5 + torch.rand(outputs, generator=generator)
        state[f"{norm}.num_batches_tracked"] = torch.tensor(3)

    unit("_conv_stem", "_bn0", LITE_STEM, 3, 3)
    width, index = LITE_STEM, 0
    for outputs, blocks, kernel in zip(LITE_WIDTHS, LITE_BLOCKS, LITE_KERNELS, strict=True):
        for _ in range(blocks):
            block, inner = f"_blocks.{index}", width if index == 0 else 3 * width
            if index:
                unit(f"{block}._expand_conv", f"{block}._bn0", inner, width, 1)
            unit(f"{block}._depthwise_conv", f"{block}._bn1", inner, 1, kernel)
            unit(f"{block}._project_conv", f"{block}._bn2", outputs, inner, 1)
            width, index = outputs, index + 1
    unit("_conv_head", "_bn1", 20, width, 1)
    return state | {"_fc.weight": torch.randn(5, 20, generator=generator), "_fc.bias": torch.zeros(5)}
