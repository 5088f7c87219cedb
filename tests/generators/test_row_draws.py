"""Noise drawn in several threads has the bits of noise drawn sample by sample."""

import pytest
import torch

from driftgen.generators import row_draws
from driftgen.generators.base import draw_noise
from driftgen.generators.row_draws import draw_rows


def one_by_one(n, shape, codebooks, entries, generator):
    gaussian, style = torch.empty(n, *shape), torch.empty(n, codebooks, dtype=torch.int64)
    for i in range(n):
        gaussian[i].normal_(generator=generator)
        style[i].random_(entries, generator=generator)
    return gaussian, style


@pytest.mark.parametrize("codebooks", [0, 5, 32])
@pytest.mark.parametrize("n", [1, 8, 9, 37])
def test_bits_and_state_do_not_depend_on_threads(n, codebooks, monkeypatch):
    monkeypatch.setattr(row_draws, "LEAST", 0)
    ours, other = (torch.Generator().manual_seed(11) for _ in range(2))
    torch.randn(3, generator=ours), torch.randn(3, generator=other)  # in the middle of the stream
    want = one_by_one(n, (4, 8, 8), codebooks, 64, other)
    got = torch.empty(n, 4, 8, 8), torch.empty(n, codebooks, dtype=torch.int64)
    used = []
    real = row_draws._draw_in_threads
    monkeypatch.setattr(row_draws, "_draw_in_threads", lambda *a: used.append(real(*a)) or used[-1])
    draw_rows(*got, 64, ours, threads=3)
    assert used == [True]
    assert all(map(torch.equal, got, want))
    assert torch.equal(ours.get_state(), other.get_state())
    assert torch.equal(torch.randn(20, generator=ours), torch.randn(20, generator=other))


def test_threads_fill_the_tensors_of_inference_mode(monkeypatch):
    monkeypatch.setattr(row_draws, "LEAST", 0)
    ours, other = (torch.Generator().manual_seed(11) for _ in range(2))
    with torch.inference_mode():
        got = torch.empty(37, 4, 8, 8), torch.empty(37, 5, dtype=torch.int64)
        draw_rows(*got, 64, ours, threads=3)
    assert all(map(torch.equal, got, one_by_one(37, (4, 8, 8), 5, 64, other)))


def test_samples_of_an_odd_size_are_drawn_in_one_thread(monkeypatch):
    """PyTorch takes more numbers of the stream for them."""
    monkeypatch.setattr(row_draws, "LEAST", 0)
    monkeypatch.setattr(row_draws, "_draw_in_threads", None)
    ours, other = (torch.Generator().manual_seed(11) for _ in range(2))
    want = one_by_one(9, (3, 5, 5), 2, 64, other)
    got = torch.empty(9, 3, 5, 5), torch.empty(9, 2, dtype=torch.int64)
    draw_rows(*got, 64, ours, threads=3)
    assert all(map(torch.equal, got, want))


def test_a_wrong_guess_about_the_stream_is_noticed(monkeypatch):
    monkeypatch.setattr(row_draws, "LEAST", 0)
    monkeypatch.setattr(row_draws, "BLOCK", 1)  # odd sizes pass as regular ones, and take more numbers
    ours, other = (torch.Generator().manual_seed(11) for _ in range(2))
    want = one_by_one(20, (3, 5, 5), 2, 64, other)
    got = torch.empty(20, 3, 5, 5), torch.empty(20, 2, dtype=torch.int64)
    draw_rows(*got, 64, ours, threads=3)
    assert all(map(torch.equal, got, want))
    assert torch.equal(ours.get_state(), other.get_state())


def test_noise_of_a_generator_uses_them(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    sizes = (64, (4, 32, 32), 32, 64)
    assert row_draws.LEAST <= 64 * 4 * 32 * 32
    noise = draw_noise(*sizes, torch.Generator().manual_seed(3), torch.device("cpu"))
    want = one_by_one(*sizes, torch.Generator().manual_seed(3))
    assert all(map(torch.equal, noise, want))
