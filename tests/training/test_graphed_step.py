"""Which runs capture their steps. Captured steps are tested on a GPU, in test_cuda_training.py."""

from types import SimpleNamespace

import pytest
import torch

from driftgen.training.graphed_step import GraphedStep, can_capture
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


def test_a_step_is_captured_on_the_gpu_of_its_parameters(monkeypatch):
    """Not on the current GPU, where the graph would be empty. Two GPUs are needed to see that."""
    devices = []

    def stream(device=None):
        devices.append(device)
        raise RuntimeError("no GPU")

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    parameter = torch.nn.Parameter(torch.zeros(1, device="meta"))
    with pytest.raises(RuntimeError, match="no GPU"):
        GraphedStep(lambda inputs: inputs, [parameter])({"x": torch.zeros(1)})
    assert devices == [parameter.device]
