"""The help of every command: fast to show, readable at 80 columns, flags without a type."""

import os
import subprocess
import sys

import pytest
import typer

from driftgen.cli import app
from driftgen.interop.model_sources import holds_policy
from driftgen.interop.packaged import packaged_names

# Every command and every group of commands, by its words.
ALL = [
    [],
    *([name] for name in typer.main.get_command(app).commands),
    *(
        [name, inner]
        for name, group in typer.main.get_command(app).commands.items()
        for inner in getattr(group, "commands", {})
    ),
]
SHOW_ALL = """
import sys, time
start = time.process_time()
from driftgen.cli import app
app(["--help"], standalone_mode=False)
seconds = time.process_time() - start
import typer
command = typer.main.get_command(app)  # once: app() builds all commands at every call
for words in {words}:
    command([*words, "--help"], standalone_mode=False)
heavy = {{"torch", "numpy", "matplotlib", "PIL", "safetensors", "huggingface_hub"}}
print("imported:", *(heavy & set(sys.modules)), file=sys.stderr)
print("seconds:", seconds, file=sys.stderr)
"""


def test_help_imports_no_torch_and_is_fast():
    """Every help in one new process. Most of a second would be torch alone, which takes more than one."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_ALL.format(words=ALL)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    imported, seconds = done.stderr.splitlines()[-2:]
    assert imported.split() == ["imported:"]
    assert float(seconds.split()[1]) < 0.9  # 0.3 s on an idle machine


def test_version_imports_no_torch():
    code = "import sys, driftgen; print(driftgen.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words) or "driftgen")
def test_help_of_a_command(words, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = here(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "<bool>" not in done.stdout
    assert "BOOLEAN" not in done.stdout
    assert "list[" not in done.stdout
    assert "<Path>" not in done.stdout
    assert "{" not in done.stdout
    assert "--help" in done.stdout
    assert "…" not in done.stdout  # nothing is cut off


def test_arguments_have_names_in_capitals(here):
    def usage(*words):
        (line,) = (line for line in here(*words, "--help").stdout.splitlines() if "Usage:" in line)
        return " ".join(line.split("[OPTIONS]")[1].split())

    assert usage("train") == "RECIPE"
    assert usage("explain") == "[TOPIC]"
    assert usage("policy", "eval") == "MODEL..."
    assert usage("policy", "latency") == "[RECIPE...]"
    assert usage("policy", "spread") == "RUN..."
    assert usage("eval") == "MODEL | stats DATA OUT"
    assert "'RECIPE'" in here("train").stderr


def test_options_with_a_value_keep_their_type(here):
    assert "<float>" in here("sample", "--help").stdout
    assert "<int>" in here("toy", "--help").stdout


def test_the_help_of_init_names_every_packaged_generator():
    (option,) = (p for p in typer.main.get_command(app).commands["train"].params if p.name == "init")
    for name in packaged_names():
        assert (name in option.help) != holds_policy(name)
