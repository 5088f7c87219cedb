"""Calls of the public functions that work, with all their arguments by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import driftgen as dg
from driftgen.drift.guidance import alpha_at, sample_alpha, unconditional_weight
from driftgen.evaluation.density_coverage import density_coverage
from driftgen.evaluation.precision_recall import precision_recall
from tests.support.api_call import Call, Fresh, labels, make_call, randn
from tests.support.api_networks import NETWORKS, STATE, network

# --- the field, the loss, guidance, queues ----------------------------------------------------------------


def _loss(options: Any = None, **samples: Any) -> Any:
    for name in ("generated",):
        value = samples.get(name)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.is_leaf:
            samples[name] = value.detach().requires_grad_()
    out = dg.DriftingLoss(**(options or {}))(**samples)
    gradient = None
    if out.loss.requires_grad:
        out.loss.backward()
        gradient = samples["generated"].grad
    return out, gradient


def _queue(samples: Any, labels: Any, drawn: Any, n: Any, generator: Any) -> Any:
    queue = dg.SampleQueue(3, 4, (2,))
    queue.push(torch.zeros(3, 2), torch.arange(3))
    queue.push(samples, labels)
    return queue.draw(drawn, n, generator)


FIELD = [
    make_call(
        "drift_field", dg.drift_field, x=randn(2, 6, 3), positives=randn(2, 5, 3), negatives=randn(2, 4,
        3),
        temperature=0.2, kernel="laplace", normalization="both", attraction=1.0, repulsion=1.0,
        positive_weight=Fresh(lambda _: torch.rand(2, 5)), negative_weight=Fresh(lambda _: torch.rand(2, 4)),
        self_mask=False,
    ),
    make_call(
        "drift_field of x alone", dg.drift_field, x=randn(6, 3), positives=randn(5, 3), temperature=0.2
    ),
    make_call(
        "mmd_field", dg.mmd_field, x=randn(6, 3), positives=randn(5, 3), negatives=randn(4, 3),
        temperature=0.2, kernel="gaussian",
    ),
    make_call(
        "DriftingLoss", lambda **options: _loss(options, generated=torch.randn(6, 3),
        positives=torch.randn(5, 3)),
        temperatures=(0.02, 0.2), kernel="laplace", normalization="both", attraction=1.0, repulsion=1.0,
        normalize_features=True, normalize_drift=True, convention="release", chunk=2,
    ),
    make_call(
        "DriftingLoss of groups", _loss, generated=randn(2, 6, 3), positives=randn(2, 5, 3),
        negatives=randn(2, 4, 3), generated_weight=Fresh(lambda _: torch.rand(2) + 0.1),
        positive_weight=Fresh(lambda _: torch.rand(2, 5) + 0.1),
        negative_weight=Fresh(lambda _: torch.rand(2, 4) + 0.1),
    ),
    make_call(
        "DriftingLoss of features", lambda generated, positives: _loss(generated=generated,
        positives=positives),
        generated=Fresh(lambda _: {"a": torch.randn(2, 4, 3, 5), "b": torch.randn(2, 4, 1, 2)}),
        positives=Fresh(lambda _: {"a": torch.randn(2, 3, 3, 5), "b": torch.randn(2, 3, 1, 2)}),
    ),
    make_call(
        "guidance.sample_alpha", sample_alpha, n=4, low=1.0, high=4.0, power=3.0, no_guidance=0.1,
        generator=Fresh(lambda _: torch.Generator()),
    ),
    make_call(
        "guidance.alpha_at", alpha_at, uniform=Fresh(lambda _: torch.rand(4)),
        chance=Fresh(lambda _: torch.rand(4)), low=1.0, high=4.0, power=3.0, no_guidance=0.1,
    ),
    make_call(
        "guidance.unconditional_weight", unconditional_weight, alpha=Fresh(lambda _: 1 + torch.rand(4)),
        generated=8, unconditional=4,
    ),
    make_call(
        "SampleQueue", lambda **options: dg.SampleQueue(**options).state_dict(), num_classes=3, size=4,
        shape=(2,),
        dtype=torch.float32,
    ),
    make_call(
        "SampleQueue.push and draw", _queue, samples=randn(5, 2), labels=labels(5, 3), drawn=labels(2,
        3), n=2,
        generator=Fresh(lambda _: torch.Generator()),
    ),
    make_call(
        "SampleQueue.load_state_dict", lambda state: dg.SampleQueue(3, 4, (2,)).load_state_dict(state),
        state=Fresh(lambda _: dg.SampleQueue(3, 4, (2,)).state_dict()),
    ),
]  # fmt: skip

# --- pipelines, policies, models, runs --------------------------------------------------------------------


def _pipe(**options: Any) -> dg.DriftPipeline:
    return dg.DriftPipeline(network("ImageMLP"), **options)


def _saved(folder: Path) -> str:
    _pipe(class_names=["a", "b", "c"]).save_pretrained(folder / "model")
    return str(folder / "model")


def _saved_policy(folder: Path) -> str:
    dg.DriftingPolicy(network("policy")).save_pretrained(folder / "policy")  # type: ignore[arg-type]
    return str(folder / "policy")


def _act(seed: Any, observation: Any) -> Any:
    policy = dg.DriftingPolicy(network("policy"))  # type: ignore[arg-type]
    policy.reset(seed)
    return [policy.select_action(observation) for _ in range(3)]


def _sampled(pipe: dg.DriftPipeline) -> Any:
    return pipe([0], seed=0, output="numpy")


RUN = {
    "optim.warmup": 0, "batch.classes": 2, "batch.generated": 2, "batch.positives": 2,
    "batch.unconditional": 1, "generator.options": {"hidden_size": 16, "depth": 1, "style_codebooks": 0},
    "encoders": [], "output.samples_every": 1000, "seed": 0,
}  # fmt: skip


def _train(changes: Any = None, **given: Any) -> Any:
    return dg.train(**given, **_one_step(changes)).metrics


def _pretrain(changes: Any = None, **given: Any) -> Any:
    return dg.pretrain(**given, **_one_step(changes)).metrics


def _one_step(changes: Any) -> dict[str, Any]:
    """Return the changes of a recipe, which trains for one step whatever they are."""
    odd = {key: value for key, value in changes.items() if isinstance(key, str)} \
        if isinstance(changes, dict) else {"changes": changes}  # fmt: skip
    return {**odd, "optim.steps": 1}


def _images(folder: Path) -> tuple[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (12, 8, 8, 1), np.uint8), np.arange(12) % 3


def _out(folder: Path) -> str:
    return str(folder / "run")


def _register(function: Callable[..., None]) -> Callable[..., None]:
    from driftgen import model_io

    def register(name: Any, cls: Any) -> None:
        before = dict(model_io._REGISTRY)
        try:
            function(name, cls)
        finally:
            model_io._REGISTRY.clear()
            model_io._REGISTRY.update(before)

    return register


class OwnGenerator(dg.generators.MLP):
    """A generator of a user."""


class OwnEncoder(nn.Module):
    """An encoder of a user."""

    def features(self, x: Any) -> Any:
        return {"x": x.flatten(1)[:, None]}


FILES = [
    make_call(
        "DriftPipeline", lambda generator, **options: _sampled(dg.DriftPipeline(generator, **options)),
        generator=Fresh(lambda _: network("ImageMLP")), tokenizer=Fresh(lambda _: dg.tokenizers.Identity(1)),
        class_names=["a", "b", "c"], guidance=1.5, batch_size=2, source={"origin": "test"},
    ),
    make_call(
        "DriftPipeline of labels", lambda **given: _pipe(class_names=["a", "b", "c"])(**given), labels=[0,
        "b", 2],
        guidance=1.5, seed=3, num_images=4, output="numpy",
    ),
    make_call(
        "DriftPipeline of a tensor", lambda **given: _pipe()(**given), labels=labels(2, 3), guidance=1.5,
        seed=3,
        num_images=4, output="pil",
    ),
    make_call(
        "DriftPipeline.to", lambda **given: _sampled(dg.DriftPipeline(dg.generators.ImageMLP()).to(**given)),
        device="cpu", dtype=torch.bfloat16,
    ),
    make_call(
        "DriftPipeline.save_pretrained", lambda **given: str(_pipe().save_pretrained(**given)),
        folder=Fresh(lambda folder: str(folder / "saved")), dtype=torch.bfloat16, max_shard_size="5GB",
        overwrite=False,
    ),
    make_call(
        "DriftPipeline.from_pretrained", lambda **given: _sampled(dg.DriftPipeline.from_pretrained(**given)),
        source=Fresh(_saved), weights=None, device="cpu", dtype=torch.float32, tokenizer=None, batch_size=2,
        fp8=False, verify=True,
    ),
    make_call(
        "save_model", lambda **given: str(dg.save_model(**given)), model=Fresh(lambda _: network("ImageMLP")),
        folder=Fresh(lambda folder: str(folder / "saved")), dtype=torch.float16, max_shard_size=10**6,
        overwrite=True, guidance=1.0,
    ),
    make_call(
        "load_model", lambda **given: dg.load_model(**given) and None, source=Fresh(_saved), verify=True
    ),
    make_call("load_official", dg.load_official, folder=Fresh(lambda folder: str(folder / "missing"))),
    make_call("register_generator", _register(dg.register_generator), name="own", cls=OwnGenerator),
    make_call("register_encoder", _register(dg.register_encoder), name="own", cls=OwnEncoder),
    make_call(
        "DriftingPolicy", lambda network, **given: dg.DriftingPolicy(network, **given).predict(
            {STATE: np.zeros((1, 2, 1))}, seed=0),
        network=Fresh(lambda _: network("policy")), device="cpu", source={"origin": "test"},
    ),
    make_call(
        "DriftingPolicy.select_action", _act, seed=1,
        observation=Fresh(lambda _: {STATE: np.array([0.5])}),
    ),
    make_call(
        "DriftingPolicy.predict", lambda **given: dg.DriftingPolicy(network("policy")).predict(**given), True,
        observations=Fresh(lambda _: {STATE: np.zeros((2, 2, 1), np.float32)}), noise=randn(4, 4, 2), seed=1,
    ),
    make_call(
        "DriftingPolicy.from_pretrained", lambda **given: dg.DriftingPolicy.from_pretrained(**given) and None,
        source=Fresh(_saved_policy), weights=None, device="cpu", scheduler=None, calls=None, verify=True,
    ),
    make_call("tokenizers.Identity", dg.tokenizers.Identity, channels=3),
    make_call(
        "tokenizers.build_tokenizer", dg.tokenizers.build_tokenizer, options={"kind": "identity",
        "channels": 3},
    ),
    make_call(
        "evaluation.precision_recall", precision_recall, real=randn(8, 3), generated=randn(7, 3), k=2,
        chunk=4,
    ),
    make_call(
        "evaluation.density_coverage", density_coverage, real=randn(8, 3), generated=randn(7, 3), k=2,
        chunk=4,
    ),
    make_call("data.toy", lambda name: dg.data.toy.get_toy(name).sample(4), name="swiss-roll"),
]  # fmt: skip
RUNS = [
    make_call(
        "train", _train, False, False, recipe="digits", out=Fresh(_out), device="cpu", name="run",
        override=False,
        init=None, state=None, size=None, pretrain=False, changes=RUN,
    ),
    make_call(
        "train on arrays", _train, False, False, recipe="digits", out=Fresh(_out), device="cpu",
        data=Fresh(_images), generator=Fresh(lambda _: dg.generators.ImageMLP(num_classes=3, hidden_size=16)),
        encoders=Fresh(lambda _: [OwnEncoder()]),
        changes={key: value for key, value in RUN.items() if key not in ("generator.options", "encoders")},
    ),
    make_call(
        "pretrain", _pretrain, False, False, recipe="mae-digits", out=Fresh(_out), device="cpu", name="run",
        override=False, data=Fresh(_images), state=None, size=None,
        changes={"batch_size": 4, "optim.warmup": 0},
    ),
]  # fmt: skip
CALLS: list[Call] = [*FIELD, *NETWORKS, *FILES, *RUNS]
