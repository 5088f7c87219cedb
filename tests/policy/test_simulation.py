"""Simulator processes: failures are reported, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from driftgen import InputError
from driftgen.policy.collect import collect
from driftgen.policy.latency import measure_latency
from driftgen.policy.score import evaluate_policies
from driftgen.policy.simulation import Simulation, _serve, choose_processes

pytestmark = pytest.mark.distributed

PARENT = """
import sys, time
from driftgen.policy.simulation import Simulation
if __name__ == "__main__":
    simulation = Simulation("pusht", "pose", processes=2)
    simulation.reset([1, 2])
    print(*[worker.pid for worker, _ in simulation._workers], flush=True)
    time.sleep(60)
"""


def test_a_dead_process_is_reported():
    with Simulation("pusht", "pose", processes=2) as simulation:
        simulation.reset([1, 2, 3])
        worker, _ = simulation._workers[1]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        with pytest.raises(InputError, match="ended with exit code -9"):
            simulation.advance({slot: np.full((1, 2), 100.0) for slot in range(3)})


def test_errors_of_an_environment_reach_the_caller():
    with Simulation("pusht", "pose", processes=2) as simulation:
        simulation.reset([1, 2])
        with pytest.raises(RuntimeError, match="an environment failed"):
            simulation.advance({0: np.full((1, 3), 1.0), 1: np.full((1, 2), 1.0)})
        # The other environments go on.
        assert simulation.advance({1: np.full((1, 2), 1.0)})[1].scores


def test_an_answer_to_a_killed_parent_is_dropped():
    ours, theirs = Pipe()
    ours.send(("reset", {}))
    ours.close()
    _serve(theirs, Pipe()[0], ("pusht", "pose", 2, 10))


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(running(pid) for pid in pids)
        parent.kill()
    limit = time.monotonic() + 10
    while any(running(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("count", [0, -1, 10**30])
def test_counts_that_no_run_reaches_are_refused(tmp_path, count):
    """Instead of a list of all seeds, a process for each number, or an episode without end."""

    def refuses(name, call):
        with pytest.raises(InputError, match=rf"^{name}={count} must be from 1 to [\d,]+$"):
            call()

    models = [("none", lambda: None)]
    refuses("episodes", lambda: evaluate_policies(models, "pusht", "state", tmp_path, episodes=count))
    refuses("episodes", lambda: collect("lift", tmp_path / "x.hdf5", count))
    refuses("processes", lambda: choose_processes(count, 4))
    refuses("max_steps", lambda: Simulation("pusht", "state", max_steps=count))
    refuses("batch", lambda: measure_latency(None, {}, batch=count))
    refuses("repeats", lambda: measure_latency(None, {}, repeats=count))
    assert not list(tmp_path.iterdir())


def test_processes_at_most_one_per_episode():
    assert choose_processes(None, 1) == 1
    assert 1 <= choose_processes(None, 10_000) <= (os.cpu_count() or 1)


def test_simulator_processes_do_not_import_torch():
    """It takes seconds and hundreds of megabytes per process."""
    code = """
import sys
from driftgen.policy.environments import make_environment
from driftgen.policy.simulation import _serve
make_environment("pusht", "keypoints").reset(seed=0)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
