"""Tables of the evaluator, in results/evaluator and docs/evaluation.md."""

from __future__ import annotations

from tools.records import Results, fill, markdown

__all__ = ["evaluator_check", "evaluator_time", "evaluator_ways"]


def evaluator_check(results: Results) -> str:
    """FID and the other metrics of CIFAR-10's test images against its training images."""
    record = results.load("evaluator/cifar10-train-test.json")
    header = ["FID", "expected", "KID", "precision", "recall", "density", "coverage", "GPU"]
    row = fill(
        "{FID:.4f}|3.1508|{KID:.1e}|{precision:.4f}|{recall:.4f}|{density:.3f}|{coverage:.3f}|{gpu}",
        record["rows"][0],
        gpu=record["gpu"],
    )
    return markdown(header, [row.split("|")])


def evaluator_ways(results: Results) -> str:
    """FID of the same images computed in other ways."""
    rows = []
    for name, row in results.load("evaluator/ways.json")["rows"].items():
        own = fill("{FID:.4f}", row) if "FID" in row else ""
        mixed = fill("{against_float32_statistics:.4f}", row) if "against_float32_statistics" in row else ""
        seconds = fill("{seconds:.1f s}", row) if "seconds" in row else ""
        rows.append([name, own, mixed, seconds])
    return markdown(["images computed in", "FID", "against our statistics", "50,000 images, H200"], rows)


def evaluator_time(results: Results) -> str:
    """Time in which ``driftgen eval`` generates and scores the samples of a U-Net."""
    record = results.load("evaluator/random-unet.json")
    (row,) = record["rows"]
    header = ["samples", "metrics", "seconds", "GPU"]
    metrics = "FID, KID, precision, recall, density, coverage"
    cells = fill("{samples:,d}|{metrics}|{seconds:.1f}|{gpu}", row, metrics=metrics, gpu=record["gpu"])
    return markdown(header, [cells.split("|")])
