"""The playground, a page that needs no server: its file, and opening it in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

__all__ = ["PLAYGROUND", "open_page", "playground_url"]

PLAYGROUND = Path(__file__).parent / "playground" / "playground.html"


def playground_url(settings: Mapping[str, object]) -> str:
    """Return the address of the page with settings, under the names of the page's ``settings.mjs``."""
    fragment = urlencode({name: value for name, value in settings.items() if value is not None})
    return PLAYGROUND.as_uri() + (f"#{fragment}" if fragment else "")


def open_page(url: str) -> bool:
    """Open a page in a graphical browser. Return False if there is none.

    Without a display, ``webbrowser`` would start a browser inside the terminal.
    """
    display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if not display and sys.platform not in ("darwin", "win32"):
        return False
    return webbrowser.open(url)
