"""The playground computes what driftgen computes: its modules run under Node beside the library."""

import itertools

import pytest
import torch

import driftgen as dg
from driftgen.data.toy import DISTRIBUTIONS, get_toy
from driftgen.drift.kernels import KERNELS
from driftgen.drift.normalization import NORMALIZATIONS
from driftgen.evaluation.points import energy_distance, mode_shares
from driftgen.training.toy_study import _start
from tests.support.node import needs_node, run_node

pytestmark = needs_node

FACTORS = [(1, 1), (1.5, 1), (1, 2), (1, 0), (0, 1)]
SETTINGS = {
    "mover": "points", "target": "bimodal", "start": "collapsed", "kernel": "laplace",
    "normalization": "both", "temperature": 0.85,
    "step": 1, "rate": 0.004, "attraction": 1, "repulsion": 1, "fresh": False, "seed": 0,
    "strokes": [], "drops": [],
}  # fmt: skip


def clouds():
    """Points in general position; far outliers, whose kernels underflow; a single point; duplicates."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=rng), 1 + torch.randn(30, 2, generator=rng)
    far = torch.tensor([[300.0, 0.0]])
    yield "plain", x, y, 0.3
    yield "warm", x, y, 2.0
    yield "outliers", torch.cat([x, -far]), torch.cat([y, far]), 0.3
    yield "one", x[:1], y, 0.5
    yield "duplicates", torch.cat([x, x[:5]]), torch.cat([y, x[:3]]), 0.3


@pytest.fixture(scope="module")
def fields():
    cases = []
    for (name, x, y, temperature), kernel, normalization, factors in itertools.product(
        clouds(), KERNELS, NORMALIZATIONS, FACTORS
    ):
        options = {"temperature": temperature, "kernel": kernel, "normalization": normalization}
        options |= dict(zip(("attraction", "repulsion"), factors, strict=True))
        cases.append((name, x, y, options))
    code = """
      const drifts = new field.DriftField();
      return inputs.map(({ x, y, options }) =>
        drifts.compute(Float64Array.from(x), Float64Array.from(y), options));
    """
    inputs = [{"x": x.flatten().tolist(), "y": y.flatten().tolist(), "options": o} for _, x, y, o in cases]
    return list(zip(cases, run_node(code, inputs, ["field"]), strict=True))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_field_is_that_of_the_library(fields, kernel, normalization):
    compared = 0
    for (name, x, y, options), found in fields:
        if (options["kernel"], options["normalization"]) != (kernel, normalization):
            continue
        expected = dg.drift_field(x, y, **options)
        drift, *parts = (
            torch.tensor(found[part], dtype=torch.float64).view_as(x)
            for part in ("drift", "attract", "repel")
        )
        largest = expected.abs().max().clamp(min=1e-30)
        assert (drift - expected).abs().max() <= 1e-5 * largest, (name, options)
        torch.testing.assert_close(parts[0] - parts[1], drift)
        # Each arrow is the field with the other factor 0.
        only = dg.drift_field(x, y, **(options | {"repulsion": 0}))
        assert (parts[0] - only).abs().max() <= 1e-5 * only.abs().max().clamp(min=1e-30), (name, options)
        compared += 1
    assert compared == 5 * len(FACTORS)


def test_outliers_leave_a_field_to_compare():
    """The underflowing case is no comparison of zeros."""
    for name, x, y, temperature in clouds():
        for kernel, normalization in itertools.product(KERNELS, NORMALIZATIONS):
            v = dg.drift_field(x, y, temperature=temperature, kernel=kernel, normalization=normalization)
            assert (v.abs().max() > 1e-3) == (name != "one")


def test_the_toys_are_those_of_the_library():
    code = """
      const random = toys.createRandom(1);
      return Object.entries(toys.TOYS).map(([name, toy]) => {
        const { points, modes } = toys.sampleToy(name, 1500, random);
        const starts = ["between", "far", "collapsed"].map((start) => toys.startOf(start, points, toy.first));
        return { name, temperature: toy.temperature, count: toy.modes.length, points, modes, starts };
      });
    """
    found = run_node(code, None, ["toys"])
    assert [entry["name"] for entry in found] == list(DISTRIBUTIONS)
    for entry in found:
        toy = get_toy(entry["name"])
        points = torch.tensor(entry["points"]).view(-1, 2)
        assert entry["temperature"] == toy.temperature
        assert abs(energy_distance(points, toy.sample(1500))) < 0.01
        assert set(entry["modes"]) == set(range(entry["count"]))
        if toy.modes is not None:
            assert entry["count"] == len(toy.modes)
        for name, start in zip(("between", "far", "collapsed"), entry["starts"], strict=True):
            center, spread = _start(toy, name, points)
            assert start["spread"] == pytest.approx(spread, rel=1e-5)
            assert start["center"] == pytest.approx(center.tolist(), abs=1e-5)


def test_shares_and_distance_are_those_of_the_library():
    toy = get_toy("bimodal")
    x, y = toy.sample(150), toy.sample(200)
    x = x[x[:, 0].argsort()][:120]  # more of the left mode
    code = """
      const [x, points] = [inputs.x, inputs.y].map((values) => new Float64Array(values));
      const modes = Uint8Array.from({ length: points.length / 2 }, (_, i) => (points[2 * i] > 0 ? 1 : 0));
      return [toys.energyDistance(x, points), toys.modeShares(x, { points, modes }, 2)];
    """
    distance, shares = run_node(code, {"x": x.flatten().tolist(), "y": y.flatten().tolist()}, ["toys"])
    assert distance == pytest.approx(energy_distance(x, y), rel=1e-5)
    due = torch.tensor([float((y[:, 0] <= 0).float().mean()), float((y[:, 0] > 0).float().mean())])
    expected = torch.tensor(mode_shares(x, toy.modes)) / 2 / due
    assert shares == pytest.approx(expected.tolist(), rel=1e-5)
    assert shares[0] > 1.1 > 0.9 > shares[1]


def test_gradients_of_the_generator_against_finite_differences():
    code = """
      const random = toys.createRandom(3);
      const net = new mlp.MLP([2, 5, 4, 3, 2], random);
      const noise = toys.fillNormal(new Float64Array(14), random);
      const factors = toys.fillNormal(new Float64Array(14), random);
      const loss = () => net.forward(noise).reduce((sum, value, k) => sum + factors[k] * value ** 2, 0);
      net.backward(net.forward(noise).map((value, k) => 2 * factors[k] * value));
      const pairs = [];
      for (const layer of net.layers) {
        for (const name of ["weight", "bias"]) {
          const exact = layer[`${name}Gradient`].slice();
          for (let k = 0; k < exact.length; k++) {
            const kept = layer[name][k];
            layer[name][k] = kept + 1e-5;
            const above = loss();
            layer[name][k] = kept - 1e-5;
            pairs.push([exact[k], (above - loss()) / 2e-5]);
            layer[name][k] = kept;
          }
        }
      }
      return pairs;
    """
    pairs = torch.tensor(run_node(code, None, ["mlp", "toys"]), dtype=torch.float64)
    assert len(pairs) == 3 * 5 + 6 * 4 + 5 * 3 + 4 * 2
    assert pairs.abs().amax() > 1
    torch.testing.assert_close(pairs[:, 0], pairs[:, 1], rtol=1e-6, atol=1e-7)


def test_the_generator_and_its_optimizer_are_those_of_the_toy_study():
    net = dg.generators.MLP(noise_dim=2, data_dim=2, hidden=6, depth=2).double()
    noise, target = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    linears = [layer for layer in net.layers if isinstance(layer, torch.nn.Linear)]
    inputs = {
        "noise": noise.flatten().tolist(),
        "target": target.flatten().tolist(),
        "layers": [{"weight": li.weight.T.flatten().tolist(), "bias": li.bias.tolist()} for li in linears],
    }
    code = """
      const net = new mlp.MLP([2, 6, 6, 2], Math.random);
      net.layers.forEach((layer, k) => {
        layer.weight.set(inputs.layers[k].weight);
        layer.bias.set(inputs.layers[k].bias);
      });
      const adam = new mlp.Adam(net.layers);
      const noise = new Float64Array(inputs.noise);
      for (let step = 0; step < 5; step++) {
        net.backward(net.forward(noise).map((value, k) => (2 * (value - inputs.target[k])) / noise.length));
        adam.step(0.01);
      }
      return net.forward(noise);
    """
    found = torch.tensor(run_node(code, inputs, ["mlp"]), dtype=torch.float64).view(8, 2)
    adam = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.9, 0.95))
    for _ in range(5):
        adam.zero_grad()
        (net(noise) - target).square().mean().backward()
        adam.step()
    torch.testing.assert_close(found, net(noise), rtol=1e-6, atol=1e-7)


def test_links_carry_settings_and_drop_nonsense():
    code = "return inputs.map((hash) => settings.fromHash(hash));"
    defaults, odd = run_node(
        code,
        [
            "",
            "#target=square&kernel=&temperature=warm&step=-3&attraction=1e99&seed=-1&strokes=1.2.3_a.b_999999.1"
            "&constructor=1&__proto__=2&mover=points",
        ],
        ["settings"],
    )
    assert defaults == SETTINGS | {"start": "between"}
    assert odd == defaults | {"step": 0.05, "attraction": 2}
    chosen = SETTINGS | {
        "mover": "generator", "target": "drawing", "start": "hand", "kernel": "gaussian", "fresh": True,
        "normalization": "sinkhorn", "temperature": 0.123, "seed": 7, "repulsion": 0,
        "strokes": [[-1, 0.5, 1, 0.52], [0, 0]], "drops": [[2.5, -1.1]],
    }  # fmt: skip
    again = run_node("return settings.fromHash('#' + settings.toHash(inputs));", chosen, ["settings"])
    assert again == chosen


def test_drawings_are_sampled_along_their_strokes():
    code = """
      const strokes = [[-1, 0, 1, 0], [0, 2]];
      return toys.sampleStrokes(strokes, 400, toys.createRandom(0));
    """
    found = run_node(code, None, ["toys"])
    points, modes = torch.tensor(found["points"]).view(-1, 2), torch.tensor(found["modes"])
    line, dot = points[modes == 0], points[modes == 1]
    assert 0.75 < len(line) / 400 < 0.9  # by length: 2.5 against 0.5
    assert line[:, 0].min() < -0.9 < 0.9 < line[:, 0].max()
    assert line[:, 1].abs().max() < 0.3
    assert (dot - torch.tensor([0.0, 2.0])).norm(dim=1).max() < 0.3
    assert run_node("return toys.sampleStrokes([], 9, Math.random).points;", None, ["toys"]) == []


RUN = """
  return inputs.map(([settings, steps]) => {
    const run = engine.createRun(settings);
    for (let step = 0; step < steps; step++) run.step();
    const { x, losses } = run.report(false);
    return { distance: toys.energyDistance(x, run.target.points), losses };
  });
"""


@pytest.mark.slow
def test_points_reach_the_data_only_if_the_field_is_antisymmetric():
    broken = SETTINGS | {"repulsion": 0}
    found, pulled = run_node(RUN, [[SETTINGS, 100], [broken, 100]], ["engine", "toys"])
    assert found["losses"][-1] < 1e-3 * found["losses"][0]
    assert abs(found["distance"]) < 0.01
    assert pulled["distance"] > 0.05


@pytest.mark.slow
def test_the_generator_learns_both_modes_from_a_collapsed_start():
    (found,) = run_node(RUN, [[SETTINGS | {"mover": "generator"}, 400]], ["engine", "toys"])
    assert found["distance"] < 0.05
    assert found["losses"][-1] < 0.2 * found["losses"][0]
