"""Configurations of an ablation study: packaged studies and bases, and the run of each case and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from driftgen.errors import InputError, unknown_name
from driftgen.evaluation import ablations
from driftgen.evaluation.ablations.study import Base, Case, Changes, Study, parse_section
from driftgen.support.yaml_files import read_mapping
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.recipes import load_recipe
from driftgen.training.recipes.overrides import split_override

__all__ = [
    "StudyPlan",
    "StudySummary",
    "load_base",
    "load_study",
    "parse_names",
    "parse_seeds",
    "study_names",
]

FOLDER = Path(ablations.__file__).parent
BASES = FOLDER / "bases"
ENCODER = "encoder"  # prefix of the user's changes of encoders


class StudySummary(NamedTuple):
    """Summary of a packaged study."""

    name: str
    title: str
    bases: tuple[str, ...]


def study_names() -> list[StudySummary]:
    """Return every packaged study: its name, its title and the bases it runs on."""
    studies = {path.stem: load_study(path) for path in sorted(FOLDER.glob("*.yaml"))}
    return [StudySummary(name, study.title, tuple(study.bases)) for name, study in studies.items()]


def load_study(name_or_path: str | Path) -> Study:
    """Load a packaged study, or one from a ``.yaml`` file."""
    packaged = {path.stem: path for path in FOLDER.glob("*.yaml")}
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in packaged:
            raise unknown_name("study", str(name_or_path), packaged)
        path = packaged[str(name_or_path)]
    return parse_section(Study, read_mapping(path), str(path))


def load_base(name: str) -> Base:
    """Load a packaged base."""
    packaged = {path.stem: path for path in BASES.glob("*.yaml")}
    if name not in packaged:
        raise unknown_name("base", name, packaged)
    return parse_section(Base, read_mapping(packaged[name]), str(packaged[name]))


def parse_names(text: str | None) -> list[str]:
    """Parse names of cases such as ``0.02,0.05``; None stands for all."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """Parse seeds such as ``0,1,2``; None stands for those of the study."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < 2**63 for part in parts):
        raise InputError(f"seeds={text!r}: write whole numbers from 0 with commas, such as 0,1,2")
    return tuple(dict.fromkeys(int(part) for part in parts))


@dataclass(frozen=True)
class StudyPlan:
    """A study on one base, with the changes of the user.

    Attributes:
        name: of the study.
        study: its description.
        base_name: of the base.
        base: its description.
        out: folder of the study.
        encoders: folder of the encoders, which studies on the same base share.
        cases: rows to run.
        seeds: seeds of each case.
        overrides: changes of the base by the user, ``key=value`` each; ``encoder.key=value`` changes the
            pretraining of every encoder, and ``data.key=value`` both.
    """

    name: str
    study: Study
    base_name: str
    base: Base
    out: Path
    encoders: Path
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        out: Path | None = None,
        base: str | None = None,
        seeds: Sequence[int] = (),
        cases: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> StudyPlan:
        """Load a study and check every configuration in it.

        ``out`` is ``runs/ablate/NAME`` by default, with the name of a base that is not the study's default.
        """
        study, stem = load_study(name), Path(name).stem
        base_name = base or study.default_base()
        if base_name not in study.bases:
            raise unknown_name("base", base_name, study.bases)
        default = stem if base_name == study.default_base() else f"{stem}-{base_name}"
        folder = out or Path("runs") / "ablate" / default
        plan = cls(
            stem,
            study,
            base_name,
            load_base(base_name),
            folder,
            folder.parent / f"encoders-{base_name}",
            tuple(study.choose_cases(cases)),
            tuple(seeds) or study.seeds,
            tuple(overrides),
        )
        for case in plan.cases:
            plan.train_config(case, plan.seeds[0])
        for encoder in plan.needed_encoders():
            plan.pretrain_config(encoder)
        return plan

    def run_folder(self, case: Case, seed: int) -> Path:
        """Folder of the run of one case and seed."""
        return self.out / "runs" / f"{case.slug}-seed{seed}"

    def encoder_folder(self, encoder: str) -> Path:
        """Folder of an encoder."""
        return self.encoders / encoder

    def encoders_of(self, case: Case) -> tuple[str, ...]:
        """Names of the encoders of a case."""
        chosen = case.encoders_on(self.base_name)
        if chosen is None:
            chosen = self.study.bases[self.base_name].encoders
        chosen = self.base.use if chosen is None else chosen
        for name in chosen:
            if name not in self.base.encoders:
                raise unknown_name(f"encoder of case {case.label!r}", name, self.base.encoders)
        return chosen

    def needed_encoders(self) -> list[str]:
        """Names of the encoders that the chosen cases use."""
        return list(dict.fromkeys(name for case in self.cases for name in self.encoders_of(case)))

    def train_config(self, case: Case, seed: int) -> TrainConfig:
        """Return the configuration of one run: base, study, the user's changes, encoders, case, seed."""
        entries = [{"kind": "mae", "path": str(self.encoder_folder(name))} for name in self.encoders_of(case)]
        overrides = [
            *_overrides(self.base.changes),
            *_overrides(self.study.bases[self.base_name].changes),
            *(text for text in self.overrides if split_override(text)[0][0] != ENCODER),
            *_overrides({"encoders": entries}),
            *_overrides(case.changes_on(self.base_name)),
            f"seed={seed}",
        ]
        config = load_recipe(self.base.recipe, overrides, "train")
        assert isinstance(config, TrainConfig)
        if config.data.kind == "images" and config.data.path is None:
            raise InputError(
                f"data.path is not set: the base {self.base_name} needs images, use --set data.path=PATH"
            )
        return config

    def pretrain_config(self, encoder: str) -> PretrainConfig:
        """Return the configuration of an encoder: that of the base, with the user's data."""
        spec = self.base.encoders[encoder]
        changes = [text for text in self.overrides if _is_data(split_override(text)[0])]
        changes += [
            text.strip().removeprefix(f"{ENCODER}.")
            for text in self.overrides
            if split_override(text)[0][0] == ENCODER
        ]
        config = load_recipe(spec.recipe, [*_overrides(spec.changes), *changes], "pretrain")
        assert isinstance(config, PretrainConfig)
        return config


def _is_data(keys: Sequence[str]) -> bool:
    """Return True for keys that say which images to train on, and how to decode them."""
    return keys[0] == "data" and keys[1:2] != ["augment"]


def _overrides(changes: Changes) -> list[str]:
    return [f"{key}={_yaml(value)}" for key, value in changes.items()]


def _yaml(value: Any) -> str:
    """Return a value as JSON, which is YAML on one line."""
    return json.dumps(value, ensure_ascii=False)
