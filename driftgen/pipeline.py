"""DriftPipeline: load a generator, sample images with one network call each, save the model."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from driftgen.errors import InputError, unknown_name
from driftgen.generators.base import Generator, Noise, check_guidance
from driftgen.generators.batched_call import BatchedCall
from driftgen.generators.class_labels import Labels, class_indices
from driftgen.generators.fp8 import check_fp8, has_fp8, use_fp8
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.interop import hub
from driftgen.interop.model_card import describe_generator
from driftgen.interop.saved_config import TOKENIZER, check_overwrite
from driftgen.model_io import CONFIG, load_any, save_model
from driftgen.ops.compile import new_parameters
from driftgen.ops.host_copy import HostCopy, delayed, device_tensor, gather
from driftgen.ops.padding import batches, padded_size
from driftgen.support.checked_arguments import checked
from driftgen.support.distributed import choose_device
from driftgen.support.dtype_names import check_network_dtype
from driftgen.support.images import to_bytes, to_pil
from driftgen.support.untrusted_files import described_by
from driftgen.support.whole_numbers import check_count, check_seed
from driftgen.tokenizers import SDVAE, Identity, Tokenizer, build_tokenizer
from driftgen.tokenizers.protocol import check_tokenizer

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
        self.generator = generator.eval()
        self._tokenizer = tokenizer
        self.class_names = None if class_names is None else list(class_names)
        self.guidance = check_guidance(guidance)
        self.batch_size = batch_size
        self.source = dict(source or {})
        self.evaluated = 0  # samples generated so far
        self.official: dict[str, Any] | None = None  # metadata of the authors' artifact
        self._call: BatchedCall | None = None  # compiled or captured
        config = getattr(generator, "config", None)
        self.num_classes: int | None = getattr(config, "num_classes", None)
        if self.num_classes is None and self.class_names:
            self.num_classes = len(self.class_names)
        self.channels: int | None = getattr(config, "in_channels", None)
        if self.class_names and self.num_classes and len(self.class_names) != self.num_classes:
            raise InputError(
                f"class_names has {len(self.class_names)} names, the generator has {self.num_classes} classes"
            )
        check_tokenizer(tokenizer, self.channels)

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
            verify: compare the weights with the checksums in ``config.json``: about a second per 1-2 GB.
        """
        check_network_dtype(dtype)
        if fp8:
            check_fp8(device)
            dtype = dtype or torch.bfloat16
        check_count("batch_size", batch_size)
        if isinstance(tokenizer, str | Path):
            tokenizer = SDVAE(str(tokenizer))
        check_tokenizer(tokenizer)
        model, folder, facts = load_any(source, weights, verify=verify)
        if not isinstance(model, Generator) or isinstance(model, PolicyNetwork):
            if isinstance(model, PolicyNetwork):
                advice = f"driftgen policy rollout {source}, or DriftingPolicy.from_pretrained in Python"
                raise InputError(f"{source} is a policy, not a generator: {advice}")
            raise InputError(f"{source} is an encoder ({type(model).__name__}), not a generator: give one")
        options, official = facts.pop("tokenizer", None), facts.pop("official", None)
        # Outside the next block, whose messages blame the file.
        check_tokenizer(tokenizer, getattr(getattr(model, "config", None), "in_channels", None))
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
        check_network_dtype(dtype)
        try:
            with new_parameters() if self._call is not None else nullcontext():
                self.generator.to(device=device, dtype=dtype)
            if isinstance(self._tokenizer, nn.Module):
                self._tokenizer.to(device=device)
        except (RuntimeError, AssertionError) as error:
            choose_device(device)  # the usual reasons: an unknown name, no GPU
            raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
        if self._call is not None:
            self._call.forget()
        return self

    def compile(self, *, graphs: bool = True, max_graphs: int = 4) -> DriftPipeline:
        """Compile the blocks of the generator in place, and return the pipeline.

        Images change by rounding only, as they do between batch sizes. All batches of a call are padded to
        one size: ``batch_size``, or the next power of two for fewer samples; with graphs, a single batch of
        128 or more is split, into 32 and the rest, or into batches of 64 if it is not full. The first call of
        each size compiles, which takes about a minute.

        Args:
            graphs: on an NVIDIA GPU, capture the network call in a CUDA graph and replay it. Move such a
                pipeline by :meth:`to`, not its generator.
            max_graphs: number of batch sizes whose graphs are kept, the most recent ones.
        """
        self._call = BatchedCall(self.generator, compiled=True, graphs=graphs, max_graphs=max_graphs)
        return self

    def capture(self, max_graphs: int = 4) -> DriftPipeline:
        """Capture the network call in CUDA graphs without compiling it, and return the pipeline.

        Captures take seconds, and images keep their bits. Batches are padded as by :meth:`compile`, on every
        device; graphs exist on NVIDIA GPUs alone.
        """
        self._call = BatchedCall(self.generator, compiled=False, graphs=True, max_graphs=max_graphs)
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
                        f"the samples are latents, and their tokenizer is missing: {error} as tokenizer "
                        "(--tokenizer), or sample latents with output='latent' (--latents)"
                    ) from None
            else:
                raise InputError(
                    f"the samples are latents of {self.channels} channels: give their tokenizer "
                    "(--tokenizer), or sample latents with output='latent' (--latents)"
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
        if output == "pil":
            parts = self.stream(chosen, guidance=guidance, seed=seed, output=output)
            return [image for part in parts for image in part]
        launches = self._launches(chosen, guidance, seed, output)
        samples = gather(delayed(launches, self.device), len(chosen))
        return samples.numpy() if output == "numpy" else samples

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
        for copy in delayed(self._launches(labels, guidance, seed, output, skip), self.device):
            yield self._finished(copy, output)

    def _launches(
        self, labels: Sequence[int], guidance: float | None, seed: int | None, output: Output, skip: int = 0
    ) -> Iterator[HostCopy]:
        alpha = self.check(guidance=guidance, seed=seed, output=output)
        rng = torch.Generator()
        rng.seed() if seed is None else rng.manual_seed(int(seed))
        for start in range(0, skip, self.batch_size):
            self._noise(min(skip - start, self.batch_size), rng)
        split = batches if self._call is None else self._call.batches
        sizes = split(len(labels) - skip, self.batch_size)
        places = itertools.pairwise(itertools.accumulate(sizes, initial=skip))
        parts = [labels[start:end] for start, end in places]
        noise = self._noise(len(parts[0]), rng) if parts else None
        for part, size, following in itertools.zip_longest(parts, sizes, parts[1:]):
            launched = self._launch(part, [alpha] * len(part), noise, size, output)
            if following:
                noise = self._noise(len(following), rng)  # while the GPU computes the samples
            yield launched

    def noise(self, n: int, seed: int) -> Any:
        """Draw the noise of images 0 to n - 1 of a seed, on the device of the generator."""
        check_seed("seed", seed)
        return self._noise(n, torch.Generator().manual_seed(int(seed)))

    def generate(
        self,
        noise: Any,
        labels: Sequence[int],
        guidance: Sequence[float],
        *,
        size: int | None = None,
        output: Output = "numpy",
    ) -> Any:
        """Sample one batch from given noise, with one label and one α per row.

        ``size`` is the number of rows that a compiled or captured call is padded to: the next power of two,
        at most ``batch_size``, if None.
        """
        size = padded_size(len(labels), self.batch_size) if size is None else size
        return self._finished(self._launch(labels, guidance, noise, size, output), output)

    def check(
        self, *, guidance: float | None = None, seed: int | None = None, output: Output = "pil"
    ) -> float:
        """Check the arguments of a call, load the tokenizer that it needs, and return its α."""
        if not isinstance(output, str) or output not in OUTPUTS:
            raise unknown_name("output", output, OUTPUTS)
        check_seed("seed", seed)
        alpha = self.guidance if guidance is None else check_guidance(guidance)
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
    def _noise(self, n: int, rng: torch.Generator) -> Any:
        noise = self.generator.sample_noise(n, rng)
        return noise.to(self.device) if isinstance(noise, Noise) else noise

    @torch.inference_mode()
    def _launch(
        self, labels: Sequence[int], guidance: Sequence[float], noise: Any, size: int, output: Output
    ) -> HostCopy:
        """Queue a batch on the device, from noise to what the host needs of its samples."""
        self.evaluated += len(labels)
        classes = device_tensor(labels, torch.int64, self.device)
        alphas = device_tensor(guidance, torch.float32, self.device)
        if self._call is None or not isinstance(noise, Noise):
            samples = self.generator(noise, classes, alphas).float()
        else:
            samples = self._call(noise, classes, alphas, size)
        if output == "latent":
            return HostCopy(samples)
        if self.channels is None:
            self.channels = samples.shape[1]
        images = self.tokenizer.decode(samples).float()
        return HostCopy(images.clamp(-1, 1) if output == "tensor" else to_bytes(images))

    def _finished(self, copy: HostCopy, output: Output) -> Any:
        host = copy.wait()
        if output in ("latent", "tensor"):
            return host
        return to_pil(host.numpy()) if output == "pil" else host.numpy()
