"""Chromium without a window, driven by Playwright: pages are tried as a person would."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["chromium_path", "open_chromium"]


def chromium_path() -> str | None:
    """Return the installed Chromium or Chrome, or None. Playwright's own download is not used."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """Start the installed Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's sandbox does not start.
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
