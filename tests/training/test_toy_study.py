import json

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.data.toy import DISTRIBUTIONS, from_points, get_toy, load_points
from driftgen.evaluation.points import energy_distance, mode_shares
from driftgen.report.toy_files import study_table, write_evolution, write_study
from driftgen.training.toy_study import ANTISYMMETRY, INITS, ToyConfig, antisymmetry_study, evolve


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


# --- distributions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    toy = get_toy(name)
    points = toy.sample(4000, rng())
    assert points.shape == (4000, 2)
    assert torch.equal(points, toy.sample(4000, rng()))
    assert not torch.equal(points, toy.sample(4000, rng(1)))
    assert points.abs().max() < 3
    assert abs(energy_distance(points, toy.fresh(4000, rng(2)))) < 0.01
    if toy.modes is not None:
        shares = mode_shares(points, toy.modes)
        assert min(shares) > 0.85
        assert sum(shares) == pytest.approx(len(toy.modes))


def test_checkerboard_fills_its_cells_and_no_others():
    points = get_toy("checkerboard").sample(5000, rng())
    cell = (points + 2).floor().long()
    assert ((cell[:, 0] - cell[:, 1]) % 2 == 0).all()
    assert len({tuple(c) for c in cell.tolist()}) == 8


def test_points_of_a_file(tmp_path):
    points = np.random.default_rng(0).normal(size=(600, 2))
    np.save(tmp_path / "mine.npy", points)
    toy = get_toy(str(tmp_path / "mine.npy"))
    assert toy.name == "mine"
    drawn, held_out = ({tuple(p) for p in draw(3000, rng()).tolist()} for draw in (toy.sample, toy.fresh))
    assert not drawn & held_out  # judged by points that training never sees
    assert len(drawn) > 290
    assert len(held_out) > 290


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 3)), "points must have shape [n, 2]"),
        (np.zeros(5), "points must have shape [n, 2]"),
        (np.zeros((1, 2)), "holds 1 point(s)"),
        (np.array([[0, np.nan]] * 5), "NaN or infinite values in 5 of 5 points"),
        (np.ones((9, 2)), "9 copies of one point"),
        (np.array([["a", "b"]] * 5), "does not hold an array of numbers"),
        (np.array([{"a": 1}] * 5, dtype=object), "cannot be read as an array"),
        (np.random.default_rng(0).normal(size=(9, 2)) * 1e30, "scale the points to about 1"),
        (np.random.default_rng(0).normal(size=(9, 2)) * 1e39, "scale the points to about 1"),
        (np.random.default_rng(0).normal(size=(9, 2)) * 1e-30, "scale the points to about 1"),
        (np.random.default_rng(0).normal(size=(9, 2)) + 1e7, "subtract the mean"),
    ],
)
def test_bad_points(tmp_path, array, message):
    np.save(tmp_path / "bad.npy", array, allow_pickle=True)
    with pytest.raises(dg.InputError, match=r".") as error:
        load_points(tmp_path / "bad.npy")
    assert message in str(error.value)


def test_temperature_of_points_survives_an_offset():
    points = torch.randn(200, 2, generator=rng()).double() * 0.01
    near, far = from_points(points), from_points(points + 50)
    assert far.temperature == pytest.approx(near.temperature, rel=1e-3)


# --- measures -------------------------------------------------------------------------------------------


def test_energy_distance():
    a, b = torch.randn(3000, 2, generator=rng()), torch.randn(3000, 2, generator=rng(1))
    assert abs(energy_distance(a, b)) < 5e-3
    # Two far point masses: 2·d, since nothing is within.
    far = torch.zeros(10, 2), torch.full((10, 2), 30.0)
    assert energy_distance(*far) == pytest.approx(2 * 30 * 2**0.5)


def test_mode_shares():
    modes = torch.tensor([[0.0, 0.0], [10.0, 0.0]])
    x = torch.tensor([[0.1, 0.0], [0.2, 0.0], [-0.1, 0.0], [9.0, 0.0]])
    assert mode_shares(x, modes) == [1.5, 0.5]


# --- the generator --------------------------------------------------------------------------------------


def test_mlp():
    net = dg.generators.MLP(noise_dim=32, data_dim=2)
    assert net(torch.randn(512, 32)).shape == (512, 2)
    assert torch.equal(net.sample_noise(5, rng()), net.sample_noise(5, rng()))
    net.place(torch.tensor([3.0, -1.0]), 0.2)
    x = net(net.sample_noise(4000, rng()))
    torch.testing.assert_close(x.mean(0), torch.tensor([3.0, -1.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(x.std(0), torch.full((2,), 0.2), atol=0.02, rtol=0)


def test_mlp_wrong_input():
    with pytest.raises(ValueError, match="depth=0 must be a whole number, at least 1"):
        dg.generators.MLP(depth=0)
    with pytest.raises(ValueError, match="noise has width 3, expected noise_dim=32"):
        dg.generators.MLP()(torch.randn(2, 3))
    with pytest.raises(ValueError, match="spread=0 must be positive"):
        dg.generators.MLP().place(torch.zeros(2), 0)


# --- the studies ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("init", INITS)
def test_points_reach_both_modes_from_everywhere(init):
    metrics = evolve(get_toy("bimodal"), ToyConfig(init=init)).metrics
    assert metrics["energy_distance_at_start"] > 0.5
    assert metrics["energy_distance"] < 0.01
    assert metrics["least_mode_share"] > 0.8
    assert metrics["drift_ratio"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("init", INITS)
def test_a_generator_reaches_both_modes_from_everywhere(init):
    metrics = evolve(get_toy("bimodal"), ToyConfig(init=init, generator=True, steps=500)).metrics
    assert metrics["energy_distance"] < 0.02
    assert metrics["least_mode_share"] > 0.8
    assert metrics["drift_ratio"] > 30


@pytest.mark.slow
def test_antisymmetry_wins_clearly():
    runs = antisymmetry_study(get_toy("bimodal"), ToyConfig())
    assert list(runs) == list(ANTISYMMETRY)
    distances = [run.metrics["energy_distance"] for run in runs.values()]
    assert distances[0] < 0.01
    assert min(distances[1:]) > 5 * 0.01
    assert runs["attraction only"].metrics["spread"] < 0.95  # collapses onto the modes' centers
    assert runs["2.0x repulsion"].metrics["spread"] > 1.3  # flies apart


@pytest.mark.slow
def test_a_seed_repeats_a_run():
    config = ToyConfig(generator=True, steps=5, seed=3)
    a, b = (evolve(get_toy("two-moons"), config) for _ in range(2))
    assert a.drift == b.drift
    assert torch.equal(a.frames[5], b.frames[5])
    assert evolve(get_toy("two-moons"), ToyConfig(generator=True, steps=5, seed=4)).drift != a.drift


@pytest.mark.slow
def test_a_generator_follows_the_plain_loss():
    """The recorded loss is the mean squared norm of V per coordinate, as Algorithm 1 has it."""
    toy, config = get_toy("bimodal"), ToyConfig(generator=True, steps=1)
    first = evolve(toy, config).drift[0]
    draw = rng()
    data = toy.sample(4096, draw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = dg.generators.MLP(32, 2, 128, 3)
        net.place(data.mean(0), 0.15 * float(data.std(0).norm()))
    # The same draws in the same order: shown noise, first judgement, then the step.
    net.sample_noise(1000, draw)
    net.sample_noise(4096, draw)
    net.sample_noise(8192, draw)
    toy.sample(8192, draw)
    x = net(net.sample_noise(256, draw))
    v = dg.drift_field(x, toy.sample(512, draw), temperature=toy.temperature)
    assert first == pytest.approx(float(v.square().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "colapsed"}, "did you mean 'collapsed'"),
        ({"samples": 1}, "samples=1 must be a whole number from 2 to 20000"),
        ({"positives": 0}, "positives=0 must be a whole number from 1"),
        ({"positives": 10**12}, "positives=1000000000000 must be a whole number"),
        ({"steps": 0}, "steps=0 must be a whole number from 1"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"seed": 10**20}, "seed=100000000000000000000 must be a whole number"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a positive number"),
        ({"attraction": float("nan")}, "attraction=nan"),
        ({"kernel": "cubic"}, "kernel='cubic' is not known"),
        ({"normalization": "z"}, "normalization='z' is not known"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a positive number"),
    ],
)
def test_wrong_configuration(options, message):
    with pytest.raises(dg.InputError, match=r".") as error:
        ToyConfig(**options)
    assert message in str(error.value)


# --- what is written ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_written_files(tmp_path):
    toy = from_points(torch.randn(200, 2, generator=rng()), "mine")
    evolution = evolve(toy, ToyConfig(steps=12))
    picture, animation, metrics = write_evolution(evolution, tmp_path / "out", "driftgen toy mine.npy")
    from PIL import Image

    with Image.open(picture) as image:
        assert image.width > 1000
        assert image.format == "PNG"
    with Image.open(animation) as image:
        assert image.n_frames == len(evolution.frames) > 5
    record = json.loads(metrics.read_text())
    assert record["command"] == "driftgen toy mine.npy"
    assert record["config"]["temperature"] == toy.temperature
    assert record["energy_distance"] == evolution.metrics["energy_distance"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {picture.name, animation.name, metrics.name}


def test_file_names_are_no_formulas(tmp_path):
    evolution = evolve(
        from_points(torch.randn(20, 2, generator=rng()), "cost$^$x"), ToyConfig(steps=1, samples=4)
    )
    assert write_evolution(evolution, tmp_path, "driftgen toy")[0].exists()


@pytest.mark.slow
def test_study_table(tmp_path):
    runs = antisymmetry_study(get_toy("bimodal"), ToyConfig(steps=2, samples=16, positives=16))
    lines = study_table(runs).splitlines()
    assert lines[2].startswith("| anti-symmetry (default) | V⁺ − V⁻ |")
    assert lines[4].startswith("| 1.5x repulsion | V⁺ − 1.5V⁻ |")
    assert lines[7].startswith("| attraction only | V⁺ |")
    written = write_study(runs, tmp_path, "driftgen toy")
    assert [p.name for p in written] == ["comparison.png", "table.md", "metrics.json"]
    assert set(json.loads(written[2].read_text())["runs"]) == set(ANTISYMMETRY)
