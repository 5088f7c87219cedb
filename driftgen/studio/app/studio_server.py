"""Serve the studio: check the address, build the page, answer until Ctrl-C."""

from __future__ import annotations

import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from driftgen.errors import InputError
from driftgen.report.page import scoped_style
from driftgen.studio.app.gradio_import import import_gradio
from driftgen.studio.app.request_guard import LOCAL_HOSTS, RequestGuard
from driftgen.studio.app.tab_policy import build_policy_tab
from driftgen.studio.app.tab_runs import RUNS_SECONDS, build_runs_tab
from driftgen.studio.app.tab_sample import build_sample_tab
from driftgen.studio.app.tab_train import TRAIN_SECONDS, build_train_tab
from driftgen.studio.app.workshop import Workshop
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.support.signals import handle_signals
from driftgen.support.user_paths import expand_user

__all__ = ["Address", "check_address", "check_folders", "run_studio", "serve"]

LEAST_TOKEN = 12  # characters
MOST_WAITING = 200  # events of all pages together
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONOSPACE = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")

# Contrasts of at least 4.5, in light and dark.
COLORS = {
    "block_info_text_color": "*neutral_600",
    "block_info_text_color_dark": "*neutral_300",
    "block_label_text_color": "*neutral_700",
    "block_label_text_color_dark": "*neutral_200",
    "block_title_text_color": "*neutral_700",
    "block_title_text_color_dark": "*neutral_200",
    "body_text_color_subdued": "*neutral_600",
    "body_text_color_subdued_dark": "*neutral_300",
    "input_placeholder_color": "*neutral_600",
    "input_placeholder_color_dark": "*neutral_300",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover_dark": "*primary_600",
    "button_large_text_weight": "500",
    "button_large_text_size": "*text_md",
}


class Address:
    """Host and port of the studio, and the token that a browser needs; None on this machine alone."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self.host, self.port, self.token = host, port, token

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"?token={quote(self.token)}" if self.token else "")


def run_studio(runs: Path, data: Path, host: str, port: int, token: str | None, device: str | None) -> None:
    """Check the arguments, then serve until Ctrl-C."""
    folders = check_folders(runs, data)
    if device is not None and not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", device):
        raise InputError(f"device={device} is not known: choose cpu, cuda or cuda:1")
    address = check_address(host, port, token)
    if device not in (None, "cpu"):
        from driftgen.support.distributed import (
            choose_device,  # imports torch, which the workers do otherwise
        )

        choose_device(device)
    stopped = False

    def stop(name: str) -> None:
        nonlocal stopped
        stopped = True

    with serve(folders, address, device), handle_signals(stop):
        print(f"driftgen studio: {address.url}", flush=True)
        if address.token is not None:
            print(
                f"It listens on {address.host}: whoever can reach this machine and has the token can read "
                f"{folders.runs} and {folders.data} and start trainings. The connection is not encrypted.",
                flush=True,
            )
        print("Ctrl-C ends it; a training that it started continues.", flush=True)
        while not stopped:
            time.sleep(0.1)
        print("driftgen studio: ended", flush=True)


def check_folders(runs: Path, data: Path) -> ReadableFolders:
    """Return the folders of a studio. The folder of runs is made when the first training starts."""
    runs, data = expand_user(runs), expand_user(data)
    if runs.exists() and not runs.is_dir():
        raise InputError(f"--runs {runs} is no folder: give the folder that holds runs")
    if not data.is_dir():
        raise InputError(f"--data {data} is no folder: give the folder that holds folders of images")
    return ReadableFolders(runs, data)


def check_address(host: str, port: int, token: str | None) -> Address:
    """Return a free address; listening for other machines needs a token, which is made if none is given."""
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port}: give a number from 0 (any free one) to {2**16 - 1}")
    if token is not None and (len(token) < LEAST_TOKEN or not re.fullmatch(r"[\w.~-]+", token, re.ASCII)):
        raise InputError(f"--token: use at least {LEAST_TOKEN} letters, digits, dashes and underscores")
    if host not in LOCAL_HOSTS and token is None:
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, TypeError, UnicodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"cannot listen on {host[:100]}, port {port} ({reason}): choose another --port or --host"
            ) from None
        return Address(host, probe.getsockname()[1], token)


@contextmanager
def serve(folders: ReadableFolders, address: Address, device: str | None = None) -> Iterator[Workshop]:
    """Serve the studio while the block runs."""
    workshop = Workshop(folders, device)
    workshop.warm_up()  # imports torch while this process imports gradio
    try:
        gr = import_gradio(address.host)
        page = build_page(gr, workshop)
        _launch(gr, page, workshop, address)
        try:
            yield workshop
        finally:
            # Does not wait for browsers that still listen; uvicorn then logs an error as its lifespan ends.
            page.server.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            page.close(verbose=False)
    finally:
        workshop.close()


def build_page(gr: Any, workshop: Workshop) -> Any:
    """Return the page with its tabs."""
    with gr.Blocks(title="driftgen studio", analytics_enabled=False, fill_width=True) as page:
        gr.HTML("<h1>driftgen studio</h1>", elem_id="title")
        timers = [gr.Timer(seconds, active=False) for seconds in (RUNS_SECONDS, TRAIN_SECONDS)]
        watch_runs, watch_job = timers
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Sample") as sample:
                _run_timer(sample, None, timers)
                build_sample_tab(gr, page, workshop)
            with gr.Tab("Runs") as runs:
                _run_timer(runs, watch_runs, timers)
                build_runs_tab(gr, runs, watch_runs, workshop)
            with gr.Tab("Train") as train:
                _run_timer(train, watch_job, timers)
                build_train_tab(gr, train, watch_job, workshop)
            with gr.Tab("Policy") as policy:
                _run_timer(policy, None, timers)
                build_policy_tab(gr, policy, workshop)
    page.queue(max_size=MOST_WAITING, default_concurrency_limit=4)
    return page


def _run_timer(tab: Any, active: Any, timers: list[Any]) -> None:
    """Run the timer of a tab, and no other, while the tab is shown.

    In the browser, and before the tab's other events, which gradio dispatches one after the other: answers of
    the server that come late or in another order would stop the timer of the tab that is shown by then.
    """
    updates = [{"__type__": "update", "active": timer is active} for timer in timers]
    tab.select(
        None,
        None,
        timers,
        js=f"() => {json.dumps(updates)}",
        show_progress="hidden",
        api_visibility="private",
    )


def _launch(gr: Any, page: Any, workshop: Workshop, address: Address) -> None:
    theme = gr.themes.Base(
        primary_hue="blue", neutral_hue="slate", font=FONT, font_mono=MONOSPACE, radius_size="md"
    ).set(**COLORS)
    style = scoped_style(".report") + (files("driftgen.studio.app") / "studio.css").read_text(
        encoding="utf-8"
    )

    class Middleware:
        """Downloads and the guard around gradio's routes, as FastAPI takes them."""

        def __init__(self, app: Any) -> None:
            self.app = RequestGuard(workshop.downloads.serve(app), address.token)

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    try:
        page.launch(
            server_name=address.host,
            server_port=address.port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=False,
            run_history=False,
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            max_file_size=1,
            theme=theme,
            head=f"<style>{style}</style>",
            app_kwargs={"middleware": [(Middleware, (), {})]},
        )
    except OSError as error:
        raise InputError(f"cannot listen on port {address.port}: {error}") from None
