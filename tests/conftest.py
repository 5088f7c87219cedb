import gc
import os
import signal
import subprocess
import sys
from functools import cache

import pytest
import typer.main

from tests.support import fork_server, libraries

# Typer builds all commands for every call, which takes as long as most tests of a command.
build_command = cache(typer.main.get_command)

# CPU seconds of an unmarked test: from the first on a warning, from the second on a failure. A slow machine
# may take twice as long as this project's own, so only a test that is far off fails.
LONG_SECONDS, TOO_LONG_SECONDS = 3.0, 12.0
UNLIMITED = ("slow", "interpreter", "distributed", "cuda")
STARTED = pytest.StashKey[float]()


def pytest_configure(config):
    # A shell starts background jobs with SIGINT ignored. Processes of the tests would inherit that, and never
    # see the Ctrl-C of their test.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The process that hands out tests to others imports nothing large: the others wait for it.
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import settings

    # Without a GPU the kernels run in Triton's interpreter. Triton reads this variable when it is imported,
    # which importing driftgen may do.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # One thread per process: tests run in several processes, and CPU time must not depend on the machine.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    # CI uses the same examples every time; local runs explore new ones.
    settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")
    # The package and torch's optimizers import on first use, which the first test would have to pay for.
    import torch._dynamo

    import driftgen.model_io  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if "_kernels_everywhere" in item.fixturenames:
            item.add_marker(pytest.mark.interpreter)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    # Modules and collected tests stay to the end: a full collection of garbage need not look at them.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain about objects that are left at the end


def cpu_seconds():
    """Return the CPU time of this process and of the children that have ended, without large imports."""
    return sum(os.times()[:4]) + fork_server.seconds_of_children - libraries.import_seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Report an unmarked test that takes too long. CPU time: wall time depends on the machine's load."""
    result = yield
    seconds = cpu_seconds() - item.stash[STARTED]
    if seconds > LONG_SECONDS and not any(item.get_closest_marker(name) for name in UNLIMITED):
        message = f"took {seconds:.1f} s of CPU time: make the test smaller or mark it slow"
        if seconds > TOO_LONG_SECONDS:
            pytest.fail(message, pytrace=False)
        item.warn(pytest.PytestWarning(f"{item.nodeid} {message}"))
    return result


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    import torch

    from driftgen import model_io

    torch.manual_seed(0)
    # Training a network of an unknown class registers the class.
    monkeypatch.setattr(model_io, "_REGISTRY", dict(model_io._REGISTRY))
    # On a CPU without bfloat16 support the first bfloat16 product disables oneDNN for the rest of the
    # process. Afterwards float32 results differ in the last digit from those of another process.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def here(capsys, monkeypatch):
    """Run a command in this process, without the two seconds that a new process needs to import torch."""
    from driftgen.cli import main

    monkeypatch.setattr(typer.main, "get_command", build_command)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["driftgen", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return subprocess.CompletedProcess(words, left.value.code, *capsys.readouterr())

    return call
