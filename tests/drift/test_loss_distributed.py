"""Two processes with some of the groups each, against one process with all groups."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import driftgen as dg
from driftgen.drift.loss import Statistics
from tests.support.fork_server import run_ranks

pytestmark = pytest.mark.distributed

SHAPES = {"map": (5, 8), "mean": (1, 8), "input": (1, 3), "deep": (2, 16)}
GROUPS, SPLIT = 5, 2  # unequal on purpose


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def batch(groups, reverse=False):
    generator = torch.Generator().manual_seed(0)
    gen, pos, neg = (
        {k: torch.randn(GROUPS, n, *shape, generator=generator)[groups] for k, shape in SHAPES.items()}
        for n in (6, 5, 3)
    )
    if reverse:  # the order of names must not matter between processes
        gen = dict(reversed(gen.items()))
    for t in gen.values():
        t.requires_grad_()
    return gen, pos, neg, torch.rand(GROUPS, 3, generator=generator)[groups]


def run(groups, reverse, **options):
    gen, pos, neg, weight = batch(groups, reverse)
    with Collectives() as collectives:
        out = dg.DriftingLoss(**options)(gen, pos, neg, negative_weight=weight)
        out.loss.backward()
    return {
        "loss": out.loss.detach(),
        "per_group": out.per_group.detach(),
        "drift": out.drift,
        "scale": out.scale,
        "gradient": {k: t.grad for k, t in gen.items()},
        "collectives": collectives.seen,
    }


def run_processes(function, folder, *rest):
    """Call a function of this module with rank, folder and rest in two processes."""
    code = f"""
import json, sys
import torch.distributed as dist
from {__name__} import {function.__name__}
dist.init_process_group("gloo")
{function.__name__}(dist.get_rank(), *json.loads(sys.argv[1]))
dist.destroy_process_group()
"""
    run_ranks(["-c", code, json.dumps([str(folder), *rest])])


def process(rank, folder, options):
    groups = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    torch.save(run(groups, rank == 1, process_group=dist.group.WORLD, **options), f"{folder}/{rank}.pt")


def broken_process(rank, folder):
    positives = torch.randn(5, 3)
    if rank == 0:
        positives[1, 2] = torch.nan
    try:
        dg.DriftingLoss(process_group=dist.group.WORLD)(torch.randn(6, 3), positives)
    except ValueError as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))


def test_both_processes_report_bad_input(tmp_path):
    run_processes(broken_process, tmp_path)
    assert (tmp_path / "0.txt").read_text().startswith("positives contains NaN")
    assert (tmp_path / "1.txt").read_text().startswith("another process of the group received NaN")


def half_broken_process(rank, folder):
    """What only process 0 can see: a NaN beside given statistics, a group whose loss overflows."""
    ones, group = torch.ones(1), dist.group.WORLD
    positives = torch.full((5, 3), torch.nan) if rank == 0 else torch.randn(5, 3)
    given = Statistics(ones, ones.expand(1, 3), 2)
    out = dg.DriftingLoss(process_group=group)(torch.randn(6, 3), positives, statistics=given)
    assert out.loss.isnan() == (rank == 0)
    far = torch.tensor([[6e19 if rank == 0 else 0.0]])
    plain = dg.DriftingLoss((1e21,), normalize_features=False, normalize_drift=False, process_group=group)
    out = plain(torch.tensor([[0.0], [1.0]]), far)
    assert out.loss.isfinite()
    assert out.per_group.isinf() == (rank == 0)
    dist.barrier()
    Path(f"{folder}/{rank}.txt").touch()


def test_no_process_alone_raises(tmp_path):
    """The others would wait for it in the next collective."""
    run_processes(half_broken_process, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0.txt", "1.txt"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"convention": "paper", "normalization": "none", "chunk": 3},
        {"convention": "paper", "temperatures": (0.001,)},  # drifts of all processes underflow
    ],
)
def test_two_processes_are_one_batch(tmp_path, options):
    run_processes(process, tmp_path, options)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole = run(slice(None), False, **options)
    close = {"rtol": 1e-6, "atol": 1e-6}
    for part in parts:
        assert part["collectives"] == ["c10d::allreduce_"] * 2
        torch.testing.assert_close(part["loss"], whole["loss"], **close)
        for name in SHAPES:
            torch.testing.assert_close(part["scale"][name], whole["scale"][name], **close)
            torch.testing.assert_close(part["drift"][name], whole["drift"][name], **close)
    torch.testing.assert_close(torch.cat([p["per_group"] for p in parts]), whole["per_group"], **close)
    for name in SHAPES:
        joined = torch.cat([p["gradient"][name] for p in parts])
        torch.testing.assert_close(joined, whole["gradient"][name], **close)
        assert joined.abs().max() > 1e-3
    assert whole["collectives"] == []
