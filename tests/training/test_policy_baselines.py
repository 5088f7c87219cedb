"""Baselines of a policy: draws of several processes, and micro-batches."""

import pytest
import torch

from driftgen.support.distributed import Distributed
from driftgen.training.config import Optimizer, Output
from driftgen.training.policy_config import PolicyBatch, PolicyConfig
from driftgen.training.policy_task import PolicyTraining

METHODS = ["regression", "diffusion"]


def training(method, rank=0, processes=1, micro=1):
    config = PolicyConfig(
        method=method,
        data={"kind": "two-ways"},
        horizon=8,
        executed=4,
        generator={"options": {"widths": [16], "groups": 4, "kernel_size": 3}},
        batch=PolicyBatch(observations=6, generated=4, micro=micro),
        optim=Optimizer(lr=1e-3, warmup=2, steps=4),
        output=Output(metrics_every=2),
    )
    return PolicyTraining(config, Distributed(rank, processes, torch.device("cpu"), None))


@pytest.mark.parametrize("method", ["drifting", *METHODS])
def test_processes_share_the_draws_of_a_step(method):
    parts, whole = [training(method, rank, 2).draw(3) for rank in (0, 1)], training(method).draw(3)
    torch.testing.assert_close(torch.cat([part.noise for part in parts]), whole.noise, rtol=0, atol=0)
    assert torch.equal(torch.cat([part.positives for part in parts]), whole.positives)
    for index, tensor in enumerate(whole.conditions[1:], 1):  # time steps of diffusion
        assert torch.equal(torch.cat([part.conditions[index] for part in parts]), tensor)


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_of_a_baseline_are_the_step(method):
    losses, gradients, batches = [], [], []
    for micro in (1, 4):
        task = training(method, micro=micro)
        sizes = []
        task.network.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(len(args[0])))
        losses.append(task.compute_gradient(0))
        gradients.append(torch.cat([p.grad.flatten() for p in task.network.parameters()]))
        batches.append(sizes)
    assert batches == [[6], [2, 1, 1, 2]]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
