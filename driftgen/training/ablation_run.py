"""``driftgen ablate``: train and score every case of a study, and write its table after each run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from rich.console import Console
from rich.text import Text

from driftgen.data.images import open_images
from driftgen.errors import InputError, NotFiniteError
from driftgen.evaluation.ablations.result_table import RunResult, TableHead, table_markdown, table_record
from driftgen.evaluation.ablations.run_scores import RunScorer
from driftgen.evaluation.ablations.study import Case
from driftgen.model_io import CONFIG as MODEL_CONFIG
from driftgen.model_io import RUN_MODEL, save_model
from driftgen.support.atomic_write import atomic_folder, atomic_write, make_folder
from driftgen.support.distributed import Distributed
from driftgen.support.folder_lock import hold_folder, is_empty
from driftgen.support.progress import track
from driftgen.support.provenance import provenance
from driftgen.support.rng import derive_seed
from driftgen.support.signals import handle_signals
from driftgen.support.untrusted_files import read_json, reading
from driftgen.training.ablation_config import StudyPlan
from driftgen.training.ablation_workers import Job, Outcome, Progress, Workers
from driftgen.training.build import build_mae
from driftgen.training.metrics_file import read_metrics
from driftgen.training.recipes import to_yaml
from driftgen.training.run_folder import CHECKPOINTS, CONFIG, METRICS, check_run

__all__ = ["TABLE_JSON", "TABLE_MARKDOWN", "AblationStudy"]

TABLE_MARKDOWN, TABLE_JSON = "table.md", "table.json"
RECORD = "ablation.json"  # in the folder of a complete run or encoder
GPU_PROCESSES = 4
ENCODER = "encoder "  # prefix of an encoder's job


@dataclass
class AblationStudy:
    """Runs a study; :meth:`run` resumes what an earlier call left.

    A complete run is not trained again, a stopped one continues from its checkpoint. Runs that a study
    beside this one has completed with the same configuration are copied. The checkpoints of complete runs
    are removed. A run that fails does not stop the others: its row says why, :meth:`check_failures` raises
    at the end, and the next call tries it again.

    Args:
        plan: study, base, cases and seeds.
        processes: trainings at a time; by default the number of CPU cores, or 4 on a GPU.
        device: ``cpu`` or ``cuda``; the best one available if None.
        evaluator: of :class:`~driftgen.evaluation.ablations.run_scores.RunScorer`.
        samples: generated samples per run; those of the base if None.
        command: for the record.
    """

    plan: StudyPlan
    processes: int | None = None
    device: str | None = None
    evaluator: str = "pixels"
    samples: int | None = None
    command: str = "driftgen.training.ablation_run"
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    def __post_init__(self) -> None:
        for name in ("processes", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("ablate starts its own processes: run it without torchrun, with --processes N")
        self.place = Distributed.start(self.device).device
        on_gpu = self.place.type == "cuda"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = self.processes or (GPU_PROCESSES if on_gpu else cores)
        self.threads = max(1, cores // self.count)
        config = self.plan.train_config(self.plan.cases[0], self.plan.seeds[0])
        samples = self.samples or self.plan.base.samples
        self.scorer = RunScorer(config.data, samples, self.evaluator, self.place)
        self.results: dict[str, RunResult] = {}
        self.errors: dict[str, str] = {}  # reason by key of the run or encoder

    def run(self) -> Path:
        """Run every case and seed that has no result yet, and return the path of ``table.md``."""
        with hold_folder(self.plan.out):
            return self._run()

    def _run(self) -> Path:
        self.results, self.errors = {}, {}
        jobs, needs = self._open_jobs()
        _ = self.scorer.reference  # missing data is an error now, not after the first run
        total = sum(job.config.optim.steps for job in jobs)
        self._write_table()
        with (
            handle_signals(_interrupt),
            track(f"ablate {self.plan.name}", max(total, 1), "runs", self.console) as on_step,
            Workers(min(self.count, max(len(jobs), 1)), self.threads) as workers,
        ):
            steps: dict[str, int] = {}

            def show(progress: Progress) -> None:
                steps[progress.key] = progress.step
                on_step(sum(steps.values()), len(self.results))

            waiting, trained = list(jobs), set(self._trained_encoders())
            running: dict[str, Job] = {}
            while waiting or running:
                for job in list(waiting):
                    lost = {ENCODER + name for name in needs[job.key]} & self.errors.keys()
                    if lost:
                        waiting.remove(job)
                        self._fail(job, "; ".join(f"{key}: {self.errors[key]}" for key in sorted(lost)))
                    elif workers.idle and needs[job.key] <= trained:
                        waiting.remove(job)
                        running[job.key] = job
                        workers.start(job)
                for outcome in workers.events(show):
                    job = running.pop(outcome.key)
                    try:
                        self._finish(job, outcome)
                        trained |= {outcome.key.removeprefix(ENCODER)}
                    except InputError as error:
                        self._fail(job, str(error))
                    show(Progress(outcome.key, job.config.optim.steps))
        return self.plan.out / TABLE_MARKDOWN

    def check_failures(self) -> None:
        """Raise if a run of the last call failed, with the names of all that did."""
        failed = [key for key in self.errors if not key.startswith(ENCODER)]
        if failed:
            count = len(self.plan.cases) * len(self.plan.seeds)
            raise InputError(
                f"{len(failed)} of {count} runs failed ({'; '.join(failed)}), the first with: "
                f"{self.errors[failed[0]].rstrip('.')}; the same command tries only these again, see "
                f"{self.plan.out / TABLE_MARKDOWN}"
            )

    def _fail(self, job: Job, reason: str) -> None:
        """Keep the reason why a run has no result, for the table. The next call tries the run again."""
        self.errors[job.key] = reason = " ".join(reason.split())
        self._say(f"{job.key} failed: {reason}")
        for case, seed in itertools.product(self.plan.cases, self.plan.seeds):
            if self.plan.run_folder(case, seed) == job.folder:
                self.results[job.key] = RunResult(case.label, seed, {}, error=reason)
                self._write_table()

    def _open_jobs(self) -> tuple[list[Job], dict[str, set[str]]]:
        """Return the trainings that are left, encoders first, and the encoders that each one needs."""
        plan, device = self.plan, str(self.place)
        jobs: list[Job] = []
        needs: dict[str, set[str]] = {}
        for name in plan.needed_encoders():
            config, folder = plan.pretrain_config(name), plan.encoder_folder(name)
            if plan.base.encoders[name].untrained:
                self._save_untrained(name)
                continue
            if _read_record(folder, config) is None:
                jobs.append(Job(f"{ENCODER}{name}", folder, config, name, device))
        jobs.sort(key=lambda job: -job.config.optim.steps)  # the longest first
        needs |= {job.key: set() for job in jobs}
        for case in plan.cases:
            for seed in plan.seeds:
                job = Job(
                    f"{case.label}, seed {seed}",
                    plan.run_folder(case, seed),
                    plan.train_config(case, seed),
                    f"{plan.name}: {case.label}",
                    device,
                )
                if _read_record(job.folder, job.config) is None and not self._copy_run(job):
                    jobs.append(job)
                    needs[job.key] = set(plan.encoders_of(case))
                    continue
                try:
                    self._score(case, seed)
                except InputError as error:
                    self._fail(job, str(error))
        self._score_earlier()
        return jobs, needs

    def _score_earlier(self) -> None:
        """Add complete runs of other cases and seeds: a call for a few of them must not shorten the table."""
        plan = self.plan
        for case in plan.study.cases:
            for record in (plan.out / "runs").glob(f"{case.slug}-seed*/{RECORD}"):
                number = record.parent.name.removeprefix(f"{case.slug}-seed")
                if not number.isdecimal() or (case in plan.cases and int(number) in plan.seeds):
                    continue
                if _holds(record.parent / CONFIG, to_yaml(plan.train_config(case, int(number)))):
                    self._score(case, int(number))

    def _copy_run(self, job: Job) -> bool:
        """Copy a complete run of the same configuration from another study beside this one.

        Studies share the default case. Returns False if there is no such run, or if this one has begun.
        """
        if (job.folder / CONFIG).exists():
            return False
        text = to_yaml(job.config)
        for record in sorted(self.plan.out.parent.glob(f"*/runs/*/{RECORD}")):
            if _holds(record.parent / CONFIG, text):
                with atomic_folder(job.folder) as scratch:
                    shutil.copytree(record.parent, scratch, dirs_exist_ok=True)
                return True
        return False

    def _trained_encoders(self) -> Iterator[str]:
        for name in self.plan.needed_encoders():
            if (self.plan.encoder_folder(name) / RECORD).is_file():
                yield name

    def _save_untrained(self, name: str) -> None:
        """Save an encoder with its random initial weights."""
        folder, config = self.plan.encoder_folder(name), self.plan.pretrain_config(name)
        if (folder / RECORD).is_file():
            return
        data = open_images(config.data)
        data.close()
        torch.manual_seed(derive_seed(config.seed))
        network = build_mae(config.mae, data.shape, len(data.class_names))
        source = {"recipe": f"{name}, untrained"}
        save_model(network, folder / RUN_MODEL, overwrite=True, source=source)
        _write_json(folder / RECORD, {"seconds": 0.0})

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """Record the end of a training, and score it."""
        if outcome.error is not None:
            raise InputError(outcome.error)
        if not outcome.complete:
            raise KeyboardInterrupt
        rows = read_metrics(job.folder / METRICS)[1]
        seconds = float(rows[-1]["seconds"]) if rows else 0.0
        record = {"seconds": seconds, "failed": outcome.failed, "warnings": list(outcome.warnings)}
        if job.key.startswith(ENCODER):
            if outcome.failed is not None:
                raise InputError(outcome.failed)
            if not (job.folder / RUN_MODEL / MODEL_CONFIG).is_file():
                raise InputError(f"{job.folder} has no {RUN_MODEL}: remove the folder and run again")
            self._say(f"{outcome.key}: {seconds:.0f} s")
        _write_json(job.folder / RECORD, record)
        shutil.rmtree(job.folder / CHECKPOINTS, ignore_errors=True)
        for case, seed in itertools.product(self.plan.cases, self.plan.seeds):
            if self.plan.run_folder(case, seed) == job.folder:
                result = self._score(case, seed)
                self._write_table()
                self._say(f"{outcome.key}: {self._summary(result)}, {seconds:.0f} s")

    def _score(self, case: Case, seed: int) -> RunResult:
        """Return the result of a complete run; it is scored unless this evaluator has scored it before."""
        folder, guidance = self.plan.run_folder(case, seed), self.plan.study.guidance
        record = _read_json(folder / RECORD)
        key = _digest([self.scorer.identity, list(guidance)])
        scores = record.setdefault("scores", {})
        if record.get("failed") is None and key not in scores:
            try:
                scores[key] = self.scorer(folder, guidance)
            except NotFiniteError as error:
                record["failed"] = str(error)
            _write_json(folder / RECORD, record)
        result = RunResult(
            case.label,
            seed,
            scores.get(key, {}),
            float(record["seconds"]),
            record.get("failed"),
            tuple(record.get("warnings", ())),
        )
        self.results[f"{case.label}, seed {seed}"] = result
        return result

    def _summary(self, result: RunResult) -> str:
        if result.failed:
            return "diverged"
        (first, *_) = result.figures.values()
        return f"{self.scorer.distance} {first[self.scorer.distance]:.3f}"

    def _write_table(self) -> None:
        plan, results = self.plan, list(self.results.values())
        head = TableHead(plan.name, plan.base_name, self.scorer.distance, self._facts(), self._notes())
        present = {result.case for result in results} | {case.label for case in plan.cases}
        arguments = plan.study, [c for c in plan.study.cases if c.label in present], results, head
        _write_json(plan.out / TABLE_JSON, table_record(*arguments))
        with atomic_write(plan.out / TABLE_MARKDOWN) as scratch:
            scratch.write_text(table_markdown(*arguments), encoding="utf-8")

    def _facts(self) -> dict[str, Any]:
        plan = self.plan
        facts: dict[str, Any] = provenance(self.command)
        facts["hardware"] = (
            f"{platform.machine()} CPU, processes x threads: {self.count} x {self.threads}"
            if self.place.type == "cpu"
            else f"{torch.cuda.get_device_name(self.place)}, {self.count} processes"
        )
        return {
            **facts,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "recipe": plan.base.recipe,
            "base_changes": {**plan.base.changes, **plan.study.bases[plan.base_name].changes},
            "set": list(plan.overrides),
            "steps": plan.train_config(plan.cases[0], plan.seeds[0]).optim.steps,
            "seeds": sorted({result.seed for result in self.results.values()} | set(plan.seeds)),
            "guidance": list(plan.study.guidance),
            "evaluator": self.scorer.identity,
            "encoders": {
                name: {**plan.base.encoders[name].model_dump(), "seconds": self._encoder_seconds(name)}
                for name in plan.needed_encoders()
            },
        }

    def _notes(self) -> list[str]:
        plan = self.plan
        steps = plan.train_config(plan.cases[0], plan.seeds[0]).optim.steps
        notes = [f"Base `{plan.base_name}`: {plan.base.about}; {steps} steps."]
        alphas = ", ".join(f"{alpha:g}" for alpha in plan.study.guidance)
        notes.append(f"{self.scorer.identity['distance']}, guidance α = {alphas}.")
        if plan.needed_encoders():
            notes.append("Encoders are trained once, with one seed: the spread is that of the generators.")
        return notes

    def _encoder_seconds(self, name: str) -> float | None:
        path = self.plan.encoder_folder(name) / RECORD
        if not path.is_file():
            return None
        return round(float(_read_json(path)["seconds"]), 1)

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def _read_record(folder: Path, config: Any) -> dict[str, Any] | None:
    """Return the record of a complete run of this configuration; None if the run is not complete."""
    if is_empty(folder):
        return None  # a setting that cannot be trained fails its own runs, not the study
    check_run(folder, config, override=False)
    path = folder / RECORD
    if not path.is_file():
        return None
    return _read_json(path)


class _Record(BaseModel):
    """The contents of ``ablation.json``: metrics by evaluator and guidance."""

    seconds: Annotated[float, Field(ge=0, le=1e12)]
    failed: str | None = None
    warnings: list[str] = []
    scores: dict[str, dict[str, dict[str, float]]] = {}


def _read_json(path: Path) -> dict[str, Any]:
    advice = f"remove {path.parent} to run it again"
    record = read_json(path, "the record of a run", advice, finite=False)
    with reading(path, "the record of a run", advice):
        return record | _Record.model_validate(record).model_dump(exclude_unset=True)  # "1" becomes 1.0


def _write_json(path: Path, record: Any) -> None:
    make_folder(path.parent)
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _interrupt(name: str) -> None:
    raise KeyboardInterrupt


def _holds(path: Path, text: str) -> bool:
    """Return True if a file has this text."""
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text
