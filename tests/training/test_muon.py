"""Muon against torch.optim.Muon and float64, its state, and what AdamW keeps."""

import copy

import pytest
import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.training.config import Optimizer
from driftgen.training.muon import Muon, orthogonalize
from driftgen.training.optimizer import make_optimizer

RATE, DECAY = 1e-2, 0.1


class Network(nn.Module):
    """All kinds of parameters: convolutions, matrices of both orientations, tables and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3)
        self.same = nn.Linear(288, 64)  # a matrix of the shape of the convolution's
        self.tall, self.square = nn.Linear(20, 64), nn.Linear(64, 64)
        self.output, self.table = nn.Linear(64, 3), nn.Embedding(40, 64)


def network(*, channels_last: bool = False) -> Network:
    torch.manual_seed(0)
    made = Network()
    return made.to(memory_format=torch.channels_last) if channels_last else made


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=random) for name, p in model.named_parameters()}


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, gradient in gradients(model, seed).items():
        model.get_parameter(name).grad = gradient
    optimizer.step()


def make(model: Network, *, fused: bool = False) -> Muon:
    return Muon(
        model.parameters(), embeddings=[model.table.weight], lr=RATE, weight_decay=DECAY, fused=fused or None
    )


def brute_force(weight: Tensor, moments: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """One update in float64, by the singular values of the matrix."""
    moments = 0.95 * moments + 0.05 * gradient.double().flatten(1)
    left, values, right = torch.linalg.svd(
        0.05 * gradient.double().flatten(1) + 0.95 * moments, full_matrices=False
    )
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    size = 0.2 * RATE * max(weight.flatten(1).shape) ** 0.5
    matrix = (1 - RATE * DECAY) * weight.flatten(1) - size * (left * values) @ right
    return matrix.view(weight.shape), moments


@pytest.mark.parametrize("channels_last", [False, True])
def test_matrices_follow_float64(channels_last: bool) -> None:
    model = network(channels_last=channels_last)
    optimizer = make(model)
    names = ["conv.weight", "same.weight", "tall.weight", "square.weight"]
    expected = {name: model.get_parameter(name).detach().double() for name in names}
    moments: dict[str, Tensor] = dict.fromkeys(names, torch.zeros((), dtype=torch.float64))
    for seed in range(3):
        for name in names:
            gradient = gradients(model, seed)[name]
            expected[name], moments[name] = brute_force(expected[name], moments[name], gradient)
        update(model, optimizer, seed)
    for name in names:
        torch.testing.assert_close(model.get_parameter(name).double(), expected[name], rtol=0, atol=2e-6)
        held = optimizer.state[model.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(held.double().flatten(1), moments[name], rtol=0, atol=1e-6)


def test_one_matrix_as_in_torch() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 48 * 80).sin().view(48, 80)) for _ in range(2))
    optimizers = (
        Muon([ours], lr=RATE, weight_decay=DECAY),
        torch.optim.Muon([theirs], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    )
    begin = ours.detach().clone()
    for seed in range(3):
        gradient = torch.randn(48, 80, generator=torch.Generator().manual_seed(seed))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # torch.optim.Muon computes in bfloat16.
    assert (ours - theirs).norm() < 0.02 * (theirs - begin).norm()


def test_the_rest_is_adamw() -> None:
    ours, theirs = network(), network()
    optimizer = make(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=RATE, weight_decay=DECAY)
    for seed in range(3):
        update(ours, optimizer, seed)
        update(theirs, reference, seed)
    for name in ("conv.bias", "output.weight", "output.bias", "table.weight"):
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name)), name
    assert not torch.equal(ours.square.weight, theirs.square.weight)


def test_singular_values_become_one() -> None:
    spread = torch.logspace(0, -2, 24).diag() @ torch.linalg.qr(torch.randn(90, 24).double())[0].mT.float()
    batches = [torch.randn(3, 24, 50), torch.randn(2, 50, 24), spread[None], torch.zeros(1, 24, 24)]
    wide, tall, steep, zero = orthogonalize(batches)
    for result in (wide, tall, steep):
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.6
        assert values.max() < 1.3
    assert torch.equal(zero, torch.zeros(1, 24, 24))


def test_scale_of_the_gradient_does_not_matter() -> None:
    x = torch.randn(2, 24, 50)
    for scale in (1e-4, 1e6):
        torch.testing.assert_close(orthogonalize([scale * x])[0], orthogonalize([x])[0], rtol=0, atol=1e-3)


def test_a_skipped_step_changes_nothing() -> None:
    model, other = network(channels_last=True), network(channels_last=True)
    optimizer, plain = make(model, fused=True), make(other, fused=True)
    for seed in range(3):
        update(model, optimizer, seed)
        update(other, plain, seed)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf if parameter.ndim > 2 else torch.nan)
        optimizer.step()
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        after = model.state_dict(), optimizer.state_dict()["state"]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_state_goes_on_bit_for_bit(channels_last: bool) -> None:
    model = network(channels_last=channels_last)
    optimizer = make(model)
    update(model, optimizer, 0)
    other = copy.deepcopy(model)
    second = make(other)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        update(model, optimizer, seed)
        update(other, second, seed)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_parameters_without_gradients_stay() -> None:
    model = network()
    optimizer = make(model)
    model.square.weight.grad = torch.randn(64, 64)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["square.weight"]


def test_a_matrix_without_a_gradient_leaves_the_others_of_its_shape_alone() -> None:
    """``conv`` and ``same`` are one batch; each misses a gradient once, and ``conv`` the first one."""
    model, other = network(channels_last=True), network(channels_last=True)
    optimizer = make(model)
    alone = make(other), Muon([other.same.weight], lr=RATE, weight_decay=DECAY)
    for seed, missing in enumerate(("conv.weight", "same.weight", None)):
        for name, gradient in gradients(model, seed).items():
            model.get_parameter(name).grad = None if name == missing else gradient
            other.get_parameter(name).grad = None if name in (missing, "same.weight") else gradient
        optimizer.step()
        alone[0].step()
        other.same.weight.grad = None if missing == "same.weight" else gradients(model, seed)["same.weight"]
        alone[1].step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, other.get_parameter(name), rtol=0, atol=1e-6, msg=name)
    assert optimizer.state[model.conv.weight].keys() == {"step", "exp_avg"}
    assert optimizer.batches[0].moments is not None
    held = optimizer.state[model.same.weight]["exp_avg"].data_ptr()
    assert held == optimizer.batches[0].moments[1].data_ptr()


def test_a_closure_is_called_once_before_the_update() -> None:
    models = network(), network()
    for model, closed in zip(models, (True, False), strict=True):
        optimizer, calls = make(model), []

        def closure(model: Network = model, calls: list[int] = calls) -> float:
            calls.append(1)
            loss = (model.square.weight @ model.same.weight).square().mean()
            loss.backward()
            return loss.item()

        if closed:
            loss = optimizer.step(closure)
            assert loss is not None
            assert loss > 0
        else:
            closure()
            assert optimizer.step() is None
        assert len(calls) == 1
    assert torch.equal(models[0].square.weight, models[1].square.weight)
    assert not torch.equal(models[0].square.weight, network().square.weight)


def test_one_group_of_parameters() -> None:
    model = network()
    groups = [{"params": [model.square.weight]}, {"params": [model.tall.weight], "lr": 1.0}]
    message = "Muon takes one group of parameters, with one lr and weight_decay: pass a list of parameters"
    with pytest.raises(InputError, match=message):
        Muon(groups)
    optimizer = make(model)
    with pytest.raises(InputError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(32, 32))]})


def test_the_configuration_chooses() -> None:
    model = network()
    muon = make_optimizer(
        model.parameters(), Optimizer(kind="muon", momentum=0.9), embeddings=[model.table.weight]
    )
    assert isinstance(muon, Muon)
    assert muon.momentum == 0.9
    matrices = {id(p) for batch in muon.batches for p in batch.members}
    assert id(model.table.weight) not in matrices
    assert not isinstance(make_optimizer(model.parameters(), Optimizer()), Muon)


@pytest.mark.cuda
def test_a_gpu_follows_the_cpu() -> None:
    """Matrices to the rounding of the TF32 products, and a skipped step."""
    begin, here, there = (network(channels_last=True) for _ in range(3))
    there.cuda()
    optimizers = make(here, fused=True), make(there, fused=True)
    for seed in range(4):
        skip = seed == 2
        for model, optimizer in zip((here, there), optimizers, strict=True):
            device = next(model.parameters()).device
            for name, gradient in gradients(model, seed).items():
                model.get_parameter(name).grad = (gradient * (torch.inf if skip else 1)).to(device)
            optimizer.found_inf = torch.full((), float(skip), device=device)  # type: ignore[attr-defined]
            optimizer.step()
    for name, parameter in here.named_parameters():
        other = there.get_parameter(name).cpu()
        if optimizers[0].is_matrix(parameter):
            # Three updates, each of two products whose factors are rounded by up to 2^-11.
            assert (other - parameter).norm() < 2**-8 * (parameter - begin.get_parameter(name)).norm(), name
        else:
            torch.testing.assert_close(other, parameter, rtol=0, atol=1e-5)
