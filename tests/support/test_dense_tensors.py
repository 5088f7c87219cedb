"""Tensors of other kinds and seeds of other types: one line, at every function that takes them."""

import warnings

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.data.config import Data
from driftgen.data.in_memory import open_memory
from driftgen.data.queue import SampleQueue
from driftgen.evaluation.density_coverage import density_coverage
from driftgen.evaluation.precision_recall import precision_recall
from driftgen.generators import ImageMLP
from driftgen.support.dense_tensors import check_dense
from driftgen.support.rng import derive_generator, derive_seed

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def jagged(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=layout)


def other_kinds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield "sparse", X.to_sparse()
        yield "compressed", X.to_sparse_csr()
        yield "float8", X.to(torch.float8_e4m3fn)
        yield "float8 of gradients", X.to(torch.float8_e5m2)
        yield "quantized", torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
        yield "nested", jagged(torch.strided)
        yield "jagged", jagged(torch.jagged)


KINDS = dict(other_kinds())
LOSS = dg.DriftingLoss(temperatures=(0.2,))
CALLS = {
    "x of the field": lambda t: dg.drift_field(t, X, temperature=0.1),
    "positives of the field": lambda t: dg.drift_field(X, t, temperature=0.1),
    "negatives of the field": lambda t: dg.drift_field(X, X, t, temperature=0.1),
    "weights of the field": lambda t: dg.drift_field(X, X, temperature=0.1, positive_weight=t),
    "generated samples of the loss": lambda t: LOSS(t, X),
    "positives of the loss": lambda t: LOSS(X, t),
    "a feature of the loss": lambda t: LOSS({"a": t}, {"a": X[None, :, None]}),
    "real samples": lambda t: precision_recall(t, X, 3),
    "generated samples": lambda t: density_coverage(X, t, 3),
    "images from Python": lambda t: open_memory((t, None), Data()),
    "labels from Python": lambda t: open_memory((torch.zeros(8, 8, 8, dtype=torch.uint8), t), Data()),
    "an image of a dataset": lambda t: open_memory((t,), Data()),
    "a label of a dataset": lambda t: open_memory(({"image": np.zeros((1, 8, 8)), "label": t},), Data()),
    "samples of a queue": lambda t: SampleQueue(2, 4, (4,)).push(t, torch.zeros(8, dtype=torch.long)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_other_kinds_of_tensors_are_one_line(call, kind):
    with pytest.raises(dg.InputError) as error:
        CALLS[call](KINDS[kind])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_plain_tensors_pass(dtype):
    check_dense("x", X.to(dtype))
    check_dense("x", X.to(dtype).t())


@pytest.mark.parametrize("seed", [1.5, 1.0, float("nan"), "1", True, -1, 2**63, [1], torch.tensor(1)])
def test_seeds_that_are_no_integers_are_one_line(seed):
    net = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    with pytest.raises(dg.InputError, match=r"seed=.* must be an integer from 0"):
        dg.DriftPipeline(net)([0], seed=seed)
    if seed != 2**63:
        for function in (derive_seed, derive_generator):
            with pytest.raises(dg.InputError, match=r"seed=.* must be an integer from 0"):
                function(seed)


def test_integers_of_numpy_are_seeds():
    assert derive_seed(np.int64(5), 3) == derive_seed(5, 3)
