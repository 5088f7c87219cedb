"""Which runs capture their steps. Captured steps are tested on a GPU, in test_cuda_training.py."""

from types import SimpleNamespace

import pytest
import torch

from driftgen.training.graphed_step import can_capture
from tests.support.runs import config


@pytest.mark.parametrize(
    ("changes", "device", "group", "expected"),
    [
        ([], "cuda", None, True),
        (["compile=true"], "cuda", None, True),
        (["cuda_graph=false"], "cuda", None, False),
        (["batch.micro=2"], "cuda", None, False),
        (["checkpoint_blocks=true"], "cuda", None, False),
        ([], "cuda", object(), False),
        ([], "cpu", None, False),
    ],
)
def test_which_runs_capture(changes, device, group, expected):
    distributed = SimpleNamespace(device=torch.device(device), group=group)
    assert can_capture(config(*changes), distributed) is expected
