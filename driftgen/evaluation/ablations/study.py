"""Description of an ablation study: one thing that varies over a base, and the paper's figures for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from driftgen.errors import InputError, unknown_name
from driftgen.support.config_base import Count, Natural, Section

__all__ = ["DISTANCE", "Base", "Case", "Changes", "Column", "EncoderSpec", "Paper", "Study", "parse_section"]

DISTANCE = "distance"  # column of the Fréchet distance, under whatever name the evaluator gives it
Changes = dict[str, Any]  # values of a recipe by dotted key, such as {"optim.lr": 2e-4}
Guidance = Annotated[float, Field(ge=1)]
T = TypeVar("T", bound=Section)


class Column(NamedTuple):
    """One column of figures: a metric, and the guidance α of the samples."""

    metric: str
    guidance: float


class Paper(Section):
    """Source of the paper's figures."""

    table: str  # caption or place of the table
    setting: str = "ImageNet 256x256, SD-VAE latents, DiT-B/2, 100 epochs"
    metric: str = "FID, 50,000 samples"
    finding: str  # the conclusion in one sentence


class EncoderSpec(Section):
    """An encoder that cases share: pretrained once, or left with its random initial weights."""

    recipe: str
    changes: Changes = Field(default_factory=dict)
    untrained: bool = False


class Base(Section):
    """The recipe that every case of a study starts from, and the encoders that cases may use.

    Attributes:
        about: one-line description.
        recipe: recipe of ``driftgen train``.
        changes: changes of the recipe for studies, such as fewer steps.
        encoders: encoders by name.
        use: encoders of a case that names none.
        samples: generated samples per run that are scored.
    """

    about: str
    recipe: str
    changes: Changes = Field(default_factory=dict)
    encoders: dict[str, EncoderSpec] = Field(default_factory=dict)
    use: tuple[str, ...] = ()
    samples: Count = 2000

    @model_validator(mode="after")
    def _used_encoders_exist(self) -> Base:
        _check_known("use", self.use, self.encoders)
        return self


class OnBase(Section):
    """Settings for one base: changes on top of the common ones, and other encoders."""

    changes: Changes = Field(default_factory=dict)
    encoders: tuple[str, ...] | None = None


class Case(Section):
    """One row of the table.

    Attributes:
        label: first cell of the row.
        changes: changes of the base.
        encoders: names of encoders that replace those of the base.
        on: further changes and other encoders for single bases.
        paper: the paper's figure; None if it has no such row.
        note: remark on the row, such as the paper's own setting where ours differs.
    """

    label: Annotated[str, Field(min_length=1)]
    changes: Changes = Field(default_factory=dict)
    encoders: tuple[str, ...] | None = None
    on: dict[str, OnBase] = Field(default_factory=dict)
    paper: float | None = None
    note: str = ""

    @property
    def slug(self) -> str:
        """Name of the case in paths and on the command line."""
        return re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-")

    def changes_on(self, base: str) -> Changes:
        """Return the changes of this case for one base."""
        return {**self.changes, **(self.on[base].changes if base in self.on else {})}

    def encoders_on(self, base: str) -> tuple[str, ...] | None:
        """Return the names of this case's own encoders for one base; None for those of the base."""
        named = self.on[base].encoders if base in self.on else None
        return self.encoders if named is None else named


class Study(Section):
    """One study.

    Attributes:
        title: heading of the table.
        varies: what differs between cases; heading of the first column.
        about: remark on the study, such as the scale at which it runs here.
        paper: source of the paper's figures; None for a study of our own.
        bases: names of bases the study can run on, with settings; the first one is the default.
        cases: rows of the table.
        order: the paper's ordering, best first. Each entry is a case or a list of cases; every case of an
            entry is better than every case of the next one.
        seeds: seeds of each case.
        guidance: guidance α of the scored samples.
        columns: metrics of the table, ``METRIC`` or ``METRIC@α``; without ``@α`` at the first α. ``distance``
            is the Fréchet distance of the evaluator.
    """

    title: str
    varies: str
    about: str = ""
    paper: Paper | None = None
    bases: Annotated[dict[str, OnBase], Field(min_length=1)]
    cases: Annotated[tuple[Case, ...], Field(min_length=2)]
    order: tuple[str | tuple[str, ...], ...] = ()
    seeds: Annotated[tuple[Natural, ...], Field(min_length=1)] = (0, 1, 2)
    guidance: Annotated[tuple[Guidance, ...], Field(min_length=1)] = (1.0,)
    columns: Annotated[tuple[str, ...], Field(min_length=1)] = (
        DISTANCE,
        "precision",
        "recall",
        "recognized",
        "diversity",
    )

    @field_validator("columns")
    @classmethod
    def _columns_are_readable(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            if not re.fullmatch(r"[a-z_]+(@\d+(\.\d+)?)?", column):
                raise ValueError(f"{column!r} is no column: write METRIC or METRIC@ALPHA, such as recall@1.5")
        return columns

    @model_validator(mode="after")
    def _fits(self) -> Study:
        slugs = [case.slug for case in self.cases]
        for slug in slugs:
            if slugs.count(slug) > 1:
                raise ValueError(f"two cases have the name {slug!r}: give them different labels")
        _check_known("order", (label for group in self.groups for label in group), self.labels)
        for case in self.cases:
            _check_known(f"on, case {case.label!r}", case.on, self.bases)
        for column in self.parsed_columns:
            if column.guidance not in self.guidance:
                raise ValueError(f"column {column.metric}@{column.guidance:g}: guidance lacks this value")
        return self

    @property
    def labels(self) -> list[str]:
        """Labels of the cases."""
        return [case.label for case in self.cases]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The paper's ordering as groups of labels, best first."""
        return [(entry,) if isinstance(entry, str) else entry for entry in self.order]

    @property
    def parsed_columns(self) -> list[Column]:
        """The columns with their α."""
        parts = (column.partition("@") for column in self.columns)
        return [Column(metric, float(alpha) if at else self.guidance[0]) for metric, at, alpha in parts]

    def default_base(self) -> str:
        """Return the name of the base to run on if none is given."""
        return next(iter(self.bases))

    def choose_cases(self, names: Sequence[str]) -> list[Case]:
        """Return the cases with these names or labels, in the order of the table; all if there are none."""
        known = {case.slug: case for case in self.cases}
        by_label = {case.label: case.slug for case in self.cases}
        chosen = {by_label.get(name, name) for name in names}
        for name in chosen:
            if name not in known:
                raise unknown_name("case", name, known)
        return [case for case in self.cases if not names or case.slug in chosen]


def parse_section(model: type[T], record: Any, where: str) -> T:
    """Validate a record as one of the sections of this module; ``where`` names its file in messages."""
    try:
        return model.model_validate(record)
    except ValidationError as error:
        first, *rest = error.errors()
        place = ".".join(map(str, first["loc"]))
        more = f" (and {len(rest)} more)" if rest else ""
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {f'{place}: ' if place else ''}{message}{more}") from None


def _check_known(field: str, names: Iterable[str], known: Iterable[str]) -> None:
    listed = list(known)
    for name in names:
        if name not in listed:
            raise ValueError(f"{field}: {name!r} is not known, choose from {', '.join(listed) or 'none'}")
