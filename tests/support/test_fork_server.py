"""Children of the fork server behave as processes of their own."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.fork_server import CAPTURE, Child, run_code, run_ranks, start_code

PROGRAMS = {
    "arguments": "import sys; print(sys.argv)",
    "exit code": "import sys; print('out'); sys.exit(7)",
    "message": "import sys; sys.exit('wrong')",
    "error": "1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "main module": "print(__name__, 'torch' in globals())",
    "environment": "import os; print(os.environ['COLOR'], os.getcwd())",
    "thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_children_are_like_new_interpreters(name, tmp_path):
    options = {"cwd": tmp_path, "env": {**os.environ, "COLOR": "blue"}}
    command = [sys.executable, "-c", PROGRAMS[name], "a", "b c"]
    expected = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    done = run_code(PROGRAMS[name], "a", "b c", **options)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_streams_and_signals():
    echo = start_code("for line in open(0): print(line, end='', flush=True)", stdin=CAPTURE, stdout=CAPTURE)
    echo.stdin.write("hello\n")
    echo.stdin.flush()
    assert echo.stdout.readline() == "hello\n"
    assert echo.poll() is None
    echo.send_signal(signal.SIGTERM)
    assert echo.wait(30) == echo.poll() == -signal.SIGTERM
    sleeping = Child(["-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        sleeping.wait(0.05)
    sleeping.kill()
    assert sleeping.wait() == -signal.SIGKILL


def test_a_failing_rank_is_an_error():
    with pytest.raises(AssertionError, match="rank 1 fails"):
        run_ranks(["-c", "import os, sys; os.environ['RANK'] == '1' and sys.exit('rank 1 fails')"])
