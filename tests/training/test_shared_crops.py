"""Crops shared by the samples of a class: exact, differentiable, part of every kind of step."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

import driftgen as dg
from driftgen.errors import InputError
from driftgen.support.distributed import Distributed
from driftgen.training.shared_crops import SharedCrops
from driftgen.training.trainer import Training
from tests.support.runs import config, final, run

CROPPED = ["crops.share=1", "crops.scale=[0.5, 0.9]"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def gradient(task, step=3):
    task.generator.zero_grad()
    task.compute_gradient(step)
    return [p.grad.clone() for p in task.generator.parameters()]


def test_crops_against_pillow():
    squares = torch.tensor([[0.5, 0.25, 0.125], [0.75, 0.0, 0.25]])  # whole pixels of 8
    samples = torch.randn(4, 1, 8, 8, generator=seeded(1))
    boxes = [(1, 2, 5, 6)] * 2 + [(2, 0, 8, 6)] * 2  # left, top, right, bottom
    expected = [
        np.asarray(Image.fromarray(sample[0].numpy()).crop(box).resize((8, 8), Image.Resampling.BICUBIC))
        for sample, box in zip(samples, boxes, strict=True)
    ]
    found = SharedCrops(1.0, (0.5, 1.0))(samples, squares)[:, 0]
    torch.testing.assert_close(found, torch.tensor(np.stack(expected)), rtol=1e-5, atol=1e-5)


def test_whole_samples_keep_every_bit():
    crops = SharedCrops(0.0, (0.5, 1.0))
    squares = crops.draw(3, seeded(0))
    assert torch.equal(squares, torch.tensor([[1.0, 0.0, 0.0]] * 3))
    for dtype in (torch.float32, torch.bfloat16):
        samples = torch.randn(6, 3, 32, 32, generator=seeded(1)).to(dtype)
        assert torch.equal(crops(samples, squares), samples)


def test_squares_lie_inside():
    crops = SharedCrops(0.5, (0.4, 0.8))
    squares = crops.draw(4000, seeded(0))
    side = squares[:, 0]
    cropped = side < 1
    assert abs(cropped.double().mean() - 0.5) < 0.04
    assert side[cropped].min() >= 0.4
    assert side[cropped].max() <= 0.8
    assert squares[:, 1:].min() >= 0
    assert (squares[:, 1:] + side[:, None]).max() <= 1 + 1e-6
    # The largest and smallest offsets occur: the corners of the sample are seen.
    assert (squares[cropped][:, 1:] < 0.01).any(0).all()


def test_samples_of_a_class_share_their_square():
    crops = SharedCrops(1.0, (0.5, 0.5))
    squares = crops.draw(2, seeded(0))
    sample = torch.randn(1, 3, 8, 8, generator=seeded(1))
    cropped = crops(sample.repeat(4, 1, 1, 1), squares)
    assert torch.equal(cropped[0], cropped[1])
    assert torch.equal(cropped[2], cropped[3])
    assert not torch.equal(cropped[0], cropped[2])


def test_gradient_of_a_crop():
    crops = SharedCrops(1.0, (0.5, 0.5))
    squares = crops.draw(2, seeded(0))
    samples = torch.randn(4, 1, 6, 6, generator=seeded(1), requires_grad=True)
    weight = torch.randn(4, 1, 6, 6, generator=seeded(2))
    (gradient_,) = torch.autograd.grad((crops(samples, squares) * weight).sum(), samples)
    # Crops are linear: <weight, crop(v)> = <gradient, v> for any v.
    v = torch.randn(4, 1, 6, 6, generator=seeded(3))
    torch.testing.assert_close((gradient_ * v).sum(), (crops(v, squares) * weight).sum())


def test_the_gradient_of_a_step_is_that_of_the_crops():
    task = Training(config(*CROPPED), Distributed.start("cpu"))
    inputs = task.draw(3)
    assert inputs.squares.shape == (len(inputs.positives), 3)
    assert (inputs.squares[:, 0] < 1).all()
    labels, alpha = (t.repeat_interleave(task.config.batch.generated) for t in inputs.conditions)

    def grouped(samples):
        features = task.phi.features(task.crops(samples, inputs.squares))
        return {name: value.unflatten(0, (len(inputs.positives), -1)) for name, value in features.items()}

    generated = grouped(task.generator(inputs.noise, labels, alpha))
    with torch.no_grad():
        positives, unconditional = (
            grouped(t.flatten(0, 1)) for t in (inputs.positives, inputs.unconditional)
        )
    loss = dg.DriftingLoss(**task.config.loss.model_dump())
    out = loss(generated, positives, unconditional, negative_weight=inputs.unconditional_weight)
    expected = torch.autograd.grad(out.loss, list(task.generator.parameters()))
    for found, wanted in zip(gradient(task), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def test_micro_batches_see_the_same_crops():
    whole, parts = (
        Training(config(*CROPPED, f"batch.micro={micro}"), Distributed.start("cpu")) for micro in (1, 2)
    )
    for found, wanted in zip(gradient(parts), gradient(whole), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_crops_change_no_other_draw():
    tasks = [Training(config(*changes), Distributed.start("cpu")) for changes in ([], CROPPED)]
    plain, cropped = (task.draw(2) for task in tasks)
    assert plain.squares is None
    assert cropped.squares is not None
    for one, other in zip(tree_leaves(plain), tree_leaves(cropped._replace(squares=None)), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_run_resumes_to_the_bit(tmp_path):
    run(tmp_path / "whole", *CROPPED, "optim.steps=4")
    run(tmp_path / "parts", *CROPPED, "optim.steps=2", "output.checkpoint_every=2")
    run(tmp_path / "parts", *CROPPED, "optim.steps=4", override=True)
    for name, tensor in final(tmp_path / "whole").items():
        assert torch.equal(tensor, final(tmp_path / "parts")[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["crops.share=0.5", "cache_features=true"], "set cache_features=false"),
        (["crops.share=0.5", "tokenizer={}"], "not latents"),
        (["crops.share=0.5", "data={kind: latents, path: x}"], "not latents"),
        (["crops.scale=[0.9, 0.5]"], "the first number must not be above"),
        (["crops.share=2"], "crops.share"),
        (["crops.scale=[0, 1]"], "crops.scale"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(InputError, match=message):
        config(*changes)
