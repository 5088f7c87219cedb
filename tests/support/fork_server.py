"""Start Python processes by forking a server that has already imported torch and driftgen.

Importing both takes several seconds, a fork a few hundredths. A child has its own arguments, folder,
environment, streams, signals and exit code, like a new interpreter. Tests of import time, torchrun and entry
points start a new interpreter instead.
"""

import atexit
import contextlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Not huggingface_hub, which reads the environment at import. torch._dynamo, which every optimizer imports,
# imports Triton, which reads TRITON_INTERPRET: a child must not set another one.
PRELOAD = (
    "driftgen.cli",
    "driftgen.data.latent_encoding",
    "driftgen.pipeline",
    "driftgen.report.run_page",
    "driftgen.training.pretrain",
    "driftgen.training.run",
    "driftgen.training.trainer",
    "jinja2",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
)
INTERPRET = "TRITON_INTERPRET"
CAPTURE = subprocess.PIPE
seconds_of_children = 0.0  # CPU time of all children that have ended


class Child:
    """A process of the fork server, with the parts of subprocess.Popen that tests use.

    Args:
        program: ``["-c", code, *arguments]`` or ``["-m", module, *arguments]``.
        env: the whole environment; by default that of this process, and one thread.
        stdin, stdout, stderr: CAPTURE for a pipe, or a file descriptor; None for /dev/null.
    """

    def __init__(self, program, *, cwd=None, env=None, stdin=None, stdout=None, stderr=None):
        request = {
            "program": [str(word) for word in program],
            "cwd": str(cwd or Path.cwd()),
            "env": {"OMP_NUM_THREADS": "1", **os.environ} if env is None else env,
        }
        served = os.environ.get(INTERPRET)
        assert request["env"].get(INTERPRET, served) == served, "start a new interpreter"
        self.returncode = None
        self._connection, theirs = socket.socketpair()
        pipes, sent = [], [theirs.fileno()]
        for number, stream in enumerate((stdin, stdout, stderr)):
            if stream == CAPTURE:
                pipes.append(os.pipe())
                sent.append(pipes[-1][number > 0])
            else:
                pipes.append(None)
                sent.append(_null() if stream is None else stream)
        socket.send_fds(_server(), [b"+"], sent)
        theirs.close()
        for number, pipe in enumerate(pipes):
            if pipe:
                os.close(pipe[number > 0])
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(pipe[number == 0], "w" if number == 0 else "r") if pipe else None
            for number, pipe in enumerate(pipes)
        )
        self._connection.sendall(json.dumps(request).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def poll(self):
        """Return the exit code, or None while the process runs."""
        self._connection.setblocking(False)
        try:
            ended = bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            ended = False
        finally:
            self._connection.setblocking(True)
        return self.wait() if ended else self.returncode

    def wait(self, timeout=None):
        """Wait for the end of the process and return its exit code: -number for a signal."""
        global seconds_of_children
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None and end is not None and self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a child of the fork server", timeout)
            time.sleep(0.01)
        if self.returncode is None:
            code, seconds = self._answers.readline().split()
            seconds_of_children += float(seconds)
            self.returncode = int(code)
            self._answers.close()
        return self.returncode

    def communicate(self, timeout=60):
        """Read the captured streams to their end, wait, and return stdout and stderr."""
        texts = {}
        readers = [
            threading.Thread(target=lambda stream=stream: texts.update({stream: stream.read()}))
            for stream in (self.stdout, self.stderr)
            if stream is not None
        ]
        if self.stdin is not None:
            self.stdin.close()
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts.get(self.stdout), texts.get(self.stderr)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start_code(code, *arguments, **options):
    """Start ``python -c code arguments``."""
    return Child(["-c", code, *arguments], **options)


def start_driftgen(*words, **options):
    """Start ``python -m driftgen words``."""
    return Child(["-m", "driftgen", *words], **options)


def run(program, **options):
    """Run a program to its end, as subprocess.run with captured text."""
    child = Child(program, stdout=CAPTURE, stderr=CAPTURE, **options)
    stdout, stderr = child.communicate(timeout=300)
    return subprocess.CompletedProcess(program, child.returncode, stdout, stderr)


def run_code(code, *arguments, **options):
    """Run ``python -c code arguments`` to its end."""
    return run(["-c", code, *arguments], **options)


def run_driftgen(*words, **options):
    """Run ``python -m driftgen words`` to its end."""
    return run(["-m", "driftgen", *words], **options)


def start_ranks(program, ranks=2, **streams):
    """Start a program in several processes with the environment that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", **os.environ}
    shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        Child(program, env=shared | {"RANK": str(i), "LOCAL_RANK": str(i)}, **streams) for i in range(ranks)
    ]


def run_ranks(program, ranks=2):
    """Run a program in several processes with the environment that torchrun sets."""
    with tempfile.TemporaryFile("w+") as errors:
        children = start_ranks(program, ranks, stderr=errors.fileno())
        codes = [child.wait(300) for child in children]
        errors.seek(0)
        assert codes == [0] * ranks, errors.read()[-3000:]


@cache
def _null():
    return os.open(os.devnull, os.O_RDWR)


@cache
def _server():
    ours, theirs = socket.socketpair()
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


def _serve(control):
    """Fork a supervisor for each child, until the other side is closed."""
    from PIL import Image

    for name in PRELOAD:
        import_module(name)
    Image.init()  # imports the readers and writers of all formats
    assert "huggingface_hub" not in sys.modules
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 4)
        if not message:
            return
        if not os.fork():
            control.close()
            _supervise(socket.socket(fileno=descriptors[0]), descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass


def _supervise(connection, streams):
    """Start the child, and tell its process id, exit code and CPU seconds."""
    request = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
    process = os.fork()
    if not process:
        connection.close()
        _become(request, streams)
    for descriptor in streams:
        os.close(descriptor)
    connection.sendall(f"{process}\n".encode())
    _, status, usage = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        connection.sendall(f"{code} {usage.ru_utime + usage.ru_stime}\n".encode())
    finally:
        os._exit(0)


def _become(request, streams):
    """Run the program of the request in this process, and end as an interpreter does."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False))  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    sys.stderr.reconfigure(errors="backslashreplace")
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    code = _exit_code(*request["program"])
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exit_code(kind, source, *arguments):
    sys.path[:1] = [
        "" if kind == "-c" else os.getcwd(),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    try:
        if kind == "-c":
            sys.argv = ["-c", *arguments]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(source, "<string>", "exec"), vars(main))
        else:
            sys.argv = [source, *arguments]
            runpy.run_module(source, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
