"""Golden DiT cases and artifacts of the authors' code."""

from pathlib import Path

import numpy as np
import torch

import driftgen as dg

DATA = Path(__file__).parents[1] / "data"
GOLDEN = {**np.load(DATA / "02_ditgen.npz"), **np.load(DATA / "02_ditgen_plain.npz")}
CASES = ("A_full", "B_plain_layernorm_gelu", "C_pixel_patch4")


def artifact(case):
    return DATA / "artifacts" / f"ditgen_{case}"


def golden(case, key):
    value = torch.tensor(GOLDEN[f"{case}/{key}"])
    if value.ndim == 4:
        return value.permute(0, 3, 1, 2).contiguous()  # the release has BHWC
    return value.long() if value.dtype == torch.int32 else value


def noise_of(case):
    return dg.generators.Noise(golden(case, "x"), golden(case, "noise_labels"))
