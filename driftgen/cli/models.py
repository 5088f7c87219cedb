"""Commands for trained models: ``sample``, ``export``, ``convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftgen.cli.help_format import App
from driftgen.cli.options import Device, SavedDtype, Tokenizer, Weights, folder_of_model
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.pipeline import DriftPipeline

__all__ = ["convert", "export", "sample"]

Target = Annotated[Path, typer.Argument(help="Output folder.", show_default=False)]


def sample(
    model: Annotated[
        str,
        typer.Argument(
            help="Packaged model (cifar10, digits), saved model, run, artifact of the authors, "
            "owner/repository, hf://name.",
            show_default=False,
        ),
    ],
    labels: Annotated[
        str | None, typer.Option(help="Classes: 3,5 or 0-9 or names. Default: all in turn.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--number", "-n", help="Number of images. Default: one per label.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance alpha, 1 (none) or more. Default: the model's own.")
    ] = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option(help="Seed: image i of a seed is always the same.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: runs/samples/NAME of the model.")
    ] = None,
    tokenizer: Tokenizer = None,
    latents: Annotated[bool, typer.Option("--latents", help="Write latents instead of images.")] = False,
    device: Device = None,
    dtype: SavedDtype = "as saved",
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 32,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the generator: pays off for many images.")
    ] = False,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="FP8 matrix products of a DiT, on NVIDIA GPUs with FP8.")
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Skip the checksums of the weights: saves about a second per 1-2 GB."
        ),
    ] = False,
) -> None:
    """Sample images with one network call each: PNG files and a contact sheet, grid.png."""
    from driftgen.pipeline import DriftPipeline
    from driftgen.report.sample_folder import parse_labels, write_latents, write_samples
    from driftgen.support.distributed import choose_device
    from driftgen.support.dtype_names import parse_dtype
    from driftgen.support.progress import track

    pipe = DriftPipeline.from_pretrained(
        model,
        weights=weights,
        device=choose_device(device),
        dtype=parse_dtype(dtype),
        tokenizer=tokenizer,
        batch_size=batch_size,
        fp8=fp8,
        verify=not no_verify,
    )
    if latents:
        _check_latents(pipe, model)
    if compiled:
        pipe.compile()
    out = out or folder_of_model("samples", model)
    try:
        chosen = pipe.labels(parse_labels(labels), number)
    except InputError as error:  # in the words of the Python call
        raise InputError(str(error).replace("num_images=", "--number=")) from None
    alpha = pipe.check(guidance=guidance, seed=seed, output="latent" if latents else "pil")
    if latents:
        print(write_latents(pipe, out, chosen, guidance=alpha, seed=seed))
        return
    about: dict[str, Any] = {"model": model, "dtype": dtype, "tokenizer": tokenizer}
    # None instead of False, so that folders written before these options existed can be completed.
    about |= {"compile": compiled or None, "fp8": fp8 or None, "weights": weights}
    about["step"] = pipe.source.get("step")  # a run that continues replaces its model
    with track("sampling", len(chosen), "network calls per image") as on_step:
        sheet = write_samples(pipe, out, chosen, guidance=alpha, seed=seed, about=about, on_step=on_step)
    print(sheet)


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="Packaged model (cifar10, digits), saved model or policy, run, artifact, owner/repository, hf://name.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="File to write: NAME.onnx or NAME.pt2.", show_default=False)],
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="onnx, or pt2 for torch.export. Default: the ending of the file."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Stored weights: float32, float16 or int8. The graph computes in float32.")
    ] = "float32",
    weights: Weights = None,
    tokenizer: Tokenizer = None,
    latents: Annotated[
        bool, typer.Option("--latents", help="Leave out the decoder: the output is latents.")
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Skip the checksums of the weights: saves about a second per 1-2 GB."
        ),
    ] = False,
) -> None:
    """Export a generator or a policy to ONNX or torch.export: noise, labels and alpha in, images out."""
    from driftgen.interop.model_sources import holds_policy
    from driftgen.interop.onnx import check_export, export_model

    file_format = file_format or ("pt2" if out.suffix == ".pt2" else "onnx")
    check_export(out, file_format, dtype)
    loaded: Any
    options: dict[str, Any] = {"weights": weights, "verify": not no_verify}
    if holds_policy(model, weights):
        from driftgen.policy.drifting_policy import DriftingPolicy

        if latents:
            raise InputError(f"{model} is a policy and has no latents: leave out --latents")
        loaded = DriftingPolicy.from_pretrained(model, **options)
    else:
        from driftgen.pipeline import DriftPipeline

        loaded = DriftPipeline.from_pretrained(model, tokenizer=tokenizer, **options)
        if latents:
            _check_latents(loaded, model)
    print(export_model(loaded, out, format=file_format, dtype=dtype, decoder=not latents))  # type: ignore[arg-type]


def _check_latents(pipe: DriftPipeline, model: str) -> None:
    """Raise an InputError for a generator of pixels. One without a known number of channels may be either."""
    from driftgen.tokenizers import Identity

    if pipe.channels in (1, 3) and isinstance(pipe.tokenizer, Identity):
        raise InputError(f"{model} generates pixels and has no latents: leave out --latents")


convert = App(
    help="Convert models and training states: the authors' artifacts, shards, compact states.",
    no_args_is_help=True,
)


@convert.command()
def official(
    folder: Annotated[str, typer.Argument(help="Folder of the artifact, or hf://name.", show_default=False)],
    out: Target,
) -> None:
    """Convert an artifact of the authors (Flax) to a saved model."""
    from driftgen.model_io import from_official

    print(from_official(folder, out))


@convert.command("to-official")
def to_official(
    model: Annotated[str, typer.Argument(help="Saved model, training run, or hub name.", show_default=False)],
    out: Target,
) -> None:
    """Convert a saved model to an artifact that the authors' code reads. Round trips are bit-exact."""
    from driftgen import model_io

    print(model_io.to_official(model, out))


@convert.command()
def shards(
    model: Annotated[str, typer.Argument(help="Saved model, training run, or hub name.", show_default=False)],
    out: Target,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, int8 (scale per channel), or as saved.")
    ] = "bfloat16",
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "16MB",
    no_decoder: Annotated[
        bool, typer.Option("--no-decoder", help="Leave out the decoder of a masked autoencoder.")
    ] = False,
) -> None:
    """Save a model in small files, for example to continue its training with --init."""
    from driftgen.support.dtype_names import parse_dtype
    from driftgen.training.model_shards import save_shards

    saved = parse_dtype(dtype, saved=True)
    print(save_shards(model, out, dtype=saved, max_shard_size=max_shard_size, decoder=not no_decoder))


@convert.command()
def state(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.", show_default=False)],
    out: Target,
    max_size: Annotated[
        str | None, typer.Option(help="Size of all files, such as 60MB: as many bits as fit.")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits per weight: 32, 24, 16, 8, 7. Default: as fit, or 24.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "16MB",
) -> None:
    """Save the newest checkpoint of a run in compact form, to resume with --state elsewhere.

    Weights, averages and moments are rounded. Step, RNG and queue states are exact.
    """
    from driftgen.report.state_size import show_state
    from driftgen.training.compact_state import write_state

    report = write_state(run, out, bits=bits, max_size=max_size, max_shard_size=max_shard_size, on_try=print)
    print(show_state(report, out))
