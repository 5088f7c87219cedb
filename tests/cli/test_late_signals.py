"""Signals where an exception would be printed or lost: in a finalizer, after the command, at exit."""

import signal
import time

import pytest

from tests.support.fork_server import CAPTURE, start_code

RUN = """
import atexit, os, runpy, signal, sys, time
from pathlib import Path
from driftgen.training import recipes

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)

def meet():
    Path("reached").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    print("cleaned up", flush=True)
{prepare}
sys.argv = ["driftgen", "recipes"]
runpy.run_module("driftgen", run_name="__main__")
"""
AT_EXIT = "atexit.register(meet)"
FINALIZER = """
class Sample:
    def __del__(self):
        interrupt()

def lose(names=recipes.recipe_names):
    Sample()
    time.sleep(5)
    return names()

recipes.recipe_names = lose
"""
CONVERTED = """
from driftgen.support.untrusted_files import reading

def convert():
    try:
        interrupt()
        time.sleep(5)
    except KeyboardInterrupt:  # as torch.asarray does
        raise TypeError("could not determine the shape") from None

def parse(names=recipes.recipe_names):
    with reading("weights", "weights"):
        convert()

recipes.recipe_names = {function}
"""
WRITING = """
from driftgen.support.atomic_write import atomic_write

def write(names=recipes.recipe_names):
    Path("library.py").write_text("import time, __main__; __main__.interrupt(); time.sleep(5)")
    sys.path.insert(0, os.getcwd())
    sys.modules["__main__"].interrupt = interrupt
    with atomic_write(Path("file")) as scratch:
        scratch.write_text("half")
        import library

recipes.recipe_names = write
"""
AFTER_COMMAND = """
def leave(code, leave=sys.exit):
    interrupt()
    leave(code)

sys.exit = leave
"""


def test_an_import_while_a_file_is_written_leaves_nothing(tmp_path):
    process = start(tmp_path, WRITING)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "driftgen: interrupted\n")
    assert not list(tmp_path.glob(".partial-*"))
    assert not (tmp_path / "file").exists()


def start(folder, prepare):
    return start_code(RUN.format(prepare=prepare), cwd=folder, stdout=CAPTURE, stderr=CAPTURE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_stands_and_cleaning_up_goes_on(tmp_path, number):
    process = start(tmp_path, AT_EXIT)
    while not (tmp_path / "reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    time.sleep(0.1)
    (tmp_path / "go").touch()
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert stdout.endswith("cleaned up\n")
    assert "driftgen train" in stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path, number):
    process = start(tmp_path, AT_EXIT)
    while not (tmp_path / "reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.1)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert "driftgen train" in stdout
    assert "cleaned up" not in stdout


@pytest.mark.parametrize(
    "prepare",
    [
        FINALIZER,
        AFTER_COMMAND,
        CONVERTED.replace("{function}", "convert"),
        CONVERTED.replace("{function}", "parse"),
    ],
    ids=["finalizer", "after the command", "another exception", "while a file is read"],
)
def test_ctrl_c_is_neither_lost_nor_printed(tmp_path, prepare):
    begin = time.monotonic()
    process = start(tmp_path, prepare)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "driftgen: interrupted\n")
    assert time.monotonic() - begin < 5
