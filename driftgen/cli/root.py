"""The root command: its verbs in the order of the help text, error messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

import driftgen
from driftgen.cli import bench_serve, models, policies, runs, studies, toys
from driftgen.cli.bench import bench
from driftgen.cli.evaluate import evaluate
from driftgen.cli.explain_command import explain
from driftgen.cli.help_format import App
from driftgen.cli.neighbors_command import neighbors
from driftgen.cli.page_command import page
from driftgen.cli.report_command import report
from driftgen.cli.serve_command import serve
from driftgen.cli.studio_command import studio
from driftgen.errors import InputError, explained
from driftgen.support.atomic_write import remove_open_scratch
from driftgen.support.lost_process import LostProcessError, is_lost_process
from driftgen.support.signals import interrupt, interruptions

__all__ = [
    "app",
    "bench_serve",
    "interrupt",
    "main",
    "remove_open_scratch",
]  # bench_serve adds a command to bench

# In messages of torch's allocators.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
)
# In messages of torch for integers that 64 bits do not hold.
TOO_LARGE = ("Overflow when unpacking", "Python int too large", "value cannot be converted to type int64_t")

app = App(
    help="Drifting Models: one-step generators that map noise to a sample in one network call.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"driftgen {driftgen.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


for _command in (
    toys.toy,
    toys.demo,
    toys.doctor,
    runs.train,
    runs.pretrain,
    runs.encode,
    runs.recipes,
    models.sample,
    models.export,
):
    app.command()(_command)
app.command()(page)
app.command()(serve)
app.command()(report)
app.command()(explain)
app.command("eval")(evaluate)
app.command()(neighbors)
app.command()(studies.ablate)
app.command()(studio)
app.add_typer(models.convert, name="convert")
app.add_typer(policies.policy, name="policy")
app.add_typer(bench, name="bench")


def run_command() -> Any:
    """Run the command and return its exit code. Ctrl-C raises here and nowhere else: see ``__main__``."""
    return app(standalone_mode=False)


def main() -> None:
    """Run the command. Wrong input prints one line and exits with code 2, a lost process with code 1."""
    try:
        code = run_command()
    except (KeyboardInterrupt, typer.Abort):  # typer raises Abort for Ctrl-C at a question
        code = 130
    except Exception as error:
        code = 130 if interruptions else _explain(error)
    if code == 130:
        print("driftgen: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    """Print one line for an error and return the exit code; raise a fault of the program again."""
    if isinstance(error, InputError):
        return _fail(explained(str(error), error.topic))
    if isinstance(error, LostProcessError):
        return _fail(explained(str(error), "lost-process"), 1)
    if isinstance(error, OSError):
        return _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    if is_lost_process(error):
        message = f"another process has ended: run the same command again ({_first_line(error)})"
        return _fail(explained(message, "lost-process"), 1)
    if (described := _describe(error)) is not None:
        return _fail(described)
    raise error


def _wrong_command(error: Exception) -> str:
    """Return the command whose usage was wrong, such as "driftgen policy eval"."""
    words, context = [], getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words.append(str(context.info_name))
        context = context.parent
    return " ".join(["driftgen", *reversed(words)])


def _describe(error: Exception) -> str | None:
    """Return one line for an error that the user can correct; None for a fault of the program."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        message = f"out of memory ({_first_line(error) or 'MemoryError'}): lower the sizes"
        return explained(message, "out-of-memory")
    if isinstance(error, OverflowError) or any(text in str(error) for text in TOO_LARGE):
        return f"a number is too large ({_first_line(error)}): lower it"
    # The class of usage errors differs between versions of typer and click; all have this method.
    usage = getattr(error, "format_message", None)
    if usage is not None:
        text = _without_prefix(usage()).rstrip(".") or "a command is missing"
        return f"{text}; see '{_wrong_command(error)} --help'"
    if type(error).__name__ == "ValidationError" and callable(problems := getattr(error, "errors", None)):
        first = problems()[0]  # of pydantic, which this module does not import
        text = _without_prefix(first["msg"])
        return f"{'.'.join(map(str, first['loc']))}: {text}, got {str(first['input'])[:100]}"
    return None


def _without_prefix(message: str) -> str:
    """Return a message without the words that pydantic puts before those of a validator."""
    return message.replace("Value error, ", "")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _fail(message: str, code: int = 2) -> int:
    print(f"driftgen: error: {' '.join(message.split())}", file=sys.stderr)
    return code
