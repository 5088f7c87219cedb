"""Figures that ``driftgen bench`` derives from measurements: rows, ratios, floors, profiles, timings."""

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch._C._autograd import DeviceType

from driftgen.bench import profiler as profile
from driftgen.bench.cards import Release, find_card
from driftgen.bench.clock import Timing, timed
from driftgen.bench.loss_bench import default_cases, loss_operations
from driftgen.bench.record import Row, least_time, show_rows
from tests.support.bench_records import CPU, H200, fits


def full_row():
    floor = least_time(H200, moved=4.3e9, operations=790e12 * 0.004, dtype=torch.bfloat16)
    return Row(
        "65,536 x 64/64/16 x 256",
        "bfloat16, kernels",
        Timing(0.012, 0.011, 2.0, 2 * 2**30, queued_seconds=0.010),
        {"eager": Timing(0.104, 0.1, 1.0, 5 * 2**30), "plain": None},
        Release(0.066, 30 * 2**30),
        floor,
        held_bytes=4 * 2**30,
        least_bytes=5 * 2**30,
        images=100,
    )


def test_ratios_and_floors_of_a_row():
    record = full_row().as_record()
    assert record["floor"]["seconds_by_bytes"] == pytest.approx(0.001)
    assert record["floor"]["seconds_by_operations"] == pytest.approx(0.004)
    assert record["floor"]["seconds"] == pytest.approx(0.004)  # the larger
    assert record["floor"]["ratio"] == pytest.approx(3)
    assert record["release"]["ratio"] == pytest.approx(5.5)
    assert record["release"]["peak_ratio"] == pytest.approx(5)
    assert record["references"]["eager"]["ratio"] == pytest.approx(0.104 / 0.012)
    assert record["references"]["eager"]["peak_bytes"] == 9 * 2**30
    assert record["references"]["plain"] is None
    assert record["peak_bytes"] == 6 * 2**30
    assert record["peak_ratio"] == pytest.approx(1.2)
    assert record["images_per_second"] == pytest.approx(10_000)


def test_a_row_with_all_columns_fits():
    text = io.StringIO()
    missing = Row("64 x 64/64/16", "whole", None, {"eager": None})
    show_rows([full_row(), missing], "title", Console(file=text, width=80))
    shown = fits(text.getvalue())
    for figure in ("12 ms", "104 ms", "8.67x", "66 ms", "5.5x", "4 ms", "3x", "6.0 GiB", "1.2x", "OOM"):
        assert figure in shown
    assert "…" not in shown
    assert missing.as_record()["fits"] is False


def test_known_and_unknown_cards():
    assert find_card("NVIDIA H200") is H200
    assert find_card("NVIDIA H200 NVL") is H200
    for name in (None, "", "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB"):
        assert find_card(name) is None
    unknown = least_time(None, moved=8.0, operations=9.0, dtype=torch.bfloat16)
    assert (unknown.bytes, unknown.operations, unknown.seconds) == (8.0, 9.0, None)
    eight = least_time(H200, moved=0.0, operations=1e15, dtype=torch.bfloat16, fp8=True).seconds
    assert eight == pytest.approx(1e15 / 1580e12)  # twice as many as in 16 bits
    other = replace(H200, fp8_operations=None)
    assert least_time(other, moved=4.3e12, operations=1e30, dtype=torch.bfloat16, fp8=True).seconds == 1
    # The peak of 16-bit products says nothing about float32.
    assert least_time(H200, moved=4.3e12, operations=1e30, dtype=torch.float32).seconds == 1


def test_floor_of_the_largest_case():
    case = default_cases(torch.device("cuda"))[0]
    moved = 2 * case.groups * (case.samples + case.generated) * case.numbers
    assert moved / 2**30 == pytest.approx(6.5)  # moved once: 1.6 ms
    floor = least_time(H200, moved=moved, operations=loss_operations(case), dtype=torch.bfloat16)
    assert floor.seconds_by_bytes == pytest.approx(1.6e-3, rel=0.02)


def test_kernels_belong_to_the_part_that_launched_them():
    def event(name, start, end, number=0, gpu=False, note=False):
        where = DeviceType.CUDA if gpu else DeviceType.CPU
        span = SimpleNamespace(start=start, end=end)
        own = {"is_user_annotation": note, "self_cpu_time_total": end - start}
        return SimpleNamespace(name=name, time_range=span, id=number, device_type=where, **own)

    events = [
        event("cudaLaunchKernel", 0, 1, 9),  # before any mark
        event(profile.MARK + "generator", 1, 1, note=True),
        event("aten::mm", 2, 5, 11),  # the number of an operator is no kernel's
        event("cudaLaunchKernel", 3, 4, 10),
        event(profile.MARK + "loss", 10, 10, note=True),
        event("cuLaunchKernelEx", 12, 13, 11),
        event("gemm", 11, 31, 10, gpu=True),  # runs while the loss is launched
        event("drift", 31, 41, 11, gpu=True),
        event("fill", 41, 42, 9, gpu=True),
        event("lost", 43, 44, 99, gpu=True),
        event("range", 0, 99, 12, gpu=True, note=True),
    ]
    found = profile.costs(events, gpu=True, steps=2)
    assert [(c.phase, c.name, c.calls, c.seconds) for c in found] == [
        ("generator", "gemm", 0.5, pytest.approx(10e-6)),
        ("loss", "drift", 0.5, pytest.approx(5e-6)),
        ("other", "fill", 0.5, pytest.approx(0.5e-6)),
        ("other", "lost", 0.5, pytest.approx(0.5e-6)),
    ]
    on_cpu = profile.costs(events, gpu=False, steps=1)
    assert ("generator", "aten::mm") in [(c.phase, c.name) for c in on_cpu]


def test_timed_calls_as_often_as_told():
    calls = []
    found = timed(lambda: calls.append(torch.zeros(100)), CPU, repeats=3, warmup=2, least_seconds=0)
    assert len(calls) == 1 + 2 + 3 + 1  # cold, warm, by the clock, for the memory
    assert found.peak_bytes == 400
    assert found.queued_seconds is None
    assert timed(lambda: None, CPU, 1, 0, meter=False, least_seconds=0).peak_bytes is None


def test_short_calls_are_repeated_until_caches_are_warm():
    calls = []
    timed(lambda: calls.append(time.sleep(0.002)), CPU, repeats=3, meter=False, least_seconds=0.02)
    assert 3 < len(calls) - 2 <= 10


def test_a_profile_prints_no_log_lines(capfd):
    assert profile.profile_step(lambda: torch.ones(3) + 1, torch.device("cpu"))
    assert capfd.readouterr() == ("", "")
