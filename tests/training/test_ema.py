import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.errors import InputError
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.ema import EMA, unwrapped


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.scale * self.layers(x) + self.frozen


def train(model, averages, steps=3):
    """The weights after each step, the initial ones first."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    history = [copy.deepcopy(unwrapped(model).state_dict())]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        averages.update(model)
        history.append(copy.deepcopy(unwrapped(model).state_dict()))
    return history


def by_hand(history, name, decay):
    average = history[0][name].double()
    for weights in history[1:]:
        average = decay * average + (1 - decay) * weights[name].double()
    return average


def check(averages, model, history):
    parameters = dict(unwrapped(model).named_parameters())
    for text, averaged in averages.models.items():
        for name, value in averaged.state_dict().items():
            if name in parameters:
                want = by_hand(history, name, float(text))
                assert torch.allclose(value.double(), want, rtol=1e-6, atol=1e-7), (text, name)
            else:
                assert torch.equal(value, history[-1][name]), (text, name)


def test_three_steps_by_hand():
    model = Net()
    averages = EMA(model, (0.9, 0.5, 0.0))
    assert list(averages.models) == ["0.9", "0.5", "0.0"]
    history = train(model, averages)
    assert not torch.equal(history[0]["layers.0.weight"], history[1]["layers.0.weight"])
    check(averages, model, history)
    # The initial weights still weigh 0.9^3; a first step that copies would make it nothing.
    assert averages.first is averages.models["0.9"]
    moved = averages.first.layers[0].weight - history[0]["layers.0.weight"]
    assert moved.norm() < (history[3]["layers.0.weight"] - history[0]["layers.0.weight"]).norm() / 2
    # Decay 0 is the model itself.
    for name, value in averages.models["0.0"].state_dict().items():
        assert torch.equal(value, history[-1][name])


def test_copies_are_apart_frozen_and_evaluated():
    model = Net().train()
    averages = EMA(model, (0.9, 0.99))
    pointers = [p.data_ptr() for m in (model, *averages.models.values()) for p in m.parameters()]
    assert len(set(pointers)) == len(pointers)
    train(model, averages)
    for averaged in averages.models.values():
        assert type(averaged) is Net
        assert not any(module.training for module in averaged.modules())
        assert not any(p.requires_grad for p in averaged.parameters())
    assert model.training
    assert model.scale.requires_grad
    x = torch.randn(5, 3)
    assert torch.equal(averages.first(x), averages.first(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_number_type_is_kept(dtype):
    model = nn.Linear(2, 2).to(dtype)
    averages = EMA(model, (0.5,))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    averages.update(model)
    assert averages.first.weight.dtype == dtype
    assert torch.allclose(averages.first.weight, before + 0.5, atol=1e-2)


def test_names_and_state(tmp_path):
    model = Net()
    averages = EMA(model, (0.9, 0.5))
    history = train(model, averages)
    state = averages.state_dict()
    assert {name.split("/")[0] for name in state} == {"0.9", "0.5"}
    assert {name.split("/")[1] for name in state} == set(model.state_dict())
    assert all(type(value) is torch.Tensor or isinstance(value, nn.Parameter) for value in state.values())
    Checkpoints(tmp_path).save(3, state, {})
    # A new process: other initial weights, then as if nothing had happened.
    again = EMA(Net(), (0.9, 0.5))
    again.load_state_dict(Checkpoints(tmp_path).load().tensors)
    check(again, model, history)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    averages.update(model)
    again.update(model)
    for name, value in again.state_dict().items():
        assert torch.equal(value, averages.state_dict()[name])
    check(again, model, [*history, model.state_dict()])


@pytest.fixture
def processes(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["ddp", "compiled", "ddp of compiled", "compiled ddp", "compiled part"])
def test_wrapped_models(processes, order):
    def wrap(model):
        if order == "compiled part":
            model.layers[0] = torch.compile(model.layers[0], backend="eager")
            return model
        for kind in reversed(order.replace("compiled ddp", "compiled of ddp").split(" of ")):
            ddp = kind == "ddp"
            model = DistributedDataParallel(model) if ddp else torch.compile(model, backend="eager")
        return model

    plain = Net()
    names = set(plain.state_dict())
    start = copy.deepcopy(plain.state_dict())
    torch.manual_seed(1)
    reference = EMA(plain, (0.9,))
    train(plain, reference)
    model = Net()
    model.load_state_dict(start)
    model = wrap(model)
    torch.manual_seed(1)
    averages = EMA(model, (0.9,))
    train(model, averages)
    assert {name.removeprefix("0.9/") for name in averages.state_dict()} == names
    for name, value in averages.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], atol=1e-6), name
    # Saved wrapped, loaded bare.
    bare = EMA(Net(), (0.9,))
    bare.load_state_dict(averages.state_dict())
    assert torch.equal(bare.first.layers[0].weight, averages.state_dict()["0.9/layers.0.weight"])


def test_built_bare_updated_wrapped(processes):
    model = Net()
    averages = EMA(model, (0.9,))
    history = train(DistributedDataParallel(model), averages)
    check(averages, model, history)


@pytest.mark.parametrize("decays", [(), (0.9, 0.9), (1.0,), (-0.1,), (float("nan"),)])
def test_wrong_decays(decays):
    with pytest.raises(InputError, match=r"^ema=.*each once, from 0 to below 1"):
        EMA(Net(), decays)


def test_wrong_state():
    averages = EMA(Net(), (0.9,))
    state = {name: value.clone() for name, value in averages.state_dict().items()}
    with pytest.raises(InputError, match=r"do not fit, missing: 0.9/frozen$"):
        averages.load_state_dict({k: v for k, v in state.items() if k != "0.9/frozen"})
    with pytest.raises(InputError, match=r"do not fit, unknown: 0.99/frozen$"):
        averages.load_state_dict(state | {"0.99/frozen": torch.zeros(2)})
    with pytest.raises(InputError, match=r"0.9/frozen has shape \[3\], expected \[2\]$"):
        averages.load_state_dict(state | {"0.9/frozen": torch.zeros(3)})
