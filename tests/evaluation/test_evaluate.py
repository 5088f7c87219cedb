"""Evaluations as a person meets them: repeated, interrupted, shared by two processes, given wrong input."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics.image.kid  # noqa: F401, its import takes longer than a test may
from PIL import Image

from driftgen.data.images import digits
from driftgen.errors import InputError
from driftgen.evaluation.accumulate import Sums, accumulate
from driftgen.evaluation.encoders import load_encoder, wrap_encoder
from driftgen.evaluation.frechet import Moments, frechet_distance
from driftgen.evaluation.image_sources import BLOCK, GeneratedImages, open_real
from driftgen.evaluation.metrics import expected_bias, kernel_distance
from driftgen.evaluation.reference import compute_reference, load_reference
from driftgen.evaluation.sweep import Evaluation, evaluate_images, evaluate_model
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.image_mlp import ImageMLP
from driftgen.pipeline import DriftPipeline
from driftgen.report.evaluated_card import card_folder, write_evaluation
from driftgen.report.evaluation_files import _Rounds, run_evaluation
from driftgen.support.distributed import Distributed
from tests.support.fork_server import CAPTURE, run_driftgen, run_ranks, start_driftgen

ALONE = Distributed.start("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A generator of digits with random weights."""
    torch.manual_seed(0)
    network = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2)
    folder = tmp_path_factory.mktemp("model") / "generator"
    DriftPipeline(network, guidance=1.5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference():
    return compute_reference(open_real("digits"), load_encoder("pixels"), ALONE)


def test_statistics_are_those_of_all_images_at_once(reference):
    images = open_real("digits")
    pixels = torch.cat([images.load(block) for block in range(3)])
    assert pixels.shape == (1437, 1, 8, 8)
    features = pixels.flatten(1).double() / 255
    assert torch.allclose(reference.moments.mean, features.mean(0), rtol=1e-6)
    assert torch.allclose(reference.moments.covariance, features.T.cov(), atol=1e-9)
    # Every image is stored once, in random order.
    assert torch.allclose(reference.features.double().sum(0), features.sum(0), rtol=1e-6)
    assert not torch.equal(reference.features, features.float())


def test_evaluation_repeats_to_the_last_digit(model, reference):
    pipe = DriftPipeline.from_pretrained(model)
    evaluation = Evaluation(reference, load_encoder("pixels"), ALONE)
    first, second = (
        evaluate_model(pipe, evaluation, samples=100, guidance=[1.0, 2.0], seed=3)["rows"] for _ in range(2)
    )
    drop = ("seconds",)
    assert [{k: v for k, v in r.items() if k not in drop} for r in first] == [
        {k: v for k, v in r.items() if k not in drop} for r in second
    ]
    assert first[0]["FD-pixels"] != first[1]["FD-pixels"]
    features = GeneratedImages(pipe, 100, 1.0, seed=3).load(0).flatten(1) / 255
    assert first[0]["FD-pixels"] == pytest.approx(
        frechet_distance(Moments.of(features), reference.moments), rel=1e-9
    )


def test_samples_do_not_depend_on_the_batch_size(model):
    pipes = [DriftPipeline.from_pretrained(model, batch_size=size) for size in (7, 250)]
    first, second = (GeneratedImages(pipe, 600, 1.0).load(1) for pipe in pipes)
    assert len(first) == 600 - BLOCK
    assert (first.int() - second.int()).abs().max() <= 1  # truncation of rounding noise


def test_kernel_distance_is_unbiased_and_its_formula():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=g), torch.randn(60, 4, generator=g) + 1

    def kernel(a, b):
        return (a.double() @ b.double().T / 4 + 1) ** 3

    def off_diagonal_mean(k):
        return (k.sum() - k.trace()) / (60 * 59)

    expected = off_diagonal_mean(kernel(x, x)) + off_diagonal_mean(kernel(y, y)) - 2 * kernel(x, y).mean()
    mean, std = kernel_distance(x, y)  # every subset is the whole set
    assert mean == pytest.approx(float(expected), rel=1e-9)
    assert std == pytest.approx(0, abs=1e-9)


def test_a_missing_torchmetrics_is_told_before_images_are_generated(model, reference, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    blocks = []
    evaluation = Evaluation(reference, load_encoder("pixels"), ALONE, on_block=lambda *_: blocks.append(1))
    with pytest.raises(InputError, match=r"KID needs torchmetrics: pip install 'driftgen\[eval\]'"):
        evaluate_model(DriftPipeline.from_pretrained(model), evaluation, samples=20)
    assert not blocks


def test_bias_of_few_samples_falls(reference):
    few, many = expected_bias(70, reference), expected_bias(1437, reference)
    assert few > 10 * abs(many)
    assert expected_bias(20_000, reference) is None


def test_reference_round_trip_and_refusal(reference, tmp_path):
    path = reference.save(tmp_path / "digits.safetensors")
    loaded = load_reference(path)
    assert torch.equal(loaded.moments.outer, reference.moments.outer)
    assert torch.equal(loaded.features, reference.features)
    assert loaded.about == reference.about
    loaded.check(load_encoder("pixels"))
    mae = wrap_encoder(ResNetMAE(in_channels=1, base_channels=8, blocks=(1,)), "mae", "cpu")
    with pytest.raises(InputError, match=r"another evaluator: encoder is 'pixels' there and 'mae' here"):
        loaded.check(mae)
    loaded.check(mae, force=True)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read"):
        load_reference(damaged)


def flipped_bytes(path):
    """Yield copies of a safetensors file, one byte of its tensors flipped in each."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for position in np.linspace(start, len(content) - 1, 20).astype(int):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        yield path
    path.write_bytes(content)


def test_flipped_bytes_of_a_reference_are_refused(reference, tmp_path):
    path = reference.save(tmp_path / "digits.safetensors")
    for damaged in flipped_bytes(path):
        with pytest.raises(InputError, match="its checksum differs"):
            load_reference(damaged)
    load_reference(path)


def test_flipped_bytes_of_partial_sums_are_not_taken(tmp_path):
    path = tmp_path / "part.safetensors"
    sums = Sums(20, torch.arange(10), torch.device("cpu"))
    sums.update(0, torch.rand(20, 1, 8, 8), torch.randn(20, 64), None)
    sums.save(path, "k")
    for damaged in flipped_bytes(path):
        assert not Sums(20, torch.arange(10), torch.device("cpu")).load(damaged, "k")
    again = Sums(20, torch.arange(10), torch.device("cpu"))
    assert again.load(path, "k")
    assert torch.equal(again.moments.outer, sums.moments.outer)


def test_a_trained_encoder_gives_a_distance_named_after_it():
    encoder = wrap_encoder(ResNetMAE(in_channels=1, base_channels=8, blocks=(1, 1)), "mae-digits", "cpu")
    reference = compute_reference(open_real("digits-heldout"), encoder, ALONE)
    record = evaluate_images(open_real("digits"), Evaluation(reference, encoder, ALONE))
    row = record["rows"][0]
    assert "FD-mae-digits" in row
    assert "FID" not in row
    assert record["evaluator"]["weights"] == encoder.identity["weights"]


def test_partial_sums_resume_to_the_same_result(model, reference, tmp_path):
    """Stopped after the first block, as Ctrl-C does; the second call must not encode that block again."""
    encoder, seen = load_encoder("pixels"), []

    def run(stop):
        images = GeneratedImages(DriftPipeline.from_pretrained(model), 1200, 1.0)
        load = images.load

        def watched(block):
            seen.append(block)
            if stop and block == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return load(block)

        images.load = watched
        return accumulate(images, encoder, ALONE, partial=tmp_path / "part", key="k")

    with pytest.raises(KeyboardInterrupt):
        run(stop=True)
    resumed = run(stop=False)
    assert seen == [0, 1, 2]
    whole = accumulate(GeneratedImages(DriftPipeline.from_pretrained(model), 1200, 1.0), encoder, ALONE)
    assert torch.equal(resumed.moments.outer, whole.moments.outer)
    assert torch.equal(resumed.features, whole.features)
    assert resumed.checksum == whole.checksum
    other = Sums(1200, torch.arange(10), torch.device("cpu"))
    assert not other.load(next(tmp_path.glob("part-*")), "another key")


PROGRAM = """
import json, sys, torch
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.image_sources import GeneratedImages, open_real
from driftgen.evaluation.reference import compute_reference
from driftgen.evaluation.sweep import Evaluation, evaluate_model
from driftgen.pipeline import DriftPipeline
from driftgen.report.evaluated_card import card_folder, write_evaluation
from driftgen.report.evaluation_files import run_evaluation
from driftgen.support.distributed import Distributed

model, out = sys.argv[1:]
processes = Distributed.start("cpu")
encoder = load_encoder("pixels")
reference = compute_reference(open_real("digits"), encoder, processes)
pipe = DriftPipeline.from_pretrained(model)
record = evaluate_model(pipe, Evaluation(reference, encoder, processes), samples=1300, seed=1)
with open(f"{out}.{processes.rank}", "w") as file:
    json.dump([record, reference.about], file)
processes.close()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_equal_one(model, reference, tmp_path):
    run_ranks(["-c", PROGRAM, str(model), str(tmp_path / "result")])
    pipe = DriftPipeline.from_pretrained(model)
    alone = evaluate_model(pipe, Evaluation(reference, load_encoder("pixels"), ALONE), samples=1300, seed=1)
    for rank in range(2):
        shared, about = json.loads((tmp_path / f"result.{rank}").read_text())
        assert about == reference.about  # also the checksum of all pixels
        for key, value in alone["rows"][0].items():
            if key not in ("seconds", "compared"):
                assert shared["rows"][0][key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.slow
def test_command_writes_table_and_record_and_resumes(model, tmp_path):
    words = ["eval", str(model), "--data", "digits", "--encoder", "pixels", "--samples", "600"]
    words += ["--guidance", "1.0,1.5", "--out", str(tmp_path / "out"), "--device", "cpu"]
    first = run_driftgen(*words)
    assert first.returncode == 0, first.stderr
    assert "FD-pixels" in first.stdout
    path = tmp_path / "out" / "evaluation.json"
    record = json.loads(path.read_text())
    assert [row["guidance"] for row in record["rows"]] == [1.0, 1.5]
    assert {"weights", "seed", "evaluator", "reference", "hardware", "command"} <= record.keys()
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 5000
    assert not list((tmp_path / "out").glob("partial-*"))
    again = run_driftgen(*words)
    assert again.returncode == 0
    assert json.loads(path.read_text()) == record  # nothing was evaluated again


def test_the_card_states_the_figures(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    options = {"samples": 70, "guidance": "1.0,1.5"}
    folder = card_folder(str(copy))

    def keep(pipe, record):
        write_evaluation(folder, pipe.generator, record)

    record = run_evaluation(
        str(copy), "digits", "pixels", tmp_path / "out", "cpu", "driftgen eval", **options, on_result=keep
    )
    text = (copy / "README.md").read_text()
    value = record["rows"][0]["precision"]
    assert "| alpha | FD-pixels |" in text
    assert f" {value:.3f} |" in text
    assert "70 samples in float32, seed 0, against 1,437 images of digits. Evaluator: pixels" in text
    assert "from_pretrained" in text
    # The figures stay with the model: a copy has them on its card.
    pipe = DriftPipeline.from_pretrained(copy)
    assert "FD-pixels" in (pipe.save_pretrained(tmp_path / "again") / "README.md").read_text()


def test_a_folder_of_images_is_evaluated(tmp_path, capfd):
    (tmp_path / "images").mkdir()
    for i, image in enumerate(digits("heldout")[0][:60]):
        pixels = image[0].add(1).mul(127.5).round().byte().numpy()
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    words = str(tmp_path / "images"), "digits", "pixels", tmp_path / "out", "cpu", "driftgen eval"
    with pytest.raises(InputError, match=r"set the side of the images .* \(driftgen eval: --size 64\)"):
        run_evaluation(*words)
    record = run_evaluation(*words, size=8, channels=1)
    assert record["rows"][0]["precision"] > 0.7
    assert "evaluating 60/60" in capfd.readouterr().err


def test_a_name_of_a_model_and_of_data_is_the_model(tmp_path):
    words = "digits", "pixels", tmp_path / "out", "cpu", "driftgen eval"
    record = run_evaluation("digits", *words, samples=70, guidance="1.5")
    assert [(row["guidance"], row["samples"]) for row in record["rows"]] == [(1.5, 70)]
    for options, names in (({"samples": 70, "guidance": "1.5"}, "--samples and --guidance"),):
        with pytest.raises(InputError, match=f"data:digits is images, not a model: leave out {names}"):
            run_evaluation("data:digits", *words, **options)


def test_progress_of_rounds_of_one_batch():
    steps = []
    rounds = _Rounds(lambda step, seconds: steps.append((step, seconds)), 200)
    for seconds in (1.0, 2.0, 4.0):
        rounds(200, seconds)
    assert steps == [(200, 1.0), (400, 3.0), (600, 7.0)]


def test_only_the_card_of_a_folder_can_be_written():
    with pytest.raises(InputError, match="--card: digits is a model of the package; save it to a folder"):
        card_folder("digits")
    with pytest.raises(InputError, match="--card: owner/model is no folder"):
        card_folder("owner/model")


def test_an_interrupted_command_says_how_to_resume(model, tmp_path):
    words = ["eval", str(model), "--data", "digits", "--encoder", "pixels", "--samples", "20000"]
    words += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    process = start_driftgen(*words, stdout=CAPTURE, stderr=CAPTURE)
    while not (tmp_path / "out").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    *_, hint, last = errors.splitlines()
    assert hint == f"stopped: run the same command to resume: driftgen {' '.join(words)}"
    assert last == "driftgen: interrupted"


def _npz(path, side=8, channels=3, count=40):
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, channels), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(count) % 4)
    return str(path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--encoder", "pixels"], "give --data"),
        (["--data", "digits"], "give --encoder"),
        (["--data", "nowhere", "--encoder", "pixels"], "does not exist"),
        (["--data", "large.npz", "--encoder", "pixels"], "8x8 images of 1 channel, large.npz holds 16x16"),
        (["--data", "digits", "--encoder", "nowhere.pth"], "is not a file"),
        (
            ["--data", "digits", "--encoder", "pixels", "--guidance", "1,x"],
            "give numbers separated",
        ),
        (["--data", "digits", "--encoder", "pixels", "--guidance", "0.5"], "must be 1 (none) or more"),
        (["--data", "digits", "--encoder", "pixels", "--samples", "1"], "samples=1 must be from 2 to"),
        (["--data", "no.safetensors", "--encoder", "pixels"], "driftgen eval stats"),
    ],
)
def test_wrong_input_is_one_line(model, tmp_path, monkeypatch, words, text):
    monkeypatch.delenv("DRIFTGEN_INCEPTION", raising=False)
    _npz(tmp_path / "large.npz", side=16)
    done = run_driftgen(
        "eval",
        str(model),
        *words,
        "--out",
        "out",
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("driftgen: error:")
    assert text in line, line
    assert "Traceback" not in done.stderr


def test_few_samples_warn_with_the_bias(model, reference):
    notes = []
    evaluation = Evaluation(reference, load_encoder("pixels"), ALONE, note=notes.append)
    evaluate_model(DriftPipeline.from_pretrained(model), evaluation, samples=50)
    assert len(notes) == 1
    assert "fewer than the 64 feature dimensions" in notes[0]
    assert f"as many real images have {expected_bias(50, reference):.2f}" in notes[0]


def test_a_corrupt_image_is_one_line(tmp_path):
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    from PIL import Image

    for i in range(3):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(folder / f"{i}.png")
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:40])
    words = ["eval", "stats", "photos", "s.safetensors", "--encoder", "pixels", "--size", "16"]
    done = run_driftgen(*words, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert "1 images cannot be read" in line
    assert "2.png" in line
