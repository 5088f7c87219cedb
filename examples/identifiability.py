"""The appendix's identifiability argument in numbers: python examples/identifiability.py [FOLDER]

Writes identifiability.png and identifiability.json to FOLDER (runs/identifiability by default), in seconds.
"""

import json
import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from driftgen.evaluation.identifiability import (
    driftless_mixture,
    field_of_pairs,
    field_operator,
    gaussian_basis,
    interaction_vectors,
    mixture_distance,
    numerical_rank,
    pair_matrix,
    point_basis,
    relative_singular_values,
)
from driftgen.report.figures import DATA_COLOR, GENERATED_COLOR, INK, STYLE
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.provenance import provenance

WIDTH, TEMPERATURE, BOX = 0.35, 0.5, 2.2
CENTERS = torch.tensor(
    [[-1.3, 0.9], [0.1, 1.4], [1.4, 0.5], [0.9, -1.1], [-0.6, -1.3], [-1.5, -0.3]], dtype=torch.float64
)
SIZES = (6, 8, 10)
PROBES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 256]
# Numbers of probes in panel c, each with the place of its label.
SHOWN = {2: (4.0, 1e-5), 4: (8.0, 1e-5), 6: (12.0, 1e-5), 8: (15.2, 6e-4), 64: (15.2, 0.35)}
SEEN = torch.tensor([[-0.55, 0.25], [0.65, -0.15]], dtype=torch.float64)
TEMPERATURES = torch.logspace(-1.3, 3, 44).tolist()
KERNELS = {"laplace": DATA_COLOR, "gaussian": GENERATED_COLOR}


def uniform(n, dim=2, seed=0):
    """Probes drawn from the square of the figure. The first n of a seed are the same for every n."""
    draws = torch.rand(512, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * draws[:n] - 1) * BOX


def ring(m):
    """m centers on a distorted ring."""
    angle = 2 * torch.pi * torch.arange(m) / m
    radius = 1.2 + 0.4 * torch.sin(3 * angle + 1)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).double()


def measure():
    """Return the figures of the JSON file."""
    basis = gaussian_basis(CENTERS, WIDTH)
    vectors = interaction_vectors(uniform(256), basis, temperature=TEMPERATURE)
    p = torch.full((6,), 1 / 6, dtype=torch.float64)
    spectra = {n: relative_singular_values(pair_matrix(vectors[:, :, :n])).tolist() for n in PROBES}
    ranks = {}
    for m in SIZES:
        many = interaction_vectors(uniform(256), gaussian_basis(ring(m), WIDTH), temperature=TEMPERATURE)
        equal = torch.full((m,), 1 / m, dtype=torch.float64)
        ranks[m] = {
            "pairs": [numerical_rank(pair_matrix(many[:, :, :n])) for n in PROBES],
            "given_p": [numerical_rank(field_operator(many[:, :, :n], equal)) for n in PROBES],
        }
    weakest = {
        kernel: smallest_values(
            [
                pair_matrix(interaction_vectors(uniform(256), basis, temperature=t, kernel=kernel))
                for t in TEMPERATURES
            ]
        )
        for kernel in KERNELS
    }
    few = interaction_vectors(SEEN, basis, temperature=TEMPERATURE)
    q = driftless_mixture(few, p)
    return {
        "basis": {"functions": 6, "dimension": 2, "width": WIDTH, "centers": CENTERS.tolist()},
        "kernel": "laplace",
        "temperature": TEMPERATURE,
        "antisymmetry_error": float((vectors + vectors.transpose(0, 1)).abs().max()),
        "largest_entry": float(vectors.abs().max()),
        "probes": PROBES,
        "singular_values": spectra,
        "ranks": ranks,
        "temperatures": TEMPERATURES,
        "weakest_singular_value": weakest,
        "degenerate_cases": degenerate_cases(),
        "counterexample": {
            "probes": SEEN.tolist(),
            "p": p.tolist(),
            "q": q.tolist(),
            "field_at_the_two_probes": float(field_of_pairs(few, p, q).abs().max()),
            "field_at_256_probes": float(field_of_pairs(vectors, p, q).abs().max()),
        },
    }


def smallest_values(matrices):
    """Return the smallest over the largest singular value, with columns scaled to norm 1 and as they are."""
    plain = [torch.linalg.svdvals(matrix) for matrix in matrices]
    return {
        "scaled": [float(relative_singular_values(matrix)[-1]) for matrix in matrices],
        "as_they_are": [float(values[-1] / values[0]) for values in plain],
    }


def degenerate_cases():
    """Return the rank for each way to fail, and whether other coefficients or another q have no drift."""
    angle = torch.arange(6).double() * torch.pi / 3
    circle = torch.stack([angle.cos(), angle.sin(), torch.zeros(6)], dim=1)
    axis = torch.zeros(256, 3).double()
    axis[:, 2] = torch.linspace(-3, 3, 256)
    line = torch.linspace(-1, 6, 256).double()[:, None]
    twice = torch.cat([CENTERS[:5], CENTERS[:1]])
    gaussians, points = gaussian_basis(CENTERS, WIDTH), point_basis(torch.arange(6.0)[:, None])
    cases = {
        "256 probes": (uniform(256), gaussians, TEMPERATURE, "laplace"),
        "2 probes": (uniform(2), gaussians, TEMPERATURE, "laplace"),
        "4 probes": (uniform(4), gaussians, TEMPERATURE, "laplace"),
        "1 probe, 256 times": (uniform(1).expand(256, 2), gaussians, TEMPERATURE, "laplace"),
        "one basis function twice": (uniform(256), gaussian_basis(twice, WIDTH), TEMPERATURE, "laplace"),
        "points on a circle, probes on its axis": (axis, point_basis(circle), TEMPERATURE, "laplace"),
        "kernel nearly constant (temperature 1e6)": (uniform(256), gaussians, 1e6, "gaussian"),
        "equidistant points on a line, Gaussian kernel": (line, points, 0.8, "gaussian"),
    }
    out = {}
    for name, (probes, basis, temperature, kernel) in cases.items():
        vectors = interaction_vectors(probes, basis, temperature=temperature, kernel=kernel)
        p = torch.full((6,), 1 / 6, dtype=torch.float64)
        q = driftless_mixture(vectors, p)
        out[name] = {
            "rank": numerical_rank(pair_matrix(vectors)),
            "pairs": 15,
            "other_equilibrium": q is not None and mixture_distance(basis, p, q) > 1e-6,
            "other_coefficients": q is not None,
        }
    return out


def draw(figures, path):
    """Draw six panels: the setting, anti-symmetry, and when linear independence holds and fails."""
    with matplotlib.rc_context(STYLE | {"font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(15.5, 10), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        panels = figure.subplots(2, 3).flatten()
        for panel, (title, part) in zip(panels, PANELS.items(), strict=True):
            panel.set_title(title, fontweight="bold", pad=10)
            part(panel, figures)
        with atomic_write(path) as scratch:
            figure.savefig(scratch, dpi=110, facecolor="white")


def setting(axes, figures):
    grid, density = densities(torch.eye(6).double())
    shades = LinearSegmentedColormap.from_list("", ["white", DATA_COLOR])
    axes.contourf(*grid, density.amax(dim=0), levels=25, cmap=shades, vmax=1.6 * float(density.max()))
    for i, center in enumerate(CENTERS):
        axes.text(*center, f"φ$_{i + 1}$", ha="center", va="center", fontsize=16, color=INK, zorder=5)
    probes = lattice(12)
    vectors = interaction_vectors(probes, gaussian_basis(CENTERS, WIDTH), temperature=TEMPERATURE)
    axes.plot(*probes.T, "o", color="#999999", markersize=2.5)
    arrows(axes, probes, vectors[0, 1], GENERATED_COLOR)
    square(axes)


def antisymmetry(axes, figures):
    probe = torch.tensor([[0.2, 0.1]]).double()
    vectors = interaction_vectors(probe, gaussian_basis(CENTERS, WIDTH), temperature=TEMPERATURE)[:, :, 0]
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    for i in range(6):
        for j in range(6):
            if i == j:
                axes.plot(j, i, "o", color="#bbbbbb", markersize=6)
                continue
            x, y = 0.36 * unit[i, j]
            style = {"arrowstyle": "-|>", "linewidth": 2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13}
            style["color"] = DATA_COLOR if i < j else GENERATED_COLOR
            axes.annotate("", (j + x, i - y), (j - x, i + y), arrowprops=style)
    axes.set(xlim=(-0.6, 5.6), ylim=(5.6, -0.6), aspect="equal", xlabel="j", ylabel="i")
    axes.set_xticks(range(6), range(1, 7))
    axes.set_yticks(range(6), range(1, 7))
    axes.tick_params(length=0)
    axes.set_xticks([k + 0.5 for k in range(5)], minor=True)
    axes.set_yticks([k + 0.5 for k in range(5)], minor=True)
    axes.grid(which="minor", color="#e6e6e6")
    axes.tick_params(which="minor", length=0)


def spectra(axes, figures):
    shades = matplotlib.colormaps["viridis_r"]
    for rank, (n, place) in enumerate(SHOWN.items()):
        values = [max(v, 3e-17) for v in figures["singular_values"][n]]
        color = shades(0.2 + 0.75 * rank / (len(SHOWN) - 1))
        axes.semilogy(range(1, 16), values, "o-", color=color, markersize=5, linewidth=2)
        axes.text(*place, f"{n} probes", color=color, ha="right", fontweight="bold")
    zero_band(axes, 1)
    axes.set(xlabel="index", ylabel="singular value / largest", xticks=range(1, 16, 2))


def ranks(axes, figures):
    for m, color in zip(SIZES, ("#3a9d6e", DATA_COLOR, GENERATED_COLOR), strict=True):
        rows = figures["ranks"][m]
        axes.semilogx(PROBES, rows["pairs"], "o-", base=2, color=color, markersize=5, linewidth=2)
        axes.semilogx(PROBES, rows["given_p"], "s--", base=2, color=color, markersize=4, linewidth=1.2)
        axes.text(300, rows["pairs"][-1], f"{m * (m - 1) // 2}", color=color, va="center")
        axes.text(300, rows["given_p"][-1], f"{m - 1}", color=color, va="center")
        axes.text(256, rows["pairs"][-1] + 1.2, f"m = {m}", color=color, ha="right", fontweight="bold")
    axes.plot([], [], "o-", color="#888888", label="all pairs")
    axes.plot([], [], "s--", color="#888888", label="for one p")
    axes.set(xlabel="probes N (two equations each)", ylabel="rank", ylim=(0, 50))
    axes.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    axes.legend(loc="upper left", fontsize=11)
    axes.grid(visible=True, color="#e6e6e6")


def temperatures(axes, figures):
    for kernel, color in KERNELS.items():
        for scaled, style in (("scaled", "-"), ("as_they_are", "--")):
            values = [max(v, 3e-17) for v in figures["weakest_singular_value"][kernel][scaled]]
            axes.loglog(
                figures["temperatures"], values, style, color=color, linewidth=2.5 if style == "-" else 1.5
            )
        axes.plot([], [], color=color, linewidth=2.5, label=f"{kernel.capitalize()} kernel")
    axes.plot([], [], "--", color="#888888", label="vectors not scaled to norm 1")
    zero_band(axes, TEMPERATURES[0])
    axes.set(xlabel="temperature τ", ylabel="smallest singular value / largest", ylim=(1e-17, 1e3))
    axes.legend(loc="upper right", fontsize=11)


def counterexample(axes, figures):
    case = figures["counterexample"]
    p, q = (torch.tensor(case[name]).double() for name in "pq")
    grid, (difference,) = densities((q - p)[None])
    shades = LinearSegmentedColormap.from_list("", [DATA_COLOR, "white", GENERATED_COLOR])
    most = float(difference.abs().max())
    axes.contourf(*grid, difference, levels=31, cmap=shades, vmin=-1.6 * most, vmax=1.6 * most)
    probes, seen = lattice(16), torch.tensor(case["probes"])
    vectors = interaction_vectors(probes, gaussian_basis(CENTERS, WIDTH), temperature=TEMPERATURE)
    arrows(axes, probes, field_of_pairs(vectors, p, q), "#555555")
    axes.plot(
        *seen.T, "*", color="#c81d4e", markersize=20, markeredgecolor="white", label="probe: V = 0", zorder=4
    )
    for color, label in ((DATA_COLOR, "p > q"), (GENERATED_COLOR, "p < q")):
        axes.plot([], [], "s", color=color, markersize=11, label=label)
    axes.legend(loc="lower center", ncols=3, fontsize=11, bbox_to_anchor=(0.5, -0.13), columnspacing=1.2)
    square(axes)


def zero_band(axes, left):
    """Mark the singular values that count as zero, and set the range of the axis."""
    axes.axhspan(1e-17, 1e-10, color="#f1f1f1", zorder=0)
    axes.text(left, 5e-12, "zero", color="#888888", va="center")
    axes.set_ylim(1e-17, 6)
    axes.grid(visible=True, color="#e6e6e6")


def densities(weights, side=121):
    """Return a grid and, for each row of coefficients, the density on it."""
    line = torch.linspace(-BOX, BOX, side).double()
    x, y = torch.meshgrid(line, line, indexing="xy")
    square_distance = (torch.stack([x, y], dim=-1)[None] - CENTERS[:, None, None]).square().sum(-1)
    each = torch.exp(-square_distance / (2 * WIDTH**2)) / (2 * torch.pi * WIDTH**2)
    return (x, y), torch.einsum("ki,iab->kab", weights, each)


def lattice(side):
    line = torch.linspace(-0.93 * BOX, 0.93 * BOX, side).double()
    return torch.cartesian_prod(line, line)


def arrows(axes, at, vectors, color):
    """Draw directions, with lengths compressed to the power 0.4 so that weak ones remain visible."""
    size = vectors.norm(dim=1, keepdim=True)
    strong = size[:, 0] > 1e-3 * size.max()
    at, vectors, size = at[strong], vectors[strong], size[strong]
    short = vectors / size * (size / size.max()) ** 0.4
    axes.quiver(*at.T, *short.T, color=color, scale=14, width=0.007, pivot="mid", zorder=3)


def square(axes):
    axes.set(xlim=(-BOX, BOX), ylim=(-BOX, BOX), aspect="equal", xticks=[], yticks=[])


PANELS = {
    "a  Basis φ, probes, and U₁₂ at each probe": setting,
    "b  Anti-symmetry: Uᵢⱼ = −Uⱼᵢ at one probe": antisymmetry,
    "c  Singular values of the 15 vectors": spectra,
    "d  Rank grows with the probes": ranks,
    "e  The temperature matters, too": temperatures,
    "f  Two probes do not tell q from p": counterexample,
}


if __name__ == "__main__":
    folder = make_folder(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/identifiability"))
    found = measure()
    draw(found, folder / "identifiability.png")
    record = {
        **provenance(f"python examples/identifiability.py {folder}"),
        "evaluator": "float64; columns scaled to norm 1; singular values below 1e-10 of the largest are zero",
        "seed": 0,
        **found,
    }
    with atomic_write(folder / "identifiability.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    for name, case in found["degenerate_cases"].items():
        other = "a q ≠ p has no drift" if case["other_equilibrium"] else "V = 0 implies q = p"
        print(f"{name:45}  rank {case['rank']:2} of {case['pairs']}  {other}")
    print(folder / "identifiability.png")
