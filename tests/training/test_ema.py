import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.errors import InputError
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.ema import EMA, decay_at, unwrapped


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.scale * self.layers(x) + self.frozen


def train(model, ema, steps=3):
    """The weights after each step, the initial ones first."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    history = [copy.deepcopy(unwrapped(model).state_dict())]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        ema.update(model)
        history.append(copy.deepcopy(unwrapped(model).state_dict()))
    return history


def by_hand(history, name, decay):
    average = history[0][name].double()
    for weights in history[1:]:
        average = decay * average + (1 - decay) * weights[name].double()
    return average


def check(ema, model, history):
    parameters = dict(unwrapped(model).named_parameters())
    for text, averaged in ema.models.items():
        for name, value in averaged.state_dict().items():
            if name in parameters:
                want = by_hand(history, name, float(text))
                assert torch.allclose(value.double(), want, rtol=1e-6, atol=1e-7), (text, name)
            else:
                assert torch.equal(value, history[-1][name]), (text, name)


def test_three_steps_by_hand():
    model = Net()
    ema = EMA(model, (0.9, 0.5, 0.0))
    assert list(ema.models) == ["0.9", "0.5", "0.0"]
    history = train(model, ema)
    assert not torch.equal(history[0]["layers.0.weight"], history[1]["layers.0.weight"])
    check(ema, model, history)
    # The initial weights still weigh 0.9^3; a first step that copies would make it nothing.
    assert ema.first is ema.models["0.9"]
    moved = ema.first.layers[0].weight - history[0]["layers.0.weight"]
    assert moved.norm() < (history[3]["layers.0.weight"] - history[0]["layers.0.weight"]).norm() / 2
    # Decay 0 is the model itself.
    for name, value in ema.models["0.0"].state_dict().items():
        assert torch.equal(value, history[-1][name])


def test_copies_are_apart_frozen_and_evaluated():
    model = Net().train()
    ema = EMA(model, (0.9, 0.99))
    pointers = [p.data_ptr() for m in (model, *ema.models.values()) for p in m.parameters()]
    assert len(set(pointers)) == len(pointers)
    train(model, ema)
    for averaged in ema.models.values():
        assert type(averaged) is Net
        assert not any(module.training for module in averaged.modules())
        assert not any(p.requires_grad for p in averaged.parameters())
    assert model.training
    assert model.scale.requires_grad
    x = torch.randn(5, 3)
    assert torch.equal(ema.first(x), ema.first(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_averages_keep_the_dtype(dtype):
    model = nn.Linear(2, 2).to(dtype)
    ema = EMA(model, (0.5,))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    ema.update(model)
    assert ema.first.weight.dtype == dtype
    assert torch.allclose(ema.first.weight, before + 0.5, atol=1e-2)


def test_names_and_state(tmp_path):
    model = Net()
    ema = EMA(model, (0.9, 0.5))
    history = train(model, ema)
    state = ema.state_dict()
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
    ema.update(model)
    again.update(model)
    for name, value in again.state_dict().items():
        assert torch.equal(value, ema.state_dict()[name])
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
    ema = EMA(model, (0.9,))
    train(model, ema)
    assert {name.removeprefix("0.9/") for name in ema.state_dict()} == names
    for name, value in ema.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], atol=1e-6), name
    # Saved wrapped, loaded bare.
    bare = EMA(Net(), (0.9,))
    bare.load_state_dict(ema.state_dict())
    assert torch.equal(bare.first.layers[0].weight, ema.state_dict()["0.9/layers.0.weight"])


def test_built_bare_updated_wrapped(processes):
    model = Net()
    ema = EMA(model, (0.9,))
    history = train(DistributedDataParallel(model), ema)
    check(ema, model, history)


@pytest.mark.parametrize("decays", [(), (0.9, 0.9), (1.0,), (-0.1,), (float("nan"),)])
def test_wrong_decays(decays):
    with pytest.raises(InputError, match=r"^ema=.*each once, from 0 to below 1"):
        EMA(Net(), decays)


def test_wrong_state():
    ema = EMA(Net(), (0.9,))
    state = {name: value.clone() for name, value in ema.state_dict().items()}
    with pytest.raises(InputError, match=r"do not fit, missing: 0.9/frozen$"):
        ema.load_state_dict({k: v for k, v in state.items() if k != "0.9/frozen"})
    with pytest.raises(InputError, match=r"do not fit, unknown: 0.99/frozen$"):
        ema.load_state_dict(state | {"0.99/frozen": torch.zeros(2)})
    with pytest.raises(InputError, match=r"0.9/frozen has shape \[3\], expected \[2\]$"):
        ema.load_state_dict(state | {"0.9/frozen": torch.zeros(3)})


# --- warm-up ------------------------------------------------------------------------------------------------


def test_warmup_decays():
    warm = [decay_at(0.999, t, warmup=True) for t in range(20_000)]
    assert warm[:3] == [1 / 10, 2 / 11, 3 / 12]
    assert warm == sorted(warm)
    assert warm[8989] < 0.999  # 9 d / (1 - d) = 8991 updates
    assert warm[8991:] == [0.999] * len(warm[8991:])
    assert [decay_at(0.999, t, warmup=False) for t in (0, 5)] == [0.999, 0.999]
    assert decay_at(0.05, 0, warmup=True) == 0.05


def test_warmup_is_the_formula():
    model = Net()
    ema = EMA(model, (0.9, 0.15, 0.0), warmup=True)
    history = train(model, ema, steps=12)
    parameters = dict(model.named_parameters())
    for text, averaged in ema.models.items():
        share = 1.0
        expected = {name: history[0][name].double() for name in parameters}
        for t, weights in enumerate(history[1:]):
            decay = min(float(text), (1 + t) / (10 + t))
            share *= decay
            for name in parameters:
                expected[name] = decay * expected[name] + (1 - decay) * weights[name].double()
        for name, value in averaged.named_parameters():
            assert torch.allclose(value.double(), expected[name], rtol=1e-6, atol=1e-7), (text, name)
        assert ema.initial_share[text] == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_share_of_initial_weights_is_exact(warmup):
    """Initial weights 1, all later ones 0: the average is the share."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    ema = EMA(model, (0.99, 0.5, 0.0), warmup=warmup)
    nn.init.zeros_(model.weight)
    for _ in range(300):
        ema.update(model)
        for decay, averaged in ema.models.items():
            assert averaged.weight.item() == pytest.approx(ema.initial_share[decay], rel=1e-9)
    assert ema.updates == 300
    assert (ema.initial_share["0.99"] > 0.04) is not warmup


def test_without_warmup_a_short_run_is_mostly_initial_weights():
    model = Net()
    ema, warm = EMA(model, (0.9995,)), EMA(model, (0.9995,), warmup=True)
    for _ in range(300):
        ema.update(model)
        warm.update(model)
    assert ema.initial_share["0.9995"] == pytest.approx(0.8607, abs=1e-4)
    assert warm.initial_share["0.9995"] < 1e-12


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", ["0.999", "0.9", "0.0"])
def test_updates_until_the_share_is_small(warmup, decay):
    model = nn.Linear(1, 1)
    ema = EMA(model, (float(decay),), warmup=warmup)
    predicted = ema.updates_until(decay)
    for _ in range(predicted - 1):
        ema.update(model)
    assert ema.initial_share[decay] > 0.05
    assert ema.updates_until(decay) == 1
    ema.update(model)
    assert ema.initial_share[decay] <= 0.05
    assert ema.updates_until(decay) == 0
    assert predicted == {"0.999": 2 if warmup else 2995, "0.9": 2 if warmup else 29, "0.0": 1}[decay]


def test_warmup_resumes_exactly():
    model = Net()
    ema = EMA(model, (0.9, 0.99), warmup=True)
    train(model, ema, steps=5)
    again = EMA(Net(), (0.9, 0.99), warmup=True)
    again.load_state_dict(ema.state_dict())
    again.load_progress(json.loads(json.dumps(ema.progress())), updates=0)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        ema.update(model)
        again.update(model)
    assert again.progress() == ema.progress()
    for name, value in again.state_dict().items():
        assert torch.equal(value, ema.state_dict()[name])


def test_checkpoints_without_a_record_of_updates():
    """Of versions without warm-up: the updates are the steps, the share is d^updates."""
    ema = EMA(Net(), (0.9, 0.99))
    ema.load_progress(None, updates=7)
    assert ema.updates == 7
    assert ema.initial_share == pytest.approx({"0.9": 0.9**7, "0.99": 0.99**7})
