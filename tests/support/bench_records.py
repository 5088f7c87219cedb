"""Benchmark commands and checks of their output."""

import torch

from driftgen.bench.cards import CARDS

H200 = CARDS["H200"]
CPU = torch.device("cpu")


def fits(text):
    assert max(map(len, text.splitlines())) <= 80
    return text
