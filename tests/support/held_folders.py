"""Contexts that another process holds."""

import os
import signal


def in_another_process():
    """Yield functions that hold a context in another process, and that kill it: a fixture."""
    started = []

    def start(context):
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with context:
                    os.write(tell, b"1")
                    signal.pause()
            finally:
                os._exit(1)
        started.append(pid)
        os.close(tell)
        assert os.read(ready, 1) == b"1"
        os.close(ready)
        return pid

    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        started.remove(pid)

    yield start, kill
    for pid in list(started):
        kill(pid)
