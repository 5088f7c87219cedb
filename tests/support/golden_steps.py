"""The golden training step and small steps."""

import json
from pathlib import Path

import numpy as np
import torch

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT, Noise
from driftgen.interop.mae_names import official_mae_names
from driftgen.training.microbatch import MicroBatchedStep
from driftgen.training.step import DriftStep, guided_inputs
from tests.support.mae_weights import recipe, to_ours

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "06_train_step.npz")
CASE = json.loads((DATA / "06_train_step.json").read_text())["cases"]["small8"]


def golden(name):
    return torch.tensor(GOLDEN[f"small8/{name}"])


def images(name):
    value = golden(name)
    return value.movedim(-1, -3).contiguous()


def make_step(generator, phi, loss, *, generated, autocast=None, micro=1, mode="exact"):
    step = DriftStep(generator, phi.features, loss, generated=generated, autocast=autocast)
    return step if micro == 1 else MicroBatchedStep(step, micro, mode)


def golden_step(device="cpu", **options):
    generator = dg.load_official(DATA / "artifacts" / "ditgen_A_full")
    mae = ResNetMAE(4, 64, blocks=(2, 2, 2, 2), decoder=False)
    names = official_mae_names(CASE["mae_config"], encoder_only=True)
    mae.load_state_dict({o: to_ours(recipe(p, CASE["mae_param_shapes"][p])) for p, o in names.items()})
    loss = dg.DriftingLoss(CASE["R_list"])
    phi = FeatureStack([mae]).to(device)
    return generator.to(device), make_step(generator, phi, loss, generated=CASE["gen_per_label"], **options)


def golden_step_inputs(noise="x", alpha="cfg", style="noise_labels"):
    return guided_inputs(
        Noise(images(noise), golden(style).long()),
        golden("labels").long(),
        golden(alpha),
        images("pos"),
        images("neg"),
        generated=CASE["gen_per_label"],
    )


def small(device="cpu", **options):
    torch.manual_seed(0)
    net = DiT(
        input_size=8, in_channels=3, hidden_size=32, depth=1, num_heads=2, num_classes=6, style_codebooks=2
    )
    for p in net.parameters():
        p.data += 0.05 * torch.randn_like(p)
    # Not narrower: with one channel in a group, means are constants and their drift is rounding noise.
    mae = ResNetMAE(3, 64, blocks=(1, 1), decoder=False)
    phi = FeatureStack([mae]).to(device)
    return net.to(device), make_step(net, phi, dg.DriftingLoss(), generated=4, **options)


def small_step_inputs(net, seed=0, classes=6, unconditional=3):
    r = torch.Generator().manual_seed(seed)
    alpha = 1 + 2 * torch.rand(classes, generator=r)
    return guided_inputs(
        net.sample_noise(4 * classes, r),
        torch.arange(classes),
        alpha,
        torch.randn(classes, 5, 3, 8, 8, generator=r),
        torch.randn(classes, unconditional, 3, 8, 8, generator=r),
        generated=4,
    )


def gradients(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()])
