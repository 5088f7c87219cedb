"""Hugging Face datasets: parquet files, folders of ``save_to_disk``, and dataset objects."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgen.data import decode
from driftgen.data.classes import number_classes
from driftgen.data.encoded_images import EncodedImages, Listing
from driftgen.data.locate import Place, choose_split
from driftgen.errors import InputError
from driftgen.support.image_files import open_image
from driftgen.support.untrusted_files import shown

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = [
    "is_dataset_dict",
    "is_plain_dataset",
    "list_rows",
    "open_parquet",
    "open_rows",
    "open_saved",
    "square_size",
]

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "fine_label")
ROWS = 1000  # rows whose headers are read at a time


def open_parquet(place: Place, config: Data) -> EncodedImages:
    """Open parquet files. ``datasets`` keeps an uncompressed, memory-mapped copy of them in its cache."""
    datasets = _library()
    import pyarrow.parquet

    schema, count = None, 0
    for path in place.files:
        with _errors(str(path), "a parquet file"):
            metadata = pyarrow.parquet.read_metadata(path)
            columns = set(metadata.schema.to_arrow_schema().names)
        if schema is not None and columns != schema:
            names = ", ".join(sorted(columns ^ schema))
            raise InputError(
                f"{place.files[0]} and {path} have different columns ({names}): name one of them"
            )
        schema, count = columns, count + metadata.num_rows
    if count == 0:
        raise InputError(f"{place.path} holds no rows: add images")
    files = [str(path) for path in place.files]
    with _errors(str(place.path)), _quiet(datasets):
        dataset = datasets.load_dataset("parquet", data_files=files, split="train")
        _check_table(dataset)
    folder = os.path.commonpath([path.absolute().parent for path in place.files])
    return open_rows(dataset, str(place.path), config, place.notes, folder=Path(folder))


def open_saved(place: Place, config: Data) -> EncodedImages:
    """Open a folder that ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote."""
    datasets = _library()
    with _errors(str(place.path)), _quiet(datasets):
        dataset = datasets.load_from_disk(str(place.path))
    notes: list[str] = []
    if isinstance(dataset, datasets.DatasetDict):
        split, notes = choose_split(place.path, list(dataset))
        dataset = dataset[split]
    with _errors(str(place.path)):
        _check_table(dataset)
    return open_rows(dataset, str(place.path), config, notes, folder=place.path)


def _check_table(dataset: Any) -> None:
    """Raise if offsets or texts of a memory-mapped table are damaged: Arrow would crash when it reads them.

    Reads the offsets of all columns and the characters of the columns of text, not the bytes of images.
    """
    dataset.data.validate(full=True)


def open_rows(
    dataset: Any, where: str, config: Data, notes: Sequence[str] = (), *, folder: Path | None = None
) -> EncodedImages:
    """Open a ``datasets.Dataset``. Class names are those of its ``ClassLabel``; see :func:`list_rows`."""
    listing, _ = list_rows(dataset, where, config.conditional, folder)
    return EncodedImages(listing._replace(notes=[*notes, *listing.notes]), config)


def is_plain_dataset(data: Any) -> bool:
    """Return True for a ``datasets.Dataset`` without a format or transform of the user's."""
    datasets = sys.modules.get("datasets")  # not imported: then data is none of its objects
    return datasets is not None and isinstance(data, datasets.Dataset) and data.format["type"] is None


def is_dataset_dict(data: Any) -> bool:
    """Return True for a ``datasets.DatasetDict``: several splits, one of which is to be passed."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, datasets.DatasetDict)


def list_rows(
    dataset: Any, where: str, conditional: bool = True, folder: Path | None = None
) -> tuple[Listing, set[tuple[int, int]]]:
    """Return the encoded images of a ``datasets.Dataset`` with their labels, and all sizes of its images.

    A row may hold a path instead of an image. Those of a file must be below its ``folder``, because the file
    may be from elsewhere; those of a dataset that the user passes (None) may be anywhere.
    """
    with _errors(where):
        return _list_rows(dataset, where, conditional, folder)


def _list_rows(
    dataset: Any, where: str, conditional: bool, folder: Path | None
) -> tuple[Listing, set[tuple[int, int]]]:
    if len(dataset) == 0:
        raise InputError(f"{where} holds no rows: add images")
    dataset = dataset.with_format(None)  # a format may leave columns out
    column = _image_column(dataset, where)
    images = _encoded(dataset, column, where)
    rows = _Rows(images, column, _Names(where, len(dataset)), folder)
    listing = Listing(
        where,
        rows,
        rows.names,
        np.zeros(len(dataset), np.int64),
        ["all"],
        has_files=False,
    )
    if conditional:
        listing = _with_labels(listing, dataset)
    unreadable, sizes = _read_headers(rows)
    return listing._replace(unreadable=unreadable), sizes


class _Rows(Sequence[Any]):
    """Images of a dataset: bytes, or a path if only that is stored. Paths are below ``folder`` if given."""

    def __init__(self, dataset: Any, column: str, names: Sequence[str], folder: Path | None) -> None:
        self.dataset, self.column, self.names, self.folder = dataset, column, names, folder

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.content(int(index), self.dataset[int(index)][self.column])

    def content(self, row: int, value: Any) -> bytes | str:
        """Return the bytes or the path that a cell holds; raise if the path leads outside the folder."""
        if isinstance(value, dict) and value.get("bytes") is not None:
            return bytes(value["bytes"])
        if not isinstance(value, dict) or not value.get("path"):
            return b""  # decoding names the row
        path = str(value["path"])
        if self.folder is None:
            return path
        try:
            target = (self.folder / path).resolve()
            inside = not os.path.isabs(path) and target.is_relative_to(self.folder.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte
            inside = False
        if not inside:
            raise InputError(
                f"{self.names[row]} names the file {shown(path)}, which is not below {self.folder}: store "
                "the image's bytes in the row, or remove it"
            )
        return str(target)


class _Names(Sequence[str]):
    """Names of the rows of a dataset."""

    def __init__(self, where: str, count: int) -> None:
        self.where, self.length = where, count

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return f"{self.where} row {int(index)}"


def _image_column(dataset: Any, where: str) -> str:
    datasets, features = _library(), dataset.features
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    candidates = images or [name for name in IMAGE_COLUMNS if name in features]
    chosen = next((name for name in IMAGE_COLUMNS if name in candidates), None)
    if chosen is None and len(candidates) != 1:
        found = f"the image columns {', '.join(images)}" if images else f"the columns {', '.join(features)}"
        raise InputError(f"{where} has {found}: name the column of images image")
    return chosen or candidates[0]


def _encoded(dataset: Any, column: str, where: str) -> Any:
    """Return the dataset with its images as bytes."""
    datasets = _library()
    try:
        return dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # of pyarrow or datasets, by type of the column
        raise InputError(
            f"{where}: column {column} holds {dataset.features[column]}, expected encoded images "
            f"({_one_line(error)})"
        ) from None


def _with_labels(listing: Listing, dataset: Any) -> Listing:
    datasets, features, where = _library(), dataset.features, listing.where
    kinds = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    column = next((name for name in LABEL_COLUMNS if name in features), None)
    if column is None and len(kinds) > 1:
        raise InputError(f"{where} has the labels {', '.join(kinds)}: name the one to train on label")
    column = column or next(iter(kinds), None)
    if column is None:
        return listing._replace(notes=[f"{where}: no column label, all images are of one class"])
    values = dataset.select_columns([column])[:][column]
    for row, value in enumerate(values):
        wrong = isinstance(value, bool) or not isinstance(value, int | str) or value == ""
        if wrong or (isinstance(value, int) and value < 0):
            raise InputError(
                f"{where} row {row}: {column} is {str(value)[:40]!r}, expected a class number or a name; "
                "remove such rows, or set data.conditional=false"
            )
    labels, names, notes = number_classes(values)
    feature = features[column]
    if isinstance(feature, datasets.ClassLabel) and feature.names:
        known = [str(name) for name in feature.names]
        present = {int(name) for name in names}
        empty = [name for i, name in enumerate(known) if i not in present]
        names = [known[int(name)] for name in names]
        notes = [f"{where}: no image of {', '.join(empty[:5])}{' ...' * (len(empty) > 5)}"] if empty else []
    return listing._replace(labels=labels, class_names=names, notes=notes)


def _read_headers(rows: _Rows) -> tuple[dict[int, str], set[tuple[int, int]]]:
    """Read the headers of all images in the memory-mapped table, without copying the images."""
    import pyarrow

    failed: dict[int, str] = {}
    sizes: set[tuple[int, int]] = set()
    table = rows.dataset.with_format("arrow")
    for start in range(0, len(rows), ROWS):
        cells = table[start : start + ROWS].column(rows.column)
        for row, cell in enumerate(cells, start):
            try:
                with open_image(pyarrow.BufferReader(cell["bytes"].as_buffer())) as header:
                    sizes.add(header.size)
                continue
            except Exception:  # no bytes, damage, or a format that seeks beyond the end of the buffer
                pass
            try:
                sizes.add(decode.readable(rows.content(row, cell.as_py())))
            except InputError:
                raise
            except Exception as error:  # Pillow raises many types for damaged images
                failed[row] = decode.reason(error)
    return failed, sizes


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(
            "Hugging Face datasets (.parquet, save_to_disk) need datasets: pip install 'driftgen[datasets]'",
            topic="missing-extra",
        ) from None
    return datasets


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Show progress bars of the library in a terminal only, and none of its messages: errors are raised."""
    bars = not (sys.stderr.isatty() or datasets.are_progress_bars_disabled())
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _errors(where: str, what: str = "a Hugging Face dataset") -> Iterator[None]:
    """Turn an exception of a library into an InputError; its own type says more than its message."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of pyarrow, datasets, the file system
        cause = error.__cause__ or error  # the library wraps errors in "an error occurred"
        raise InputError(f"{where} cannot be read as {what}: {_one_line(cause)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def square_size(sizes: set[tuple[int, int]]) -> int | None:
    """Return the side of the images if all are squares of one size."""
    (width, height), *others = sizes or {(0, 1)}
    return width if width == height and not others else None
