"""Small models to export, and runs of the exported files."""

import json
from pathlib import Path

import numpy as np
import torch

from driftgen.generators import ImageMLP, Noise, UNet2D
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.pipeline import DriftPipeline
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.tokenizers import SDVAE, TinyVAE
from tests.support.autoencoders import kl_network, taesd_files
from tests.support.libraries import import_library
from tests.support.pipelines import lively, small

NAMES = ["cat", "dog", "bird", "fish"]
STATISTICS = {
    "action": {"low": [-3, 0], "high": [1, 2]},
    "observation.state": {"low": [0, 0, -4], "high": [5, 1, 4]},
}


def dit():
    return DriftPipeline(small(), class_names=NAMES, guidance=1.5, source={"guidance_range": [1.0, 4.0]})


def unet():
    sizes = {"widths": (16, 32), "blocks": (1, 1), "attention_levels": (1,), "groups": 8, "head_size": 16}
    network = UNet2D(input_size=8, in_channels=3, condition_size=32, num_classes=4, **sizes)
    return DriftPipeline(lively(network))


def mlp(depth=3):
    network = ImageMLP(input_size=8, in_channels=1, num_classes=4, hidden_size=64, depth=depth)
    return DriftPipeline(lively(network))


def latent(folder, kind):
    """Latents of SD-VAE in diffusers' format, or of a tiny autoencoder in two files."""
    if kind == "sd-vae":
        kl_network().save_pretrained(folder)
        tokenizer = SDVAE(folder)
    else:
        tokenizer = TinyVAE.from_files(*taesd_files(folder))
    channels = tokenizer.latent_channels
    network = ImageMLP(input_size=4, in_channels=channels, num_classes=4, hidden_size=16, depth=1)
    return DriftPipeline(lively(network), tokenizer)


CHUNK_OPTIONS = {
    "unet1d": {"widths": [16, 32]},
    "transformer": {"hidden_size": 32, "depth": 1, "causal": True},
    "chunk-mlp": {"hidden_size": 32, "depth": 1},
}


def policy(generator="unet1d", method="drifting", image=False, **options):
    sizes = CHUNK_OPTIONS[generator]
    observations = {"observation.state": [3]} | ({"observation.image": [16, 14, 3]} if image else {})
    network = PolicyNetwork(
        observations,
        2,
        STATISTICS,
        horizon=8,
        executed=4,
        method=method,
        generator=generator,
        options=sizes,
        crop=[12, 12] if image else None,
        image_features=8,
        image_widths=[16],
        keypoints=4,
        **options,
    )
    return DriftingPolicy(lively(network))


def inputs_of(metadata, n, seed=0):
    """Draw n rows of every input that the metadata names."""
    random = np.random.default_rng(seed)
    most = {"labels": (metadata.get("classes") or {}).get("number")}
    most |= {t["input"]: t.get("entries") for t in metadata["noise"]["tensors"]}
    drawn = {}
    for name, about in metadata["inputs"].items():
        shape = [n, *about["shape"][1:]]
        if about["dtype"] == "float32":
            values = random.uniform(1, 4, shape) if name == "alpha" else random.normal(size=shape)
        else:
            values = random.integers(most.get(name) or 256, size=shape)
        drawn[name] = values.astype(about["dtype"])
    return drawn


@torch.no_grad()
def expected(model, inputs):
    """Compute in PyTorch what an exported file of the model must return."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if isinstance(model, DriftingPolicy):
        noise = tensors.pop("noise", torch.zeros(len(next(iter(inputs.values()))), 8, 2))
        return model.predict(tensors, noise)
    generator = getattr(model, "generator", model)
    style = tensors.get("style", torch.zeros(len(inputs["labels"]), 0, dtype=torch.int64))
    samples = generator(Noise(tensors["noise"], style), tensors["labels"], tensors["alpha"])
    return samples.numpy() if generator is model else model.tokenizer.decode(samples).clamp(-1, 1).numpy()


def open_onnx(path):
    """Return a function of the inputs by name, and the metadata of an ONNX file."""
    runtime = import_library("onnxruntime", "InferenceSession")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["driftgen"])
    declared = {value.name: value.shape for value in session.get_inputs()}
    assert declared == {name: about["shape"] for name, about in metadata["inputs"].items()}
    return (lambda inputs: session.run(None, inputs)[0]), metadata


def open_pt2(path):
    """Return the same of a file of torch.export."""
    files = {"driftgen.json": ""}
    program = torch.export.load(Path(path), extra_files=files).module()
    metadata = json.loads(files["driftgen.json"])

    def call(inputs):
        return program(*(torch.from_numpy(inputs[name]) for name in metadata["inputs"])).numpy()

    return call, metadata
