"""Entry points of other packages."""

from __future__ import annotations

from importlib.metadata import entry_points

from driftgen.support.download import first_line

__all__ = ["listed_failures", "load_entry_points"]


def load_entry_points(group: str) -> tuple[str, ...]:
    """Load every entry point of a group and call it if it is callable; return one line per failure.

    An entry point names a function that registers something, or a module that does so when imported.
    """
    failures = []
    for entry in entry_points(group=group):
        try:
            plugin = entry.load()
            if callable(plugin):
                plugin()
        except Exception as error:
            failures.append(f"{entry.name} ({entry.value}): {type(error).__name__}: {first_line(error)}")
    return tuple(failures)


def listed_failures(failures: tuple[str, ...]) -> str:
    """Return the failures as the end of a message; empty if there are none."""
    return f"; plugins that failed to load: {'; '.join(failures)}" if failures else ""
