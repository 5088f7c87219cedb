"""Imports of large libraries. Their CPU time does not count for the test that happens to be the first."""

import os

import pytest

import_seconds = 0.0


def import_library(name, attribute):
    """Import a library with one of its attributes, which it loads on first use; skip if it is missing."""
    global import_seconds
    before = sum(os.times()[:4])
    try:
        library = pytest.importorskip(name)
        getattr(library, attribute)
    finally:
        import_seconds += sum(os.times()[:4]) - before
    return library
