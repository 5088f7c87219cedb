"""Bodies whose check could cost far more time or memory than their size are refused cheaply."""

import json
import time
import tracemalloc

import pytest

from driftgen.serve.observation_body import parse_observation
from tests.support.helpers import fails
from tests.support.libraries import import_library

SHAPES = {"observation.state": [2]}


def state(value):
    return lambda: parse_observation({"observation.state": value}, SHAPES, 2)


def image_request(body):
    import_library("fastapi", "__doc__")
    from driftgen.serve.request_bodies import ImageRequest, RequestError, validate

    def refuse():
        with pytest.raises(RequestError) as caught:
            validate(ImageRequest, body)
        return str(caught.value)

    return refuse


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"labels": [[]] * 30_000}, "labels=[[], [], "),
        ({f"key{i}": 0 for i in range(60_000)}, "key0 is not known: give labels"),
    ],
)
def test_the_first_mistake_of_many_is_enough(body, message):
    refuse = image_request(body)
    tracemalloc.start()
    try:
        said = refuse()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said.startswith(message)
    assert peak < 10 * len(json.dumps(body))


def test_a_long_shape_is_not_multiplied():
    began = time.process_time()
    value = {"data": "", "dtype": "float32", "shape": [2**20 - 1] * 20_000}
    fails(state(value), "observation.state: shape=.* at most 8 whole numbers")
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "value", [["a" * 10_000] + [""] * 2_000, [["a" * 10_000, 1.0]] + [["", 2.0]] * 2_000]
)
def test_texts_are_not_padded_to_the_longest(value):
    tracemalloc.start()
    try:
        fails(state(value), "must be nested lists of numbers")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**21
