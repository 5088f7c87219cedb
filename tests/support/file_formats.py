"""A small valid file of every format that driftgen reads, and the call that loads it."""

import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import driftgen as dg
from driftgen.data.config import Data
from driftgen.data.images import open_images
from driftgen.data.latent_encoding import encode_images
from driftgen.data.latents import LatentCache
from driftgen.data.toy import load_points
from driftgen.evaluation.accumulate import Sums
from driftgen.evaluation.frechet import Moments
from driftgen.evaluation.real_images import run_data
from driftgen.evaluation.reference import Reference, load_reference
from driftgen.features.backbone_loading import read_normalization
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.dit import DiT, DiTConfig
from driftgen.generators.image_mlp import ImageMLP
from driftgen.interop.official import load_official, save_official
from driftgen.interop.run_models import find_run_model
from driftgen.model_io import load_any
from driftgen.policy.collect import _check_options
from driftgen.policy.episode_files import open_episodes
from driftgen.report.run_files import open_run
from driftgen.report.sample_folder import _claim
from driftgen.report.toy_page import read_toy
from driftgen.support.sheets import Sheet, read_sheet, write_sheet
from driftgen.tokenizers import Identity
from driftgen.tokenizers.taesd import TinyAutoencoder
from driftgen.training.ablation_run import _read_json
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.compact_state import read_state, write_state
from driftgen.training.recipes import load_recipe
from tests.support.autoencoders import taesd_files
from tests.support.checkpoint_states import state
from tests.support.image_data import write_tar
from tests.support.latent_images import Images
from tests.support.resumed_results import (
    EVALUATION,
    SCORES,
    encoder_choice,
    encoder_run,
    evaluated,
    own_run,
    resume,
    scored,
    trained,
    training,
)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: of the format.
        make: writes valid files into a folder.
        load: loads them from that folder.
        files: patterns of the files to damage.
    """

    name: str
    make: Callable[[Path], Any]
    load: Callable[[Path], Any]
    files: tuple[str, ...]


def _pixels(n: int = 4, side: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def _encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(_pixels(1, 24)[0])
    if kind == "GIF":
        image = image.convert("P")
    if kind == "JPEG":
        exif = image.getexif()
        exif[0x0112] = 6
        options["exif"] = exif
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _load_images(place: Path, size: int | None = 8) -> Any:
    data = open_images(Data(path=str(place), size=size, workers=0))
    return data.load(torch.arange(len(data.labels)), 0)


def _images(kind: str, suffix: str) -> Format:
    def make(folder: Path) -> None:
        (folder / f"one.{suffix}").write_bytes(_encoded(kind))

    return Format(f"image, {kind}", make, _load_images, ("one.*",))


def _arrays(folder: Path) -> None:
    np.savez(folder / "a.npz", images=_pixels(), labels=np.arange(4) % 2)


def _byte_labels(folder: Path) -> None:
    labels = np.array(["café", "b", "café", "b"])
    np.savez(folder / "a.npz", images=_pixels(), labels=np.char.encode(labels, "utf-8"))


def _array(folder: Path) -> None:
    np.save(folder / "a.npy", _pixels())


def _packed_arrays(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", images=_pixels(), labels=np.array(["a", "b", "a", "b"]))


def _tar(folder: Path) -> None:
    png = _encoded("PNG")
    write_tar(
        folder / "a.tar", [("1.png", png), ("1.cls", b"0"), ("2.png", png), ("2.json", b'{"label": 1}')]
    )


def _labels(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.png").write_bytes(_encoded("PNG"))
    rows = [{"file_name": f"{name}.png", "label": i} for i, name in enumerate("ab")]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"image": {"bytes": _encoded("PNG"), "path": None}, "label": i} for i in range(2)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")


def _saved(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = {"image": [{"bytes": _encoded("PNG"), "path": None}] * 2, "label": ["a cat", "a dog"]}
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))


def _latents(folder: Path) -> None:
    encode_images(Images(6), Identity(), folder, shard_size=4)
    (folder / "cache.lock").unlink(missing_ok=True)


def _load_latents(folder: Path) -> Any:
    return LatentCache(folder).load(torch.arange(6), 0)


def _model(folder: Path) -> None:
    torch.manual_seed(0)
    config = DiTConfig(4, 3, 2, hidden_size=16, depth=1, num_heads=2, num_classes=3)
    dg.save_model(DiT(config), folder, class_names=["a", "b", "c"], source={"step": 3, "ema": "0.9"})


def _small(folder: Path, **options: Any) -> None:
    torch.manual_seed(0)
    dg.save_model(
        ImageMLP(input_size=4, in_channels=1, hidden_size=16, depth=1, condition_size=4, num_classes=2),
        folder,
        **options,
    )


def _load_model(folder: Path) -> Any:
    return dg.DriftPipeline.from_pretrained(folder)([0], seed=0)


def _unchecked(folder: Path) -> None:
    """A model of a version without checksums."""
    _small(folder)
    record = json.loads((folder / "config.json").read_text())
    record.pop("checksums", None)
    (folder / "config.json").write_text(json.dumps(record))


def _generator_artifact(folder: Path) -> None:
    torch.manual_seed(0)
    config = DiTConfig(4, 3, 2, hidden_size=16, depth=1, num_heads=2, num_classes=3)
    save_official(DiT(config), folder, {"step": 5})


def _encoder_artifact(folder: Path) -> None:
    torch.manual_seed(0)
    save_official(ResNetMAE(3, 8, (1, 1, 1, 1), num_classes=3), folder)


def _recipe(folder: Path) -> None:
    from driftgen.training.recipes import to_yaml

    (folder / "own.yaml").write_text(to_yaml(load_recipe("digits")))


def _run(folder: Path) -> None:
    from driftgen.training.recipes import to_yaml

    (folder / "config.yaml").write_text(to_yaml(load_recipe("digits")))
    header = {"header": {"task": "train", "weights": "ema", "environment": {"torch": "2"}}}
    evaluation = {"metric": "fid", "samples": 10, "ema": {"0.9": {"fid": 3.0}}}
    row = {
        "step": 1,
        "loss": 2.0,
        "seconds": 1.0,
        "samples_per_second": 5.0,
        "memory_gib": 0.5,
        "spread": 1.0,
    }
    row |= {"warnings": ["spread: low; wait"], "unreadable": {"count": 1, "names": ["a"]}}
    rows = [header, row, row | {"step": 2, "evaluation": evaluation, "diversity": 0.9, "skipped": 0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evaluation.json").write_text(json.dumps({"rows": [{"fid": 3.0, "guidance": 1.0}]}))


def _read_report(folder: Path) -> Any:
    run = open_run(folder)
    return run.facts(), run.tiles(), run.warnings(), run.unreadable(), run.environment(), run.options()


def _no_model(folder: Path) -> Any:
    """The message about a run without a model reads its configuration and its metrics."""
    with suppress(dg.InputError):
        find_run_model(folder)


def _reference(folder: Path) -> None:
    features = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moments = Moments(6, features.sum(0), features.T @ features)
    about = {"data": "digits", "shape": [1, 8, 8], "count": 6}
    Reference(moments, features.float(), {"name": "pixels"}, about).save(folder / "r.safetensors")


def _sums() -> Sums:
    return Sums(6, torch.arange(4), torch.device("cpu"))


def _partial_sums(folder: Path) -> None:
    sums = _sums()
    sums.update(0, torch.zeros(6, 1, 8, 8), torch.ones(6, 4), None)
    sums.save(folder / "s.safetensors", "key")


def _checkpoints(folder: Path) -> None:
    for step in (1, 2):
        Checkpoints(folder).save(step, state(step), {"step": step})


def _compact(folder: Path) -> None:
    run = folder / "run"
    _run_with_checkpoint(run)
    write_state(run, folder / "state", bits=16)


def _run_with_checkpoint(run: Path) -> None:
    run.mkdir()
    _run(run)
    Checkpoints(run / "checkpoints").save(2, state(2), {"step": 2})


def _episodes() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "state": random.uniform(0, 512, (12, 5)).astype(np.float32),
        "keypoint": random.uniform(0, 512, (12, 9, 2)).astype(np.float32),
        "action": random.uniform(0, 512, (12, 2)).astype(np.float32),
    }


def _episodes_npz(folder: Path) -> None:
    np.savez(folder / "p.npz", episode_ends=np.array([4, 9, 12]), **_episodes())


def _zarr(folder: Path) -> None:
    import zarr

    root = zarr.open_group(str(folder / "p.zarr"), mode="w", zarr_format=2)
    for group, members in (("data", _episodes()), ("meta", {"episode_ends": np.array([4, 9, 12])})):
        made = root.create_group(group)
        for name, array in members.items():
            made.create_array(name, shape=array.shape, chunks=array.shape, dtype=array.dtype)[:] = array


def _hdf5(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "d.hdf5", "w") as file:
        for number in range(2):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = np.zeros((5, 7))
            for name, size in (("object", 10), ("robot0_eef_pos", 3), ("robot0_eef_quat", 4)):
                demo[f"obs/{name}"] = np.ones((5, size))
            demo["obs/robot0_gripper_qpos"] = np.ones((5, 2))


def _kitchen(folder: Path) -> None:
    random = np.random.default_rng(0)
    np.save(folder / "observations_seq.npy", random.normal(size=(3, 6, 60)))
    np.save(folder / "actions_seq.npy", random.normal(size=(3, 6, 9)))
    np.save(folder / "existence_mask.npy", np.ones((3, 6)))


def _lerobot(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (folder / "meta").mkdir()
    (folder / "meta" / "info.json").write_text("{}")
    (folder / "data" / "chunk-000").mkdir(parents=True)
    rows = [
        {
            "episode_index": i // 3,
            "frame_index": i % 3,
            "action": [0.5, float(i)],
            "observation.state": [1.0, float(i)],
            "observation.image": {"bytes": _encoded("PNG"), "path": ""},
        }
        for i in range(6)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / "chunk-000" / "e.parquet")


def _record(name: str, record: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(record))


def _points(folder: Path) -> None:
    np.save(folder / "p.npy", np.random.default_rng(0).normal(size=(40, 2)))


def _sheet(folder: Path) -> None:
    write_sheet(folder / "s.png", Sheet([Image.fromarray(p) for p in _pixels()], 2, captions=("a",) * 4))


TOY = {
    "distribution": "bimodal",
    "config": {"generator": False, "init": "noise", "steps": 3},
    "command": "driftgen toy",
    "torch": "2",
}
NORMALIZATION = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392}
ABLATION = {"seconds": 3.0, "failed": None, "warnings": ["a"], "scores": {"k": {"1.0": {"fid": 3.0}}}}
OPTIONS = {"task": "lift", "episodes": 3}

FORMATS = (
    Format("arrays, .npz", _arrays, lambda f: _load_images(f / "a.npz", None), ("a.npz",)),
    Format("arrays, packed .npz", _packed_arrays, lambda f: _load_images(f / "a.npz", 4), ("a.npz",)),
    Format("arrays, labels of bytes", _byte_labels, lambda f: _load_images(f / "a.npz", 4), ("a.npz",)),
    Format("array, .npy", _array, lambda f: _load_images(f / "a.npy"), ("a.npy",)),
    Format("points, .npy", _points, lambda f: load_points(f / "p.npy"), ("p.npy",)),
    *(_images(kind, kind.lower()) for kind in ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP")),
    Format("labels of a folder", _labels, _load_images, ("metadata.jsonl",)),
    Format("tar shard", _tar, lambda f: _load_images(f / "a.tar"), ("a.tar",)),
    Format("latent cache", _latents, _load_latents, ("cache.json", "shard-*")),
    Format("saved model", _model, _load_model, ("config.json", "model.safetensors")),
    Format("model without checksums", _unchecked, _load_model, ("config.json", "model.safetensors")),
    Format(
        "model in shards", lambda f: _small(f, max_shard_size="2KB"), _load_model, ("*.index.json", "model-*")
    ),
    Format("model of 8 bits", partial(_small, dtype=torch.int8), _load_model, ("model.safetensors",)),
    Format("released generator", _generator_artifact, load_any, ("metadata.json", "*.msgpack")),
    Format("released encoder", _encoder_artifact, load_official, ("metadata.json", "*.msgpack")),
    Format("recipe", _recipe, lambda f: load_recipe(f / "own.yaml"), ("own.yaml",)),
    Format("run, report", _run, _read_report, ("config.yaml", "metrics.jsonl", "evaluation.json")),
    Format("run, data", _run, lambda f: run_data(str(f)), ("config.yaml",)),
    Format("run, resumed", own_run, resume, ("config.yaml",)),
    Format("run, resumed, --init", own_run, lambda f: resume(f, "init=digits"), ("config.yaml",)),
    Format(
        "encoder run", encoder_run, encoder_choice, ("*/config.yaml", "*/metrics.jsonl", "*/model/*.json")
    ),
    Format("run without a model", _run, _no_model, ("config.yaml", "metrics.jsonl")),
    Format(
        "reference statistics", _reference, lambda f: load_reference(f / "r.safetensors"), ("r.safetensors",)
    ),
    Format(
        "sums of an evaluation",
        _partial_sums,
        lambda f: _sums().load(f / "s.safetensors", "key"),
        ("s.safetensors",),
    ),
    Format("checkpoint", _checkpoints, lambda f: Checkpoints(f).load(), ("step-00000002/*",)),
    Format("compact state", _compact, lambda f: read_state(f / "state"), ("state/*",)),
    Format(
        "tokenizer",
        taesd_files,
        lambda f: TinyAutoencoder.from_files(f / "x_encoder.pth", f / "x_decoder.safetensors"),
        ("x_*",),
    ),
    Format("episodes, .npz", _episodes_npz, lambda f: open_episodes(f / "p.npz"), ("p.npz",)),
    Format("episodes, zarr", _zarr, lambda f: open_episodes(f / "p.zarr"), ("p.zarr/**/*",)),
    Format("episodes, HDF5", _hdf5, lambda f: open_episodes(f / "d.hdf5"), ("d.hdf5",)),
    Format("episodes, kitchen", _kitchen, open_episodes, ("*.npy",)),
    Format("episodes, LeRobot", _lerobot, open_episodes, ("data/**/*.parquet",)),
    Format(
        "normalization",
        _record("preprocessor_config.json", NORMALIZATION),
        read_normalization,
        ("*.json",),
    ),
    Format("toy metrics", _record("metrics.json", TOY), read_toy, ("metrics.json",)),
    Format("ablation record", _record("r.json", ABLATION), lambda f: _read_json(f / "r.json"), ("r.json",)),
    Format("evaluation, resumed", _record("e.json", EVALUATION), evaluated, ("e.json",)),
    Format("policy scores", _record("e.json", SCORES), scored, ("e.json",)),
    Format("training of the studio", training, trained, (".studio/job.json",)),
    Format("collection", _record("options.json", OPTIONS), lambda f: _check_options(f, OPTIONS), ("*.json",)),
    Format("samples", _record("s.json", OPTIONS), lambda f: _claim(f / "s.json", OPTIONS), ("s.json",)),
    Format("sheet", _sheet, lambda f: read_sheet(f / "s.png"), ("s.png",)),
)
# Their libraries take seconds to import.
SLOW_FORMATS = (
    Format("images, parquet", _parquet, lambda f: _load_images(f / "a.parquet"), ("a.parquet",)),
    Format("images, save_to_disk", _saved, lambda f: _load_images(f / "saved"), ("saved/*",)),
)
