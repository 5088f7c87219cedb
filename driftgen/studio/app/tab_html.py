"""HTML of the tabs. Jinja2 escapes every value, see :mod:`driftgen.report.page`."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from driftgen.report.page import render
from driftgen.studio.app.downloads import Downloads, file_name, zip_pictures
from driftgen.studio.requests_and_answers import Pictures, RolloutVideo

if TYPE_CHECKING:
    from driftgen.studio.folder_check import FolderReport
    from driftgen.studio.training_job import JobState

__all__ = ["show_folder", "show_job", "show_message", "show_pictures", "show_text", "show_video"]

SMOOTH_SIDE = 64  # pixels; smaller images are enlarged without smoothing
NARROWEST, WIDEST = 96, 256  # pixels of an image on the page


def show_message(text: str, *, error: bool = False) -> str:
    """Return a sentence; an error is announced to screen readers."""
    return render("fragments/message.html", text=text, error=error)


def show_pictures(pictures: Pictures, name: str, made: str, downloads: Downloads) -> str:
    """Return a grid of images, each a link to its PNG file, and a link to a zip of all.

    Args:
        pictures: to show.
        name: of the files.
        made: how, in words: the page may show other settings by now.
        downloads: keeps the zip file.
    """
    cells = [
        {
            "src": _uri(content, "image/png"),
            "caption": caption,
            "file": f"{name}-{i:03d}{file_name(caption)}.png",
        }
        for i, (content, caption) in enumerate(zip(pictures.files, pictures.captions, strict=True))
    ]
    width = min(max(NARROWEST, pictures.size[0]), WIDEST)
    return render(
        "fragments/pictures.html",
        cells=cells,
        note=pictures.note,
        made=made,
        columns=pictures.columns,
        column_names=pictures.column_names,
        width=width,
        pixelated=max(pictures.size) < SMOOTH_SIDE,
        zip=downloads.add(zip_pictures(pictures), f"{name}.zip"),
        animation=None if pictures.animation is None else _uri(pictures.animation, "image/gif"),
    )


def show_video(video: RolloutVideo) -> str:
    """Return a player of an episode."""
    return render("fragments/video.html", src=_uri(video.video, "video/mp4"), note=video.note)


def show_folder(name: str, report: FolderReport) -> str:
    """Return the counts and the problems of a dataset."""
    largest = max(1, *report.counts.values())
    return render("fragments/folder.html", name=name, report=report, largest=largest)


def show_text(title: str, text: str) -> str:
    """Return lines that a command printed."""
    return render("fragments/text.html", title=title, text=text)


def show_job(state: JobState) -> str:
    """Return the state of a training."""
    return render("fragments/job.html", state=state)


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
