import pytest
import torch

import driftgen as dg
from driftgen.data.images import digits
from driftgen.evaluation.digits import BARS, DigitClassifier, evaluate_digits, within_class_spread

LABELS = torch.arange(200) % 10


def failed(figures):
    """Return the targets that are missed."""
    return {
        name
        for name, bar in BARS.items()
        if (figures[name] > bar if name == "copied" else figures[name] < bar)
    }


def test_held_out_digits_pass_every_bar():
    images, labels = digits("heldout")
    figures = evaluate_digits(images, labels)
    assert failed(figures) == set()
    assert figures["classifier"] == figures["recognized"] > 0.98
    assert 0.95 < figures["spread"] < 1.05
    assert (
        figures["precision_heldout"] == figures["recall_heldout"] == 1 > figures["precision_training"] > 0.85
    )
    assert figures["samples"] == 360


def test_a_run_collapsed_onto_class_means_misses_recall_and_spread():
    images, labels = digits("train")
    means = torch.stack([images[labels == i].mean(dim=0) for i in range(10)])
    generator = torch.Generator().manual_seed(0)
    samples = means[LABELS] + 0.05 * torch.randn(200, 1, 8, 8, generator=generator)
    figures = evaluate_digits(samples, LABELS)
    assert failed(figures) == {"recall_heldout", "recall_training", "spread"}
    assert figures["recognized"] == figures["precision_heldout"] == 1


def test_memorized_digits_are_copies():
    images, labels = digits("train")
    figures = evaluate_digits(images[::2], labels[::2])
    assert failed(figures) == {"copied"}
    assert figures["copied"] == 1


def test_wrong_labels_are_not_recognized():
    images, labels = digits("heldout")
    figures = evaluate_digits(images, (labels + 1) % 10)
    assert figures["recognized"] < 0.05
    assert figures["precision_heldout"] == 1  # does not depend on labels


def test_noise_is_neither_precise_nor_recognized():
    samples = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    figures = evaluate_digits(samples, LABELS)
    assert {"recognized", "precision_heldout", "precision_training", "recall_heldout"} <= failed(figures)


def test_one_collapsed_class_shows():
    images, labels = (part.clone() for part in digits("heldout"))
    images[labels == 4] = images[labels == 4][0]
    figures = evaluate_digits(images, labels)
    assert figures["spread"] < 0.95
    assert figures["least_spread"] == pytest.approx(0, abs=1e-6)


def test_samples_are_clipped_before_evaluation():
    images, labels = digits("heldout")
    assert evaluate_digits(images + images.sign() * (images.abs() == 1), labels) == evaluate_digits(
        images, labels
    )


def test_spread_is_the_mean_distance_between_two():
    images = torch.tensor([0.0, 3.0, 6.0, 5.0]).reshape(4, 1, 1, 1)
    spread = within_class_spread(images, torch.tensor([0, 0, 0, 1]), num_classes=3)
    torch.testing.assert_close(spread[0], torch.tensor(4.0, dtype=torch.float64))
    assert spread[1:].isnan().all()


def test_the_classifier_is_deterministic():
    images, labels = digits("train")
    heldout, _ = digits("heldout")
    first = DigitClassifier(images, labels)(heldout)
    torch.manual_seed(7)
    assert torch.equal(DigitClassifier(images, labels)(heldout), first)
    assert torch.equal(DigitClassifier(images, labels)(images), labels)


@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        (torch.zeros(20, 8, 8), LABELS[:20], "samples has shape [20, 8, 8], expected [n, 1, 8, 8]"),
        (torch.zeros(20, 1, 8, 8), LABELS[:19], "labels has shape [19], expected [20]"),
        (torch.zeros(20, 1, 8, 8), LABELS[:20] + 1, "labels are 1 ... 10, expected 0 ... 9"),
        (torch.zeros(11, 1, 8, 8), LABELS[:11], "labels holds 1 of digit 1: give at least 2 of each"),
        (torch.zeros(20, 1, 8, 8) / 0, LABELS[:20], "samples holds NaN"),
    ],
)
def test_wrong_samples(samples, labels, message):
    with pytest.raises(dg.InputError) as error:
        evaluate_digits(samples, labels)
    assert message in str(error.value)
