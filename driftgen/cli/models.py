"""What is done with trained models: ``sample``, ``convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from driftgen.cli.options import Out
from driftgen.errors import unknown_name

__all__ = ["convert", "sample"]

Target = Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)]


def sample(
    model: Annotated[
        str,
        typer.Argument(
            help="A saved model, a training run, an artifact of the authors, owner/repository, or hf://name.",
            show_default=False,
        ),
    ],
    labels: Annotated[
        str | None, typer.Option(help="Classes: 3,5 or 0-9 or names; all in turn if not given.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--number", "-n", help="How many images; as many as labels if not given.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="alpha, 1 (none) or more; the model's own if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Image i of a seed is always the same.")] = 0,
    out: Out = Path("runs/samples"),
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name of the SD-VAE that decodes latents.")
    ] = None,
    latents: Annotated[
        bool, typer.Option("--latents", help="Write latents, undecoded, and no images.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16; as saved if not given.")
    ] = "as saved",
    batch_size: Annotated[int, typer.Option(help="Images made at a time.")] = 32,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the generator first: for many images.")
    ] = False,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="8-bit products on an NVIDIA GPU that has them, for a DiT.")
    ] = False,
) -> None:
    """Sample images, one network call each: single PNGs and a sheet of them, grid.png."""
    from driftgen.pipeline import DriftPipeline
    from driftgen.report.sample_folder import parse_labels, write_latents, write_samples
    from driftgen.support.progress import track

    pipe = DriftPipeline.from_pretrained(
        model, device=device, dtype=_number_type(dtype), tokenizer=tokenizer, batch_size=batch_size, fp8=fp8
    )
    if compiled:
        pipe.compile()
    chosen = pipe.labels(parse_labels(labels), number)
    alpha = pipe.check(guidance=guidance, seed=seed, output="latent" if latents else "pil")
    if latents:
        print(write_latents(pipe, out, chosen, guidance=alpha, seed=seed))
        return
    about: dict[str, Any] = {"model": model, "dtype": dtype, "tokenizer": tokenizer}
    # None, not False: folders of before there were these options can then be completed.
    about |= {"compile": compiled or None, "fp8": fp8 or None}
    with track("sampling", len(chosen), "network calls per image") as on_step:
        sheet = write_samples(pipe, out, chosen, guidance=alpha, seed=seed, about=about, on_step=on_step)
    print(sheet)


convert = typer.Typer(
    help="Turn the authors' released artifacts into saved models, and back.", no_args_is_help=True
)


@convert.command()
def official(
    folder: Annotated[str, typer.Argument(help="The artifact's folder, or hf://name.", show_default=False)],
    out: Target,
) -> None:
    """An artifact of the authors (flax) -> config.json, model.safetensors, README.md."""
    from driftgen.interop.convert import from_official

    print(from_official(folder, out))


@convert.command("to-official")
def to_official(
    folder: Annotated[Path, typer.Argument(help="The folder of a saved model.", show_default=False)],
    out: Target,
) -> None:
    """A saved model -> an artifact that the authors' code reads, bit for bit what it came from."""
    from driftgen.interop import convert as conversion

    print(conversion.to_official(folder, out))


def _number_type(name: str) -> Any:
    import torch

    types = {"as saved": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in types:
        raise unknown_name("dtype", name, types)
    return types[name]
