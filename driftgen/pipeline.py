"""DriftPipeline: load a generator, sample images with one network call each, save it."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.generators.base import Generator, Noise
from driftgen.generators.fp8 import check_fp8, has_fp8, use_fp8
from driftgen.interop import hub
from driftgen.interop.convert import load_any
from driftgen.model_io import CONFIG, save_model
from driftgen.ops.compile import compile_parts
from driftgen.ops.cuda_graphs import GraphedFunction, check_compiler, static_shapes
from driftgen.support.images import to_pil, to_uint8
from driftgen.tokenizers import SDVAE, Identity, Tokenizer, build_tokenizer

__all__ = ["RUN_MODEL", "DriftPipeline", "find_model"]

Output = Literal["pil", "tensor", "numpy", "latent"]
OUTPUTS = ("pil", "tensor", "numpy", "latent")
TOKENIZER = "tokenizer"  # the folder of the tokenizer inside that of a model
RUN_MODEL = "model"  # the folder of the model inside that of a training run


class DriftPipeline:
    """x = decode(f(ε, c, α)): images from labels, one evaluation of the generator each.

    Example::

        pipe = DriftPipeline.from_pretrained("runs/cifar10", device="cuda")
        images = pipe(labels=[3, 5], guidance=1.5, seed=0)

    Args:
        generator: f, any network with the two methods of :class:`~driftgen.generators.Generator`.
        tokenizer: turns samples into images; None means that samples are images.
        class_names: the name of each label, in order; names can then be given as labels.
        guidance: α where a call names none.
        batch_size: samples made at a time, which bounds the memory.
        source: where the weights come from, for the model card.
    """

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
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size} must be at least 1")
        self.generator = generator.eval()
        self._tokenizer = tokenizer
        self.class_names = None if class_names is None else list(class_names)
        self.guidance = _checked_guidance(guidance)
        self.batch_size = batch_size
        self.source = dict(source or {})
        self.evaluated = 0  # samples that the generator has been called for
        self.official: dict[str, Any] | None = None  # what the authors' artifact said of itself
        self._compiled: Callable[..., Tensor] | None = None
        self._graphed: GraphedFunction | None = None
        config = getattr(generator, "config", None)
        self.num_classes: int | None = getattr(config, "num_classes", None)
        self.channels: int | None = getattr(config, "in_channels", None)
        if self.class_names and self.num_classes and len(self.class_names) != self.num_classes:
            raise InputError(
                f"class_names has {len(self.class_names)} names, the generator {self.num_classes} classes"
            )
        if tokenizer is not None and self.channels not in (None, tokenizer.latent_channels):
            raise InputError(
                f"the tokenizer has latents of {tokenizer.latent_channels} channels, "
                f"the generator makes {self.channels}"
            )

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        batch_size: int = 32,
        fp8: bool = False,
    ) -> DriftPipeline:
        """Loads a saved model, a training run, one of the authors' artifacts, or a name on the Hub.

        Args:
            source: a folder of one of these kinds, ``owner/repository``, or ``hf://ablation`` and the like.
            device: where to put it; the CPU if None.
            dtype: number type of the generator; that of the file if None, with ``fp8`` bfloat16.
            tokenizer: in place of the model's own: a module, or the folder or Hub name of an SD-VAE.
            batch_size: samples made at a time.
            fp8: the large products of a DiT in 8-bit numbers, on GPUs that have them; pays with
                :meth:`compile`. Such a pipeline samples and cannot be saved.
        """
        if fp8:
            check_fp8(device)
            dtype = dtype or torch.bfloat16
        folder = find_model(str(source))
        if isinstance(tokenizer, str | Path):
            tokenizer = SDVAE(str(tokenizer))
        model, facts = load_any(folder, str(source))
        if not isinstance(model, Generator):
            raise InputError(f"{folder} holds a {type(model).__name__}, which is an encoder: no generator")
        described, official = facts.pop("tokenizer", None), facts.pop("official", None)
        if tokenizer is None and described is not None:
            tokenizer = build_tokenizer(described, folder / TOKENIZER)
        pipe = cls(model, tokenizer, batch_size=batch_size, **facts)
        pipe.official = official
        pipe.to(device, dtype)
        if fp8:
            use_fp8(model)
        return pipe

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> DriftPipeline:
        """Moves the generator (and the tokenizer, which keeps its number type) and returns the pipeline."""
        try:
            with _new_parameters() if self._compiled is not None else nullcontext():
                self.generator.to(device=device, dtype=dtype)
            if isinstance(self._tokenizer, nn.Module):
                self._tokenizer.to(device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
        if self._graphed is not None:
            self._graphed.forget()
        return self

    def compile(self, *, graphs: bool = True) -> DriftPipeline:
        """Compiles the generator piece by piece, in place, and returns the pipeline.

        Images change by rounding alone, as between batch sizes. All batches of a call then have one size, at
        most ``batch_size`` and otherwise a power of two, with samples in excess thrown away: the first call
        of each size compiles, and takes a minute.

        Args:
            graphs: on an NVIDIA GPU, record the whole network call as a CUDA graph and replay it; the four
                sizes used last are kept. Move such a pipeline by :meth:`to`, not its generator.
        """
        try:
            check_compiler(self.device)
            compile_parts(self.generator)
        except RuntimeError as error:
            raise _not_compiled(error) from None
        self._compiled = functools.partial(_evaluate, self.generator)
        self._graphed = GraphedFunction(self._compiled) if graphs else None
        return self

    @property
    def device(self) -> torch.device:
        """Where the generator is."""
        return next(self.generator.parameters()).device

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns samples into images. Latents of 4 channels are those of SD-VAE unless told otherwise,
        and it is loaded when first needed.
        """
        if self._tokenizer is None:
            if self.channels in (None, 1, 3):
                self._tokenizer = Identity(self.channels or 3)
            elif self.channels == 4:
                try:
                    self._tokenizer = SDVAE().to(self.device)
                except InputError as error:
                    raise InputError(
                        f"the samples are latents, and to decode them: {error} (as tokenizer), "
                        "or ask for the latents themselves"
                    ) from None
            else:
                raise InputError(
                    f"the samples are latents of {self.channels} channels: name their tokenizer, "
                    "or ask for latents"
                )
        return self._tokenizer

    def __call__(
        self,
        labels: int | str | Sequence[int | str] | Tensor | None = None,
        *,
        guidance: float | None = None,
        seed: int | None = None,
        num_images: int | None = None,
        output: Output = "pil",
    ) -> Any:
        """Images, one network evaluation each.

        Args:
            labels: a class, or one per image, by number or by name; None goes through all classes in turn.
            guidance: α, 1 (none) or more; that of the model if None.
            seed: image i of a seed is the same whatever the number of images and the batch size.
            num_images: how many come back; labels are repeated in turn. As many as labels if None.
            output: ``"pil"`` for a list of PIL images, ``"numpy"`` for bytes ``[B, H, W, C]``, ``"tensor"``
                for floats ``[B, C, H, W]`` in [-1, 1], ``"latent"`` for what the generator made.
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
        """The same as a call, batch by batch, for more images than memory holds; ``skip`` passes over the
        first ones.
        """
        alpha = self.check(guidance=guidance, seed=seed, output=output)
        randomness = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
        decode = None if output == "latent" else self.tokenizer.decode
        for start in range(0, skip, self.batch_size):
            self._noise(min(skip - start, self.batch_size), randomness)
        size = _size(len(labels) - skip, self.batch_size)
        parts = [labels[i : i + self.batch_size] for i in range(skip, len(labels), self.batch_size)]
        noise = self._noise(len(parts[0]), randomness) if parts else None
        for part, following in itertools.zip_longest(parts, parts[1:]):
            samples = self._samples(part, alpha, noise, size)
            if following:
                noise = self._noise(len(following), randomness)  # while a GPU is busy with the samples
            yield self._finished(samples, decode, output)

    def check(
        self, *, guidance: float | None = None, seed: int | None = None, output: Output = "pil"
    ) -> float:
        """Whether a call with these arguments can be made, its tokenizer included; returns its α."""
        if output not in OUTPUTS:
            raise unknown_name("output", output, OUTPUTS)
        if seed is not None and not 0 <= seed < 2**63:
            raise InputError(f"seed={seed} must be a whole number from 0 to 2^63 - 1")
        alpha = self.guidance if guidance is None else _checked_guidance(guidance)
        _ = None if output == "latent" else self.tokenizer
        return alpha

    def labels(
        self, labels: int | str | Sequence[int | str] | Tensor | None = None, num_images: int | None = None
    ) -> list[int]:
        """The class number of each image that a call with these arguments would make."""
        if num_images is not None and num_images < 1:
            raise InputError(f"num_images={num_images} must be at least 1")
        if labels is None:
            given: Sequence[Any] = range(self.num_classes or 1)[:num_images]
        elif isinstance(labels, Tensor | np.ndarray):
            given = labels.reshape(-1).tolist()
        else:
            given = [labels] if isinstance(labels, int | str) else labels
        if len(given) == 0:
            raise InputError("labels is empty: give at least one class")
        if num_images is not None and num_images < len(given):
            raise InputError(f"num_images={num_images} is less than the {len(given)} labels")
        numbers = [self._number(label) for label in given]
        return [numbers[i % len(numbers)] for i in range(num_images or len(numbers))]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes config.json, model.safetensors and README.md, and the tokenizer's folder if it has one."""
        if has_fp8(self.generator):
            raise InputError("a pipeline with fp8 cannot be saved: load the model without, and save that")
        place = Path(folder)
        tokenizer = None
        if self._tokenizer is not None:
            tokenizer = self._tokenizer.options()
            if not isinstance(self._tokenizer, Identity):
                self._tokenizer.save(place / TOKENIZER)
        facts = {"tokenizer": tokenizer, "class_names": self.class_names, "source": self.source}
        return save_model(self.generator, place, guidance=self.guidance, official=self.official, **facts)

    def push_to_hub(self, repository: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Saves the model to ``owner/repository`` on the Hugging Face Hub and returns its address."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.upload(Path(folder), repository, private=private, token=token)

    # In this mode as the rest is: a tensor from outside of it would be compiled for again.
    @torch.inference_mode()
    def _noise(self, n: int, randomness: torch.Generator) -> Any:
        return self.generator.sample_noise(n, randomness)

    @torch.inference_mode()
    def _samples(self, labels: Sequence[int], alpha: float, noise: Any, size: int) -> Tensor:
        self.evaluated += len(labels)
        numbers = torch.tensor(labels, device=self.device)
        alphas = torch.full((len(labels),), alpha, device=self.device)
        if self._compiled is None or not isinstance(noise, Noise):
            return self.generator(noise, numbers, alphas).float()  # type: ignore[no-any-return]
        call = self._graphed if self._graphed is not None and self.device.type == "cuda" else self._compiled
        try:
            return call(*(_filled(x, size) for x in (*noise, numbers, alphas)))[: len(labels)]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _not_compiled(error) from None

    @torch.inference_mode()
    def _finished(self, samples: Tensor, decode: Callable[[Tensor], Tensor] | None, output: Output) -> Any:
        if decode is None:
            return samples.cpu()
        images = decode(samples).float()
        if output == "tensor":
            return images.clamp(-1, 1).cpu()
        return to_pil(to_uint8(images)) if output == "pil" else to_uint8(images)

    def _number(self, label: Any) -> int:
        if isinstance(label, str):
            if self.class_names is None:
                raise InputError(
                    f"labels: the model knows no class names, give a number in place of {label!r}"
                )
            if label not in self.class_names:
                raise unknown_name("labels", label, self.class_names)
            return self.class_names.index(label)
        known = range(self.num_classes or 2**31)
        if isinstance(label, float) or label not in known:
            last = "" if self.num_classes is None else f" to {self.num_classes - 1}"
            raise InputError(f"labels: {label} is no class of this model, they go from 0{last}")
        return int(label)


def find_model(source: str) -> Path:
    """The folder to load from: the given one, the model in a run, or a download."""
    folder = Path(source)
    if not source.startswith("hf://") and folder.exists():
        run = folder / RUN_MODEL
        return run if (run / CONFIG).is_file() and not (folder / CONFIG).is_file() else folder
    if hub.is_hub_name(source):
        return hub.fetch(source)
    raise InputError(f"{source} does not exist: give a folder, owner/repository, or hf://name")


def _evaluate(generator: Generator, gaussian: Tensor, style: Tensor, labels: Tensor, alpha: Tensor) -> Tensor:
    with static_shapes():
        return generator(Noise(gaussian, style), labels, alpha).float()


@contextmanager
def _new_parameters() -> Iterator[None]:
    """A conversion makes new parameters instead of changing those that are there, which PyTorch 2.11 takes
    for unchanged: compiled code would go on with their former type.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _size(count: int, most: int) -> int:
    """Samples of each batch of a compiled generator: few sizes, as each is compiled."""
    return most if count >= most else min(most, 1 << (count - 1).bit_length())


def _filled(rows: Tensor, size: int) -> Tensor:
    """As many rows as told, the last one repeated."""
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def _not_compiled(error: RuntimeError) -> InputError:
    why = next(iter(str(error).splitlines()), type(error).__name__)
    return InputError(f"torch.compile fails here: {why}; sample without it")


def _checked_guidance(alpha: float) -> float:
    if not 1 <= alpha < float("inf"):
        raise InputError(f"guidance={alpha} must be 1 (none) or more")
    return float(alpha)
