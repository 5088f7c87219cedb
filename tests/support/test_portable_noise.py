"""Noise that other languages reproduce: the generator, its distributions, and the twin in JavaScript."""

import hashlib
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import driftgen
from driftgen.support.portable_noise import NAME, philox, portable_noise
from tests.support.helpers import fails

TWIN = Path(driftgen.__file__).parent / "studio" / "portable_noise.mjs"
LAYOUT = [
    {"input": "noise", "shape": [3, 5, 5], "distribution": "normal"},
    {"input": "style", "shape": [3], "distribution": "integers", "entries": 64},
]
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


# Known answers of the authors' library, Random123.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox(counter, key)) == words


def test_normals_are_those_of_box_muller_and_fill_the_layout():
    noise = portable_noise(LAYOUT, 2, seed=7, first=3)
    assert {name: (x.shape, x.dtype) for name, x in noise.items()} == {
        "noise": ((2, 3, 5, 5), np.float32),
        "style": ((2, 3), np.int64),
    }
    flat = noise["noise"].reshape(2, -1)
    for sample in range(2):
        for start in (0, 4, 72):
            words = [int(w) for w in philox((start // 4, 0, 3 + sample, 0), 7)]
            for j in range(min(4, 75 - start)):
                w, v = words[j & 2], words[(j & 2) + 1]
                wave = math.sin if j & 1 else math.cos
                exact = math.sqrt(-2 * math.log((w + 0.5) / 2**32)) * wave(2 * math.pi * v / 2**32)
                assert flat[sample, start + j] == pytest.approx(exact, rel=1e-6, abs=1e-7)
        words = philox((0, 1, 3 + sample, 0), 7)
        assert noise["style"][sample].tolist() == [int(w) * 64 // 2**32 for w in words[:3]]


def test_the_extreme_words_are_finite():
    from driftgen.support.portable_noise import _cos_sin, _log

    words = np.array([0, 1, 2**29, 2**30, 2**31 - 1, 2**31, 2**32 - 2**29, 2**32 - 1], np.uint64)
    exact = [math.log((int(w) + 0.5) / 2**32) for w in words]
    np.testing.assert_allclose(_log(words), exact, rtol=1e-15)
    angles = [2 * math.pi * int(w) / 2**32 for w in words]
    np.testing.assert_allclose(_cos_sin(words)[0], np.cos(angles), rtol=0, atol=5e-16)
    np.testing.assert_allclose(_cos_sin(words)[1], np.sin(angles), rtol=0, atol=5e-16)


def test_samples_do_not_depend_on_the_batch():
    whole = portable_noise(LAYOUT, 5, seed=1)
    part = portable_noise(LAYOUT, 2, seed=1, first=3)
    assert all(np.array_equal(whole[name][3:], part[name]) for name in whole)
    assert not np.array_equal(whole["noise"], portable_noise(LAYOUT, 5, seed=2)["noise"])


def test_the_distributions_are_right():
    noise = portable_noise([LAYOUT[0], {**LAYOUT[1], "entries": 5}], 2000, seed=0)
    values = noise["noise"].ravel().astype(np.float64)  # 150,000
    moments = [np.mean(values**k) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.06)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    counts = np.bincount(noise["style"].ravel(), minlength=5)
    assert len(counts) == 5
    assert np.abs(counts / counts.sum() - 0.2).max() < 0.02


def test_a_seed_gives_these_bits_on_every_machine():
    noise = portable_noise(LAYOUT, 4, seed=2**40 + 5)
    digest = hashlib.sha256(noise["noise"].tobytes() + noise["style"].tobytes()).hexdigest()
    assert digest[:16] == "7f94aaec318d8da2"


def test_wrong_arguments_are_one_line():
    fails(lambda: portable_noise(LAYOUT, 1, seed=-1), "seed=-1 must be an integer from 0")
    fails(lambda: portable_noise(LAYOUT, 1, seed=2**53), "seed=.* must be an integer from 0")
    fails(lambda: portable_noise(LAYOUT, -1, seed=0), "n=-1")
    odd = [{"input": "noise", "shape": [2], "distribution": "cauchy"}]
    fails(lambda: portable_noise(odd, 1, seed=0), "distribution='cauchy' is not known")
    fails(lambda: portable_noise([{**LAYOUT[1], "entries": 2**21}], 1, seed=0), "entries=2097152 is above")


SCRIPT = """
import {{ NAME, portableNoise }} from {twin};
const answers = {cases}.map(([n, seed, first]) => {{
  const noise = portableNoise({layout}, n, seed, first);
  const bits = new Uint32Array(noise.noise.data.buffer);
  return [noise.noise.dims, Array.from(bits), Array.from(noise.style.data, Number)];
}});
console.log(JSON.stringify([NAME, answers]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node, which runs the page's module")
def test_the_twin_in_javascript_gives_the_same_bits():
    cases = [(300, 0, 0), (2, 7, 3), (1, 2**53 - 2, 0), (3, 2**32 + 1, 2**32 - 1)]
    code = SCRIPT.format(twin=json.dumps(TWIN.as_uri()), cases=json.dumps(cases), layout=json.dumps(LAYOUT))
    words = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name, answers = json.loads(done.stdout)
    assert name == NAME
    for (n, seed, first), (dims, bits, style) in zip(cases, answers, strict=True):
        noise = portable_noise(LAYOUT, n, seed, first)
        assert dims == [n, 3, 5, 5]
        assert np.array_equal(np.array(bits, np.uint32), noise["noise"].view(np.uint32).ravel())
        assert style == noise["style"].ravel().tolist()
