"""DriftPipeline: load a generator, sample images with one network call each, save the model."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.generators.base import Generator, Noise
from driftgen.generators.class_labels import Labels, class_indices
from driftgen.generators.fp8 import check_fp8, has_fp8, use_fp8
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.interop import hub
from driftgen.interop.model_card import describe_generator
from driftgen.interop.saved_config import TOKENIZER, check_overwrite
from driftgen.model_io import CONFIG, load_any, save_model
from driftgen.ops.compile import compile_parts, new_parameters
from driftgen.ops.cuda_graphs import GraphedFunction, check_compiler, static_shapes
from driftgen.support.checked_arguments import checked, show_value
from driftgen.support.dense_tensors import check_count, check_seed
from driftgen.support.download import first_line
from driftgen.support.images import to_pil, to_uint8
from driftgen.support.untrusted_files import described_by
from driftgen.tokenizers import SDVAE, Identity, Tokenizer, build_tokenizer

__all__ = ["DriftPipeline"]

Output = Literal["pil", "tensor", "numpy", "latent"]
OUTPUTS = ("pil", "tensor", "numpy", "latent")


class DriftPipeline:
    """x = decode(f(ε, c, α)): images from labels, one call of the generator per image.

    Example::

        pipe = DriftPipeline.from_pretrained("runs/cifar10", device="cuda")
        images = pipe(labels=[3, 5], guidance=1.5, seed=0)

    Args:
        generator: f, any network with the two methods of :class:`~driftgen.generators.Generator`.
        tokenizer: decodes samples to images; None if samples are images.
        class_names: name of each label, in order; a call then accepts names as labels.
        guidance: default α.
        batch_size: samples generated at a time; bounds the memory.
        source: origin of the weights, for the model card.
    """

    @checked
    def __init__(
        self,
        generator: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        class_names: Sequence[str] | None = None,
        guidance: float = 1.0,
        batch_size: int = 32,
        source: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(generator, Generator):
            raise InputError(
                f"generator is a {type(generator).__name__}: it needs forward(noise, labels, alpha) and "
                "sample_noise(n, generator)"
            )
        check_count("batch_size", batch_size)
        if tokenizer is not None and not hasattr(tokenizer, "latent_channels"):
            raise InputError(f"tokenizer={show_value(tokenizer)} must have decode and latent_channels")
        self.generator = generator.eval()
        self._tokenizer = tokenizer
        self.class_names = None if class_names is None else list(class_names)
        self.guidance = _checked_guidance(guidance)
        self.batch_size = batch_size
        self.source = dict(source or {})
        self.evaluated = 0  # samples generated so far
        self.official: dict[str, Any] | None = None  # metadata of the authors' artifact
        self._compiled: Callable[..., Tensor] | None = None
        self._graphed: GraphedFunction | None = None
        config = getattr(generator, "config", None)
        self.num_classes: int | None = getattr(config, "num_classes", None)
        if self.num_classes is None and self.class_names:
            self.num_classes = len(self.class_names)
        self.channels: int | None = getattr(config, "in_channels", None)
        if self.class_names and self.num_classes and len(self.class_names) != self.num_classes:
            raise InputError(
                f"class_names has {len(self.class_names)} names, the generator has {self.num_classes} classes"
            )
        if tokenizer is not None and self.channels not in (None, tokenizer.latent_channels):
            raise InputError(
                f"the tokenizer decodes {tokenizer.latent_channels} channels, "
                f"the generator produces {self.channels}"
            )

    def __repr__(self) -> str:
        latents = self._tokenizer is not None and not isinstance(self._tokenizer, Identity)
        facts = describe_generator(
            self.generator, self.num_classes, self.class_names, self._tokenizer if latents else None
        )
        dtype = str(next(self.generator.parameters()).dtype).removeprefix("torch.")
        return f"DriftPipeline({', '.join([*facts, f'guidance {self.guidance:g}', str(self.device), dtype])})"

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        weights: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        batch_size: int = 32,
        fp8: bool = False,
        verify: bool = True,
    ) -> DriftPipeline:
        """Load a saved model, a training run, one of the authors' artifacts, or a model on the Hub.

        Args:
            source: a folder of one of these kinds, the name of a model of the package (``digits``),
                ``owner/repository``, or ``hf://name`` for a model of the authors' release, such as
                ``hf://ablation``.
            weights: set of a run's weights: an average such as ``ema-0.999``, ``live`` for the trained ones,
                or ``best``; the first average if None.
            device: device of the generator; the CPU if None.
            dtype: dtype of the generator; that of the file if None, or bfloat16 with ``fp8``.
            tokenizer: replaces the model's own tokenizer: a module, or the folder or Hub name of an SD-VAE.
            batch_size: samples generated at a time.
            fp8: run the large matrix products of a DiT in FP8, on GPUs that support it; faster together with
                :meth:`compile`. Such a pipeline cannot be saved.
            verify: compare the weights with the checksums in ``config.json``: a second per GB or two.
        """
        if fp8:
            check_fp8(device)
            dtype = dtype or torch.bfloat16
        if isinstance(tokenizer, str | Path):
            tokenizer = SDVAE(str(tokenizer))
        model, folder, facts = load_any(source, weights, verify=verify)
        if not isinstance(model, Generator) or isinstance(model, PolicyNetwork):
            kind = "a policy, see DriftingPolicy" if isinstance(model, PolicyNetwork) else "an encoder"
            raise InputError(f"{folder} holds a {type(model).__name__}, which is {kind}: give a generator")
        options, official = facts.pop("tokenizer", None), facts.pop("official", None)
        with described_by(folder / CONFIG, "the description of a pipeline"):
            if tokenizer is None and options is not None:
                tokenizer = build_tokenizer(options, folder / TOKENIZER)
            pipe = cls(model, tokenizer, batch_size=batch_size, **facts)
        pipe.official = official
        pipe.to(device, dtype)
        if fp8:
            use_fp8(model)
        return pipe

    @checked
    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> DriftPipeline:
        """Move the generator and the tokenizer, and return the pipeline. The tokenizer keeps its dtype."""
        try:
            with new_parameters() if self._compiled is not None else nullcontext():
                self.generator.to(device=device, dtype=dtype)
            if isinstance(self._tokenizer, nn.Module):
                self._tokenizer.to(device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
        if self._graphed is not None:
            self._graphed.forget()
        return self

    def compile(self, *, graphs: bool = True) -> DriftPipeline:
        """Compile the blocks of the generator in place, and return the pipeline.

        Images change by rounding only, as they do between batch sizes. All batches of a call are padded to
        one size: ``batch_size``, or the next power of two for fewer samples. The first call of each size
        compiles, which takes about a minute.

        Args:
            graphs: on an NVIDIA GPU, capture the network call in a CUDA graph and replay it. Graphs of the
                four most recent batch sizes are kept. Move such a pipeline by :meth:`to`, not its generator.
        """
        try:
            check_compiler(self.device)
            compile_parts(self.generator)
        except RuntimeError as error:
            raise InputError(f"torch.compile fails: {first_line(error)}; sample without compile") from None
        self._compiled = functools.partial(_evaluate, self.generator)
        self._graphed = GraphedFunction(self._compiled) if graphs else None
        return self

    @property
    def device(self) -> torch.device:
        """Device of the generator."""
        return next(self.generator.parameters()).device

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that decodes samples. By default samples of 1 or 3 channels are images, and samples
        of 4 channels are latents of SD-VAE, which is loaded on first use.
        """
        if self._tokenizer is None:
            if self.channels in (None, 1, 3):
                return Identity(self.channels or 3)
            elif self.channels == 4:
                try:
                    self._tokenizer = SDVAE().to(self.device)
                except InputError as error:
                    raise InputError(
                        f"the samples are latents, and their tokenizer is missing: {error} as tokenizer, "
                        "or sample latents with output='latent'"
                    ) from None
            else:
                raise InputError(
                    f"the samples are latents of {self.channels} channels: give their tokenizer, "
                    "or sample latents with output='latent'"
                )
        return self._tokenizer

    def __call__(
        self,
        labels: Labels = None,
        *,
        guidance: float | None = None,
        seed: int | None = None,
        num_images: int | None = None,
        output: Output = "pil",
    ) -> Any:
        """Sample images, one network call per image.

        Args:
            labels: one class, or one per image, by index or by name; None cycles through all classes.
            guidance: α, 1 (none) or more; the model's default if None.
            seed: image i of a seed depends neither on the number of images nor on the batch size.
            num_images: number of images, with labels repeated in turn; one image per label if None.
            output: ``"pil"`` for a list of PIL images, ``"numpy"`` for uint8 ``[B, H, W, C]``, ``"tensor"``
                for floats ``[B, C, H, W]`` in [-1, 1], ``"latent"`` for the output of the generator.
        """
        chosen = self.labels(labels, num_images)
        parts = list(self.stream(chosen, guidance=guidance, seed=seed, output=output))
        if output == "pil":
            return [image for part in parts for image in part]
        return np.concatenate(parts) if output == "numpy" else torch.cat(parts)

    def stream(
        self,
        labels: Sequence[int],
        *,
        guidance: float | None = None,
        seed: int | None = None,
        output: Output = "pil",
        skip: int = 0,
    ) -> Iterator[Any]:
        """Yield the images of a call batch by batch, for more images than fit into memory.

        ``skip`` omits the first images.
        """
        alpha = self.check(guidance=guidance, seed=seed, output=output)
        randomness = torch.Generator().manual_seed(torch.seed() if seed is None else int(seed))
        for start in range(0, skip, self.batch_size):
            self._noise(min(skip - start, self.batch_size), randomness)
        size = _size(len(labels) - skip, self.batch_size)
        parts = [labels[i : i + self.batch_size] for i in range(skip, len(labels), self.batch_size)]
        noise = self._noise(len(parts[0]), randomness) if parts else None
        for part, following in itertools.zip_longest(parts, parts[1:]):
            samples = self._samples(part, alpha, noise, size)
            if following:
                noise = self._noise(len(following), randomness)  # while the GPU computes the samples
            yield self._finished(samples, output)

    def check(
        self, *, guidance: float | None = None, seed: int | None = None, output: Output = "pil"
    ) -> float:
        """Check the arguments of a call, load the tokenizer that it needs, and return its α."""
        if not isinstance(output, str) or output not in OUTPUTS:
            raise unknown_name("output", output, OUTPUTS)
        check_seed("seed", seed)
        alpha = self.guidance if guidance is None else _checked_guidance(guidance)
        if output != "latent":
            _ = self.tokenizer
        return alpha

    def labels(self, labels: Labels = None, num_images: int | None = None) -> list[int]:
        """Return the class index of each image of a call with these arguments."""
        return class_indices(labels, num_images, self.num_classes, self.class_names)

    @checked
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> Path:
        """Save the model as config.json, model.safetensors and README.md, with the tokenizer if it has one.

        The options are those of :func:`driftgen.save_model`.
        """
        if has_fp8(self.generator):
            raise InputError("a pipeline with fp8 cannot be saved: load the model without fp8 and save that")
        place = Path(folder)
        check_overwrite(place, overwrite)
        tokenizer = None
        if self._tokenizer is not None:
            tokenizer = self._tokenizer.options()
            if not isinstance(self._tokenizer, Identity):
                self._tokenizer.save(place / TOKENIZER)
        facts = {"tokenizer": tokenizer, "class_names": self.class_names, "source": self.source}
        return save_model(
            self.generator,
            place,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=True,  # checked before the tokenizer was written
            guidance=self.guidance,
            official=self.official,
            **facts,
        )

    def push_to_hub(self, repository: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Save the model to ``owner/repository`` on the Hugging Face Hub and return its address."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.upload(Path(folder), repository, private=private, token=token)

    # In inference mode like the network call: other tensors would trigger a second compilation.
    @torch.inference_mode()
    def _noise(self, n: int, randomness: torch.Generator) -> Any:
        noise = self.generator.sample_noise(n, randomness)
        return noise.to(self.device) if isinstance(noise, Noise) else noise

    @torch.inference_mode()
    def _samples(self, labels: Sequence[int], alpha: float, noise: Any, size: int) -> Tensor:
        self.evaluated += len(labels)
        classes = torch.tensor(labels, device=self.device)
        alphas = torch.full((len(labels),), alpha, device=self.device)
        if self._compiled is None or not isinstance(noise, Noise):
            return self.generator(noise, classes, alphas).float()  # type: ignore[no-any-return]
        call = self._graphed if self._graphed is not None and self.device.type == "cuda" else self._compiled
        try:
            return call(*(_padded(x, size) for x in (*noise, classes, alphas)))[: len(labels)]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(f"torch.compile fails: {first_line(error)}; sample without compile") from None

    @torch.inference_mode()
    def _finished(self, samples: Tensor, output: Output) -> Any:
        if output == "latent":
            return samples.cpu()
        if self.channels is None:
            self.channels = samples.shape[1]
        images = self.tokenizer.decode(samples).float()
        if output == "tensor":
            return images.clamp(-1, 1).cpu()
        return to_pil(to_uint8(images)) if output == "pil" else to_uint8(images)


def _evaluate(generator: Generator, gaussian: Tensor, style: Tensor, labels: Tensor, alpha: Tensor) -> Tensor:
    with static_shapes():
        return generator(Noise(gaussian, style), labels, alpha).float()


def _size(count: int, most: int) -> int:
    """Batch size of a compiled generator: a power of two or ``most``, since every size is compiled."""
    return most if count >= most else min(most, 1 << (count - 1).bit_length())


def _padded(rows: Tensor, size: int) -> Tensor:
    """Pad to ``size`` rows by repeating the last one."""
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def _checked_guidance(alpha: float) -> float:
    if not isinstance(alpha, Real) or not 1 <= alpha <= 1e6:
        raise InputError(f"guidance={show_value(alpha)} must be 1 (none) or more, at most 1e6")
    return float(alpha)
