import math

import pytest
import torch
import torch.nn.functional as F

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.training.health import Health, feature_group, measure, never_trained

CLASSES, N, P = 4, 12, 24


def images(seed, count):
    """``[CLASSES, count, 1, 8, 8]``: a smooth picture for each class, and smooth changes of it."""

    def smooth(*shape, rng):
        return F.interpolate(torch.randn(*shape, 3, 3, generator=rng), size=8, mode="bicubic")

    of_class = smooth(CLASSES, 1, rng=torch.Generator().manual_seed(0))
    changes = smooth(CLASSES * count, 1, rng=torch.Generator().manual_seed(seed + 1))
    return 0.6 * of_class[:, None] + 0.6 * changes.unflatten(0, (CLASSES, count))


class Conditional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = dg.generators.MLP(16 + CLASSES, 64, 96, 2)
        self.net.place(torch.zeros(64), 0.6)

    def forward(self, noise):
        label = 2 * torch.eye(CLASSES).repeat_interleave(N, 0)
        return self.net(torch.cat([noise, label], 1)).view(-1, 1, 8, 8)


def train(steps, encoder=None, every=3, lr=2e-3, **options):
    """Runs for real and gives Health's warnings by step, and the last row."""
    torch.manual_seed(0)
    net, loss = Conditional(), dg.DriftingLoss(**options)
    switches = {"vectors": False, "patch_sizes": (), "every_k_block": 1}
    phi = FeatureStack([] if encoder is None else [(encoder, switches)])
    optimizer = torch.optim.AdamW(net.parameters(), lr, betas=(0.9, 0.95))
    health, told, row = Health(loss.temperatures), {}, {}
    for step in range(1, steps + 1):
        fake = phi.features(net(torch.randn(CLASSES * N, 16)))
        with torch.no_grad():
            real = phi.features(images(step, P).flatten(0, 1))
        fake, real = ({k: v.unflatten(0, (CLASSES, -1)) for k, v in f.items()} for f in (fake, real))
        out = loss(fake, real)
        optimizer.zero_grad()
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
        if step % every == 0:
            row = {"step": step, "loss": out.loss.item(), "gradient_norm": norm.item(), "skipped": 0}
            row |= measure(fake, real, out.drift, out.scale, loss)
            for text in health.update(row):
                told[text.split(":")[0]] = step
    return told, row


class Trained(torch.nn.Module):
    """An encoder that has learned something: the hidden layer of a classifier."""

    def __init__(self, steps=100):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = torch.nn.Linear(64, 32), torch.nn.Linear(32, CLASSES)
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        labels = torch.arange(CLASSES).repeat_interleave(16)
        for step in range(steps):
            x = images(10_000 + step, 16).flatten(0, 1)
            loss = F.cross_entropy(self.head(self.features(x)["layer1_mean"][:, 0]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def features(self, x, **switches):
        return {"layer1_mean": self.hidden(x.flatten(1)).relu()[:, None]}


class Constant(torch.nn.Module):
    def features(self, x, **switches):
        return {"layer1_mean": 1 + 0 * x.flatten(1)[:, None]}


class HalfDead(torch.nn.Module):
    """One feature of two does not depend on the image."""

    def features(self, x, **switches):
        flat = x.flatten(1)[:, None]
        return {"layer1_mean": flat, "layer1_std": 1 + 1e-7 * flat}


# --- real runs, healthy and broken ----------------------------------------------------------------------


def test_a_healthy_run_raises_no_warning():
    told, row = train(130)
    assert told == {}
    assert row["spread"] == pytest.approx(1, abs=0.25)
    assert row["diversity"] == pytest.approx(1, abs=0.3)


def test_attraction_only_collapses():
    told, row = train(150, repulsion=0.0)
    assert set(told) == {"collapsed"}
    assert row["diversity"] < 0.25
    assert row["loss"] > 4  # nothing to see there


def test_too_much_repulsion_diverges():
    told, row = train(100, repulsion=2.0)
    assert set(told) == {"diverging"}
    assert row["spread"] > 4


@pytest.mark.parametrize("temperatures", [(1e-4,), (1e-4, 0.05, 0.2)])
def test_temperature_too_low(temperatures):
    told, row = train(36, temperatures=temperatures)
    assert set(told) == {"temperature too low"}
    assert row["neighbors"][0] < 1.05
    assert all(n > 2 for n in row["neighbors"][1:])


def test_an_encoder_of_random_weights():
    torch.manual_seed(1)
    mae = ResNetMAE(in_channels=1, base_channels=32, blocks=(1, 1), decoder=False)
    told, _ = train(11, mae, every=1)
    assert set(told) == {"untrained encoder"}
    told, row = train(40, Trained(), every=1)
    assert told == {}
    encoder, pixels = row["class_share"]
    assert encoder > pixels


def test_weights_that_no_step_has_changed():
    """Also where features of random weights tell classes apart nearly as well as pixels do."""
    torch.manual_seed(0)
    mae = ResNetMAE(in_channels=1, base_channels=32, blocks=(1,), decoder=False)
    assert never_trained(mae)
    assert not never_trained(torch.nn.Linear(2, 2))  # nothing to tell it by
    said, health = told([{"diversity": 1.0}] * 5, untrained=["runs/mae"])
    assert said == [[], [], ["untrained encoder"], [], []]
    assert "weights of runs/mae have their initial values" in health.state[0]
    optimizer = torch.optim.AdamW(mae.parameters(), 1e-6)
    sum(v.square().sum() for v in mae.features(torch.randn(2, 1, 8, 8)).values()).backward()
    optimizer.step()
    assert not never_trained(mae)


def test_a_dead_encoder():
    told, row = train(4, Constant(), every=1)
    assert set(told) == {"dead encoder"}
    assert row["encoder_spread"] == 0
    told, row = train(4, HalfDead(), every=1)
    assert set(told) == {"dead features"}
    assert row["dead"] == ["layer1_std"]


# --- what is measured -----------------------------------------------------------------------------------


def figures(generated, positives, **options):
    loss = dg.DriftingLoss(**options)
    out = loss(generated, positives)
    return measure(generated, positives, out.drift, out.scale, loss)


def test_measures():
    torch.manual_seed(0)
    real = {"global": torch.randn(8, 32, 1, 6), "mae/layer1_mean": 5 + torch.randn(8, 32, 1, 6)}
    half = {name: 0.5 * torch.randn_like(t) + t.mean() for name, t in real.items()}
    row = figures(half, real)
    assert row["spread"] == pytest.approx(0.5, rel=0.05)
    assert row["diversity"] == pytest.approx(0.5, rel=0.05)
    assert row["encoder_spread"] == pytest.approx(1 / math.sqrt(26), rel=0.05)
    assert row["class_share"] == pytest.approx([0, 0], abs=0.02)  # no classes in there
    assert set(row["drift_groups"]) == set(row["scale"]) == {"global", "mae/layer1"}
    mean = [sum(d) / 2 for d in zip(*row["drift_groups"].values(), strict=True)]
    assert row["drift"] == pytest.approx(mean)
    assert "dead" not in row
    # Classes apart, samples of a class alike: spread is right, diversity is not.
    places = 4 * torch.randn(8, 1, 1, 6)
    row = figures({"global": 0.1 * torch.randn(8, 32, 1, 6) + places}, {"global": real["global"] + places})
    assert row["spread"] > 0.8
    assert row["diversity"] == pytest.approx(0.1, rel=0.1)
    assert {"encoder_spread", "class_share"}.isdisjoint(row)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_features_far_from_zero_measure_the_same(device):
    torch.manual_seed(0)
    generated, real = torch.randn(4, 32, 1, 6), torch.randn(4, 32, 1, 6)
    far = 2.0**12 * torch.ones(6)
    generated, real = ((t * 16).round() / 16 for t in (generated, real))  # the sums are exact
    near, away = (
        figures({"global": (generated + t).to(device)}, {"global": (real + t).to(device)})
        for t in (0 * far, far)
    )
    assert away["diversity"] == pytest.approx(near["diversity"], rel=1e-4)
    assert away["neighbors"] == pytest.approx(near["neighbors"], rel=1e-3)


def test_class_share():
    torch.manual_seed(0)
    mean = 2 * torch.randn(32, 1, 1, 20)
    real = {"global": mean + torch.randn(32, 32, 1, 20), "layer1": torch.randn(32, 32, 3, 20)}
    encoder, pixels = figures(real, real)["class_share"]
    assert pixels == pytest.approx(0.8, abs=0.05)
    assert encoder == pytest.approx(0, abs=0.01)


def test_neighbors_count_those_within_reach():
    place = torch.tensor([0.0, 1.0]).repeat_interleave(5)[None, :, None, None]
    row = figures({"global": place}, {"global": place}, temperatures=(1e-3, 100.0))
    assert row["neighbors"] == pytest.approx([9, 19], rel=1e-3)  # 4 own and 5 real ones; or all but itself


def test_one_sample_or_one_class_is_no_error():
    one = {"global": torch.randn(1, 2, 1, 3)}
    row = figures(one, {"global": torch.randn(1, 1, 1, 3)})
    assert "class_share" not in row
    assert all(math.isfinite(d) for d in row["drift"])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("layer1_blk2_mean_4", "layer1"),
        ("conv1_std", "conv1"),
        ("conv1", "conv1"),
        ("norm_x", "norm_x"),
        ("global", "global"),
        ("convenxt_stage_0_mean_2", "convenxt_stage_0"),
        ("a_mean_b/layer4_mean", "a_mean_b/layer4"),
    ],
)
def test_groups(name, group):
    assert feature_group(name) == group


# --- rules ----------------------------------------------------------------------------------------------


def told(rows, temperatures=(), untrained=()):
    health = Health(temperatures, untrained)
    return [[t.split(":")[0] for t in health.update(row)] for row in rows], health


def test_a_warning_is_told_once_until_it_has_cleared():
    good, bad = {"diversity": 1.0}, {"diversity": 0.1}
    said, health = told([good] * 10 + [bad] * 30)
    assert [text for texts in said for text in texts] == ["collapsed"]
    assert len(health.state) == 1
    assert "diversity 0.1, the data has 1" in health.state[0]
    for _ in range(40):
        assert health.update(good) == []
    assert health.state == []
    assert any(health.update(bad) for _ in range(20))


def test_a_generator_that_opens_is_not_collapsed():
    assert not any(told([{"diversity": 0.01 * 1.05**i} for i in range(95)])[0])
    warming = [{"diversity": 0.01, "learning_rate": 1e-6 * i} for i in range(60)]
    assert not any(told(warming)[0])
    assert ["collapsed"] in told([{"diversity": 0.01, "learning_rate": 1e-4}] * 60)[0]


def test_initial_weights_in_the_average():
    row = {"ema_initial_share": {"0.9995": [0.97, 5990]}}
    (text,) = Health().update(row)
    assert (
        "still holds 97% of the initial weights, and 5% at step 5,990; train for longer, lower ema, or"
        in text
    )
    assert "start a new run with ema_warmup=true" in text
    (text,) = Health(ema_warmup=True).update(row)
    assert "at step 5,990; train for longer, or lower ema" in text
    assert "ema_warmup" not in text
    assert Health(trained_start=True).update(row) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_not_finite(value):
    said, health = told([{"loss": 1.0}, {"loss": value}])
    assert said == [[], ["diverging"]]
    assert "loss is not finite" in health.state[0]


def test_skipped_steps_and_jumps():
    assert told([{"skipped": 0}, {"skipped": 1}, {"skipped": 1}])[0] == [[], ["diverging"], []]
    rows = [{"gradient_norm": 1.0}] * 30 + [{"gradient_norm": 500.0}] * 10
    assert ["diverging"] in told(rows)[0]
    assert not any(told([{"gradient_norm": 1.0}] * 30 + [{"gradient_norm": 500.0}] * 3)[0])
    assert not any(told([{"drift": [10.0 / (i + 1)]} for i in range(100)])[0])


def test_stall():
    assert ["stalled far from equilibrium"] in told([{"diversity": 2.5, "spread": 2.0}] * 70)[0]
    assert not any(told([{"diversity": 5.0 * 0.99**i} for i in range(90)])[0])


def test_pretraining_rows_pass():
    row = {"step": 1, "loss": 0.4, "reconstruction": 0.4, "classification": None, "accuracy": None}
    assert not any(told([row | {"gradient_norm": 1.0, "skipped": 0}] * 100)[0])
