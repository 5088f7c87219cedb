"""Play the first hour of a new user on real photos, and measure what comes out of it.

python -m tools.first_hour_check PHOTOS.npz CIFAR.npz WORK OUT [ARGUMENT ...]

PHOTOS.npz holds JPEG files of Tiny-ImageNet (``train_jpeg``, ``train_off``, ``train_y``, ``val_...``,
``name``), CIFAR.npz the arrays ``images`` and ``labels`` of CIFAR-10. The script writes 400 photos of each of
four classes as a folder into WORK, runs ``driftgen train WORK/photos --size tiny --yes ARGUMENT ...`` and
takes its time. It then measures the generator against photos that it was not trained on and writes a record
and a sheet to OUT. A second call resumes; its time is that of the second call.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from driftgen.evaluation.neighbors import near_copies
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import atomic_write
from driftgen.support.images import contact_sheet, to_pil, to_uint8
from driftgen.support.provenance import provenance
from tools.records import without_folders

# Classes that differ in color, background and shape.
CLASSES = {"jellyfish": "jellyfish", "monarch": "monarch", "pizza": "pizza", "school bus": "school-bus"}
TRAINING = 400  # photos of each class; the others of the class are held out
EACH, NEIGHBORS, COLUMNS = 100, 10, 16
AGREEMENT, DIVERSITY, MINUTES = 0.5, 0.5, 30.0  # targets
PATCH, WORDS, THRESHOLD, CELLS = 6, 400, 0.5, 3


@dataclass(frozen=True)
class PatchEncoder:
    """Coates and Ng's single-layer network: a dictionary of whitened patches, learned without labels.

    An image of 32 pixels becomes the mean activations of the words and their negatives in 3×3 cells. The
    dictionary comes from CIFAR-10, so the encoder has seen none of the photos.

    Attributes:
        mean: of the normalized patches.
        whiten: ZCA matrix.
        words: ``[WORDS, 3 · PATCH²]``, rows of length 1.
    """

    mean: Tensor
    whiten: Tensor
    words: Tensor

    @classmethod
    def fit(cls, images: NDArray[np.uint8], seed: int = 0, rounds: int = 10) -> PatchEncoder:
        """Learn the dictionary by spherical k-means on random patches of images ``[n, 32, 32, 3]``."""
        random = torch.Generator().manual_seed(seed)
        parts = []
        for batch in torch.from_numpy(images).split(500):
            patches = _patches(batch)
            chosen = torch.randperm(patches.shape[1], generator=random)[:12]
            parts.append(patches[:, chosen].flatten(0, 1))
        x = torch.cat(parts)
        mean = x.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov((x - mean).T))
        whiten = vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
        x = (x - mean) @ whiten
        words = F.normalize(x[torch.randperm(len(x), generator=random)[:WORDS]], dim=1)
        for _ in range(rounds):
            similarity = x @ words.T
            nearest = similarity.abs().argmax(dim=1)
            weight = similarity.gather(1, nearest[:, None])
            words = F.normalize(
                words * 1e-6 + torch.zeros_like(words).index_add_(0, nearest, x * weight), dim=1
            )
        return cls(mean, whiten, words)

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        """Return features ``[n, D]`` of images ``[n, 32, 32, 3]``."""
        rows = []
        for batch in torch.from_numpy(images).split(50):
            similarity = (_patches(batch) - self.mean) @ self.whiten @ self.words.T
            active = torch.cat([similarity - THRESHOLD, -similarity - THRESHOLD], dim=-1).clamp(min=0)
            side = 33 - PATCH
            cells = active.reshape(len(batch), CELLS, side // CELLS, CELLS, side // CELLS, -1).mean((2, 4))
            rows.append(cells.flatten(1).sqrt())
        return torch.cat(rows)


def _patches(images: Tensor) -> Tensor:
    """Return patches ``[n, positions, 3 · PATCH²]``, normalized in brightness and contrast."""
    x = F.unfold(images.permute(0, 3, 1, 2).float() / 255, PATCH).mT
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.01).sqrt()


def write_photos(source: Path, out: Path) -> None:
    """Write ``photos/CLASS/*.jpg`` for training and ``held-out/CLASS/*.jpg``, as the JPEG files they are."""
    stored = np.load(source)
    names = [str(name).split(",")[0] for name in stored["name"]]
    for title, folder in CLASSES.items():
        number = 0
        for split in ("train", "val"):
            offsets, blob = stored[f"{split}_off"], stored[f"{split}_jpeg"]
            for i in np.flatnonzero(stored[f"{split}_y"] == names.index(title)):
                place = out / ("photos" if number < TRAINING else "held-out") / folder
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{number:04d}.jpg").write_bytes(blob[offsets[i] : offsets[i + 1]].tobytes())
                number += 1


def read_photos(folder: Path, side: int) -> tuple[NDArray[np.uint8], Tensor]:
    """Return the photos of a folder by class, at this size, and their labels."""
    images, labels = [], []
    for label, place in enumerate(sorted(folder.iterdir())):
        for path in sorted(place.iterdir()):
            with Image.open(io.BytesIO(path.read_bytes())) as photo:
                images.append(np.asarray(photo.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)))
            labels.append(label)
    return np.stack(images), torch.tensor(labels)


def classify(features: Tensor, references: Tensor, labels: Tensor, *, own: bool = False) -> Tensor:
    """Return the class of most of the nearest references by cosine; with ``own``, never of the row itself."""
    similarity = F.normalize(features, dim=1) @ F.normalize(references, dim=1).T
    if own:
        similarity.fill_diagonal_(-2)
    votes = F.one_hot(labels[similarity.topk(NEIGHBORS).indices], int(labels.max()) + 1).sum(1)
    return votes.argmax(dim=1)


def mean_distance(features: Tensor, labels: Tensor) -> float:
    """Return the mean distance between samples of one class, the mean over classes."""
    return float(torch.stack([torch.pdist(features[labels == c]).mean() for c in labels.unique()]).mean())


def measure(run: Path, work: Path, encoder: PatchEncoder, guidance: float | None = None) -> dict[str, Any]:
    """Measure a run's generator against the held-out photos; write ``sheet.png`` beside its model."""
    pipe = DriftPipeline.from_pretrained(run)
    labels = torch.arange(len(CLASSES)).repeat_interleave(EACH)
    samples = pipe(labels.tolist(), guidance=guidance, seed=1, output="tensor")
    if samples.shape[-1] != 32:
        samples = F.interpolate(samples, (32, 32), mode="bicubic", antialias=True)
    generated = to_uint8(samples)
    held, real = read_photos(work / "held-out", 32)
    training, _ = read_photos(work / "photos", 32)
    references = encoder(held)
    center = references.mean(0)
    x, y, seen = encoder(generated) - center, references - center, encoder(training) - center
    agreement = (classify(x, y, real) == labels).float()
    nearest = [(F.normalize(z, dim=1) @ F.normalize(seen, dim=1).T).amax(1) for z in (x, y)]
    copies = near_copies(nearest[0], nearest[1])
    rows = [i for c in range(len(CLASSES)) for i in range(c * EACH, c * EACH + COLUMNS)]
    with atomic_write(run / "sheet.png") as scratch:
        contact_sheet(to_pil(generated[rows]), columns=COLUMNS).save(scratch, format="png")
    return {
        "agreement": float(agreement.mean()),
        "agreement of each class": [float(agreement[labels == c].mean()) for c in range(len(CLASSES))],
        "agreement of held-out photos": float((classify(y, y, real, own=True) == real).float().mean()),
        "chance": 1 / len(CLASSES),
        "diversity": mean_distance(x, labels) / mean_distance(y, real),
        "near copies": copies.share,
        "near copies among held-out photos": copies.heldout_share,
        "samples": len(labels),
        "references": len(real),
        "guidance": pipe.guidance if guidance is None else guidance,
    }


def main(source: str, cifar: str, work: str, out: str, *arguments: str) -> None:
    """Write the photos, train, measure, and write the record."""
    place, target = Path(work), Path(out)
    if not (place / "held-out").is_dir():
        write_photos(Path(source), place)
    run = place / "runs" / "photos"
    words = ["train", str(place / "photos"), "--out", str(run), "--size", "tiny", "--yes", *arguments]
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "driftgen", *words], check=False).returncode
    minutes = (time.monotonic() - started) / 60
    if code:
        raise SystemExit(code)
    encoder = PatchEncoder.fit(np.load(cifar)["images"][:5000])
    figures = measure(run, place, encoder)
    shown = "driftgen train photos --size tiny --yes"
    record = {
        **provenance(" ".join([shown, *arguments])),
        "classes": list(CLASSES.values()),
        "photos": f"{TRAINING} of each class to train, {figures['references']} others held out, 32 pixels",
        "evaluator": f"{NEIGHBORS} nearest held-out photos by cosine of patch features (Coates and Ng, "
        f"{WORDS} words, learned on CIFAR-10)",
        "minutes": minutes,
        "figures": figures,
        "targets": {"agreement": AGREEMENT, "diversity": DIVERSITY, "minutes": MINUTES},
    }
    target.mkdir(parents=True, exist_ok=True)
    (target / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (target / "samples.png").write_bytes((run / "sheet.png").read_bytes())
    config = without_folders((run / "config.yaml").read_text(encoding="utf-8"))
    (target / "config.yaml").write_text(config, encoding="utf-8")
    print(json.dumps(record, indent=1))


def _usage(arguments: Sequence[str]) -> None:
    if len(arguments) < 4:
        raise SystemExit(__doc__)
    main(*arguments)


if __name__ == "__main__":
    _usage(sys.argv[1:])
