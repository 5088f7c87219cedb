"""Peak memory, and training, where Python lacks the modules and calls of POSIX systems."""

import ast
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import driftgen
from driftgen.support import folder_lock
from driftgen.support.peak_memory import peak_memory
from tests.support.runs import run

CPU = torch.device("cpu")
MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
FUNCTIONS = (
    "fork",
    "getegid",
    "geteuid",
    "getloadavg",
    "getuid",
    "sched_getaffinity",
    "setpgrp",
    "statvfs",
    "sysconf",
)


def test_the_peak_of_this_process():
    assert peak_memory(CPU) > 50 * 2**20


def test_psutil_where_resource_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    info = SimpleNamespace(peak_wset=3 * 2**30, rss=2**30)
    process = SimpleNamespace(memory_info=lambda: info)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: process))
    assert peak_memory(CPU) == 3 * 2**30


def test_unknown_without_both(monkeypatch):
    for name in ("resource", "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    assert peak_memory(CPU) is None


def test_a_run_without_posix(tmp_path, monkeypatch):
    for name in (*MODULES, "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    # The lock of Windows, which always succeeds.
    monkeypatch.setattr(folder_lock, "fcntl", None)
    locks = SimpleNamespace(locking=lambda *_: None, LK_LOCK=1, LK_NBLCK=2, LK_UNLCK=0)
    monkeypatch.setitem(sys.modules, "msvcrt", locks)
    for name in FUNCTIONS:
        monkeypatch.delattr(os, name, raising=False)
    done, view = run(tmp_path / "r", "optim.steps=7")
    assert done
    assert view.rows
    assert all("memory_gib" not in row for row in view.rows)
    assert [speed.memory_bytes for speed in view.speeds] == [None]


def test_no_module_imports_posix_unasked():
    """Each such import stands in a ``try``."""
    statement = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(sorted(MODULES))})\b", re.M)
    bare = []
    for path in Path(driftgen.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not statement.search(text):
            continue
        tries = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Try)]
        for found in statement.finditer(text):
            line = text.count("\n", 0, found.end()) + 1
            if not any(node.lineno < line <= node.body[-1].lineno for node in tries):
                bare.append(f"{path}:{line}")
    assert not bare
