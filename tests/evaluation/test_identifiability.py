"""Interaction vectors of the appendix against double sums, closed forms and the field itself."""

import itertools
import json
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import driftgen as dg
from driftgen.evaluation.identifiability import (
    Basis,
    driftless_mixture,
    equilibrium_directions,
    field_of_pairs,
    field_operator,
    gaussian_basis,
    interaction_vectors,
    mixture_distance,
    numerical_rank,
    pair_coefficients,
    pair_matrix,
    point_basis,
    relative_singular_values,
)

ROOT = Path(__file__).parents[2]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(m, seed):
    return normal(m, seed=seed).softmax(dim=0)


def literal_vectors(probes, basis, temperature):
    """U_ij by the double sum of its definition, Laplace kernel, one term at a time."""
    m, s, dim = basis.points.shape
    out = torch.zeros(m, m, len(probes), dim, dtype=torch.float64)
    for (i, j), (k, x) in itertools.product(
        itertools.product(range(m), repeat=2), enumerate(probes.unbind())
    ):
        for u, v in itertools.product(range(s), repeat=2):
            plus, minus = basis.points[i, u], basis.points[j, v]
            near = torch.exp(-(x - plus).norm() / temperature) * torch.exp(-(x - minus).norm() / temperature)
            out[i, j, k] += near * (plus - minus) * basis.weights[i, u] * basis.weights[j, v]
    return out


def test_vectors_are_the_double_integral():
    probes, basis = normal(3, 2), gaussian_basis(normal(3, 2, seed=1), width=0.4, order=2)
    vectors = interaction_vectors(probes, basis, temperature=0.7)
    torch.testing.assert_close(vectors, literal_vectors(probes, basis, 0.7), rtol=1e-13, atol=1e-14)


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(2, 6),
    dim=st.integers(1, 3),
    kernel=st.sampled_from(["laplace", "gaussian", "inverse_multiquadric"]),
    seed=st.integers(0, 999),
)
def test_vectors_are_antisymmetric(m, dim, kernel, seed):
    basis = gaussian_basis(normal(m, dim, seed=seed), width=0.3, order=3)
    vectors = interaction_vectors(normal(7, dim, seed=seed + 1), basis, temperature=0.8, kernel=kernel)
    assert vectors.dtype == torch.float64
    assert vectors.abs().max() > 1e-9  # far from all centers they are small, but not zero
    assert torch.equal(vectors, -vectors.transpose(0, 1))
    assert not vectors.diagonal(dim1=0, dim2=1).any()


def test_a_gaussian_basis_under_a_gaussian_kernel_has_a_closed_form():
    """z_i = (τ²/v)^(D/2) exp(−|x − c|²/2v) and s_i = z_i (c − x) τ²/v, with v = τ² + width²."""
    tau, width = 0.9, 0.5
    probes, centers = normal(20, 2), normal(4, 2, seed=1)
    variance = tau**2 + width**2
    gap = centers[:, None] - probes[None]
    z = tau**2 / variance * torch.exp(-gap.square().sum(-1) / (2 * variance))
    mean = gap * tau**2 / variance
    exact = z[:, None, :, None] * z[None, :, :, None] * (mean[:, None] - mean[None])
    basis = gaussian_basis(centers, width, order=30)
    found = interaction_vectors(probes, basis, temperature=tau, kernel="gaussian")
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", ["laplace", "gaussian"])
def test_the_sum_over_pairs_is_the_drifting_field(kernel):
    """V_X against drift_field on the same weighted samples; without normalization it is the numerator."""
    probes, basis = normal(40, 2), gaussian_basis(normal(5, 2, seed=1), width=0.3, order=3)
    a, b = mixture(5, 2), mixture(5, 3)
    samples = basis.points.flatten(0, 1).float()
    weights = [(c[:, None] * basis.weights).flatten().float() for c in (a, b)]
    field = dg.drift_field(
        probes.float(),
        samples,
        samples,
        temperature=0.6,
        kernel=kernel,
        normalization="none",
        positive_weight=weights[0],
        negative_weight=weights[1],
        self_mask=False,
    )
    vectors = interaction_vectors(probes, basis, temperature=0.6, kernel=kernel)
    found = field_of_pairs(vectors, a, b)
    torch.testing.assert_close(found.float(), field, rtol=1e-4, atol=1e-6 * float(found.abs().max()))
    # The same as the sum over all i, j, and as the linear map of b.
    whole = torch.einsum("i,j,ijnd->nd", a, b, vectors)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close((field_operator(vectors, a) @ b).reshape(-1, 2), whole, rtol=1e-12, atol=1e-15)


def test_equal_mixtures_have_no_field_and_exchanged_ones_the_opposite():
    vectors = interaction_vectors(normal(30, 2), gaussian_basis(normal(5, 2, seed=1), 0.3), temperature=0.6)
    a, b = mixture(5, 2), mixture(5, 3)
    assert not field_of_pairs(vectors, a, a).any()
    assert not pair_coefficients(a, a).any()
    assert torch.equal(field_of_pairs(vectors, a, b), -field_of_pairs(vectors, b, a))
    assert field_of_pairs(vectors, a, b).abs().max() > 1e-3


def test_generic_vectors_are_independent_and_identify_q():
    """15 independent vectors: the coefficients of the pairs, hence b, follow from the field."""
    m = 6
    vectors = interaction_vectors(
        normal(60, 2), gaussian_basis(1.5 * normal(m, 2, seed=1), 0.4), temperature=0.5
    )
    matrix = pair_matrix(vectors)
    assert matrix.shape == (120, 15)
    assert numerical_rank(matrix) == 15
    a, b = mixture(m, 2), mixture(m, 3)
    field = field_of_pairs(vectors, a, b).flatten()
    found = torch.linalg.lstsq(matrix, field[:, None]).solution[:, 0]
    first, second = torch.triu_indices(m, m, offset=1)
    torch.testing.assert_close(found, pair_coefficients(a, b)[first, second], rtol=1e-6, atol=1e-9)
    # a ∧ b determines the span of a and b; with p known and mass 1, a zero field leaves b = a alone.
    assert equilibrium_directions(vectors, a).shape == (0, m)
    assert driftless_mixture(vectors, a) is None
    rows = torch.cat([field_operator(vectors, a), torch.ones(1, m, dtype=torch.float64)])
    zero_field = torch.cat([torch.zeros(120, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
    torch.testing.assert_close(torch.linalg.lstsq(rows, zero_field[:, None]).solution[:, 0], a)


@pytest.mark.parametrize("probes", [1, 2])
def test_too_few_probes_leave_a_q_without_drift(probes):
    """D·N < m − 1 equations cannot determine q: the null space gives q ≠ p with zero field."""
    m, dim = 6, 2
    basis = gaussian_basis(normal(m, dim, seed=1), 0.4)
    vectors = interaction_vectors(normal(probes, dim), basis, temperature=0.6)
    assert numerical_rank(pair_matrix(vectors)) == dim * probes < m - 1
    a = torch.full((m,), 1 / m, dtype=torch.float64)
    assert len(equilibrium_directions(vectors, a)) == m - 1 - dim * probes
    b = driftless_mixture(vectors, a)
    assert_density(b)
    assert mixture_distance(basis, a, b) > 0.03
    assert field_of_pairs(vectors, a, b).abs().max() < 1e-15
    assert pair_coefficients(a, b).abs().max() > 0.01
    # More probes see the difference.
    more = interaction_vectors(normal(50, dim, seed=7), basis, temperature=0.6)
    assert field_of_pairs(more, a, b).abs().max() > 1e-4


def test_few_probes_identify_q_though_the_vectors_are_dependent():
    """Independence is sufficient, not necessary: m − 1 equations determine q for one p."""
    m = 6
    vectors = interaction_vectors(normal(3, 2), gaussian_basis(normal(m, 2, seed=1), 0.4), temperature=0.6)
    assert numerical_rank(pair_matrix(vectors)) == 6 < m * (m - 1) // 2
    assert numerical_rank(field_operator(vectors, mixture(m, 2))) == m - 1
    assert driftless_mixture(vectors, mixture(m, 2)) is None


def test_a_duplicated_basis_function_leaves_the_coefficients_open_but_not_p():
    centers = normal(4, 2, seed=1)
    basis = gaussian_basis(torch.cat([centers, centers[:1]]), 0.4)
    vectors = interaction_vectors(normal(60, 2), basis, temperature=0.6)
    assert not vectors[0, 4].any()
    # U_04 = 0 and U_0j = U_4j: 4 of 10 columns depend on others.
    assert numerical_rank(pair_matrix(vectors)) == 6
    a = mixture(5, 2)
    (direction,) = equilibrium_directions(vectors, a)
    expected = torch.tensor([1, 0, 0, 0, -1], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(direction * direction[0].sign(), expected, rtol=0, atol=1e-9)
    b = driftless_mixture(vectors, a)
    assert (a - b).abs().max() > 0.01
    assert mixture_distance(basis, a, b) < 1e-8  # the same density, written in another way
    assert field_of_pairs(vectors, a, b).abs().max() < 1e-14


def test_probes_with_identical_constraints_add_no_rank():
    basis = gaussian_basis(normal(5, 2, seed=1), 0.4)
    one = interaction_vectors(normal(1, 2), basis, temperature=0.6)
    many = interaction_vectors(normal(1, 2).expand(100, 2), basis, temperature=0.6)
    assert numerical_rank(pair_matrix(one)) == numerical_rank(pair_matrix(many)) == 2


def test_probes_equidistant_from_every_point_see_the_mean_alone():
    """Point masses on a circle, any number of probes on its axis: V = 0 as soon as the means agree."""
    angle = torch.arange(6, dtype=torch.float64) * torch.pi / 3
    points = torch.stack([angle.cos(), angle.sin(), torch.zeros(6)], dim=1)
    probes = torch.zeros(200, 3, dtype=torch.float64)
    probes[:, 2] = torch.linspace(-3, 3, 200)
    vectors = interaction_vectors(probes, point_basis(points), temperature=0.5)
    assert numerical_rank(pair_matrix(vectors)) == 2
    a = torch.tensor([1.0, 0, 1, 0, 1, 0], dtype=torch.float64) / 3
    b = torch.tensor([0.0, 1, 0, 1, 0, 1], dtype=torch.float64) / 3
    assert field_of_pairs(vectors, a, b).abs().max() < 1e-16
    uniform = torch.full((6,), 1 / 6, dtype=torch.float64)
    found = driftless_mixture(vectors, uniform)
    assert_density(found)
    torch.testing.assert_close(found @ points, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (found - uniform).abs().max() > 0.01


def test_a_constant_kernel_sees_the_mean_alone():
    basis = gaussian_basis(normal(6, 2, seed=1), 0.4)
    vectors = interaction_vectors(
        normal(60, 2), basis, temperature=1.0, kernel=lambda distance, _: 0 * distance
    )
    assert numerical_rank(pair_matrix(vectors)) == 2


def test_equal_midpoints_make_gaussian_vectors_dependent_yet_identify_q():
    """k(x, y) k(x, y') depends on x through the midpoint of y and y': m equidistant points have 2m − 3."""
    m = 7
    points = torch.arange(m, dtype=torch.float64)[:, None]
    probes = torch.linspace(-1, m, 400, dtype=torch.float64)[:, None]
    vectors = interaction_vectors(probes, point_basis(points), temperature=0.8, kernel="gaussian")
    assert numerical_rank(pair_matrix(vectors)) == 2 * m - 3 < m * (m - 1) // 2
    # The Gaussian field is τ² ∇ log (k∗p) − τ² ∇ log (k∗q), so it still identifies q.
    assert driftless_mixture(vectors, mixture(m, 2)) is None


def test_singular_values_count_missing_rows_and_zero_columns():
    matrix = torch.tensor([[3.0, 0, 0, 1e-20], [0, 1e-3, 0, 0]], dtype=torch.float64)
    assert relative_singular_values(matrix).tolist() == [1, 1, 0, 0]
    assert numerical_rank(matrix) == 2
    assert relative_singular_values(torch.zeros(4, 3, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_bad_input_is_named():
    basis = point_basis(normal(3, 2))
    with pytest.raises(dg.InputError, match="probes have width 3, but the basis has width 2"):
        interaction_vectors(normal(4, 3), basis, temperature=1.0)
    with pytest.raises(dg.InputError, match="temperature"):
        interaction_vectors(normal(4, 2), basis, temperature=0.0)
    with pytest.raises(dg.InputError, match="centers has shape"):
        gaussian_basis(normal(4), width=1.0)
    with pytest.raises(dg.InputError, match="width=0"):
        gaussian_basis(normal(4, 2), width=0)
    with pytest.raises(dg.InputError, match="not positive"):
        driftless_mixture(
            interaction_vectors(normal(1, 2), basis, temperature=1.0), torch.tensor([1.0, 0, 0]).double()
        )


def assert_density(b):
    assert (b >= 0).all()
    assert float(b.sum()) == pytest.approx(1, abs=1e-12)


def test_a_basis_of_points_has_mass_one():
    basis = gaussian_basis(normal(3, 2), width=0.5, order=7)
    assert isinstance(basis, Basis)
    assert basis.points.shape == (3, 49, 2)
    torch.testing.assert_close(basis.weights.sum(dim=1), torch.ones(3, dtype=torch.float64))
    mean = (basis.weights[..., None] * basis.points).sum(dim=1)
    torch.testing.assert_close(mean, normal(3, 2))
    variance = (basis.weights[..., None] * (basis.points - mean[:, None]).square()).sum(dim=1)
    torch.testing.assert_close(variance, torch.full((3, 2), 0.25, dtype=torch.float64))


def test_the_distance_of_two_points_is_the_closed_form():
    """MMD² of δ_y and δ_y' is 2 − 2 k(y, y')."""
    basis = point_basis(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    a, b = torch.eye(2, dtype=torch.float64)
    expected = (2 - 2 * torch.exp(torch.tensor(-0.5)).double()) ** 0.5
    assert mixture_distance(basis, a, b, bandwidth=5.0) == pytest.approx(float(expected), rel=1e-6)
    assert mixture_distance(basis, a, a) == 0


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "identifiability.py"))


def test_the_example_measures_what_results_hold(example):
    measured = json.loads(json.dumps(example["measure"]()))
    recorded = json.loads((ROOT / "results/identifiability/identifiability.json").read_text())
    for key in ("basis", "temperature", "probes", "ranks", "degenerate_cases"):
        assert measured[key] == recorded[key], key
    assert measured["antisymmetry_error"] == recorded["antisymmetry_error"] == 0
    case = measured["counterexample"]
    assert case["field_at_the_two_probes"] < 1e-15 < 1e-4 < case["field_at_256_probes"]
    assert max(abs(p - q) for p, q in zip(case["p"], case["q"], strict=True)) > 0.1
    assert case["q"] == pytest.approx(recorded["counterexample"]["q"], abs=1e-9)


def test_the_example_draws_its_figure(example, tmp_path):
    figures = json.loads((ROOT / "results/identifiability/identifiability.json").read_text())
    for key in ("singular_values", "ranks"):  # JSON turns the numbers of probes and functions into text
        figures[key] = {int(name): value for name, value in figures[key].items()}
    example["draw"](figures, tmp_path / "identifiability.png")
    assert (tmp_path / "identifiability.png").stat().st_size > 100_000
