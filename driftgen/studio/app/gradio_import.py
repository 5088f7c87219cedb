"""Import gradio: quickly, and without a call over the network."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from driftgen.errors import InputError

__all__ = ["import_gradio"]


def import_gradio(host: str = "127.0.0.1") -> Any:
    """Return the module for a server on ``host``, or raise with the command that installs it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # The server asks itself whether it runs; a proxy between the two may refuse.
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost", host)))
    try:
        import_module("psutil")
        with _without_type_stubs():
            return import_module("gradio")
    except ImportError as error:
        if error.name not in (None, "gradio", "psutil"):
            raise
        raise InputError(
            f"the studio needs {error.name or 'gradio'}: pip install 'driftgen[studio]'"
        ) from None


@contextmanager
def _without_type_stubs() -> Iterator[None]:
    """Keep gradio from writing .pyi files for its components, which is half of the time of its import.

    It writes none for a class whose file is unknown.
    """
    known = inspect.getfile

    def getfile(thing: Any) -> str:
        if isinstance(thing, type) and type(thing).__name__ == "ComponentMeta":
            raise OSError("no stub is wanted")
        return known(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = known
