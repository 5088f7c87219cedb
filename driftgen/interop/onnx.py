"""Export generators and policies: ONNX, and the programs of ``torch.export``.

The noise is an input, so a file gives the same sample as the model, to rounding. Ops are in their plain form.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from driftgen.errors import InputError, unknown_name
from driftgen.interop.export_graph import BATCH, Graph, make_graph
from driftgen.interop.onnx_weights import compress_weights
from driftgen.ops.dispatch import without_kernels
from driftgen.support.atomic_write import atomic_write
from driftgen.support.checked_arguments import checked
from driftgen.support.download import first_line
from driftgen.support.untrusted_files import parse_json, read_bytes, reading

__all__ = [
    "FORMATS",
    "METADATA",
    "check_export",
    "export_model",
    "export_onnx",
    "export_pt2",
    "read_metadata",
]

METADATA = "driftgen"  # key of the metadata in an ONNX file; in a pt2 file the extra file driftgen.json
FORMATS = ("onnx", "pt2")
OPSET = 18  # runtimes of 2023 and later, in browsers too
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
LARGEST = 2**31 - 2**24  # bytes of all weights: a protocol buffer has at most 2³¹


@checked
def export_onnx(
    model: Any, path: str | Path, *, dtype: torch.dtype | str = torch.float32, decoder: bool = True
) -> Path:
    """Write a model as an ONNX file that computes in float32, for a batch of any size.

    Example::

        import json, numpy as np, onnxruntime
        import driftgen as dg
        from driftgen.interop.onnx import export_onnx
        from driftgen.support.portable_noise import portable_noise

        export_onnx(dg.DriftPipeline.from_pretrained("digits"), "digits.onnx")
        session = onnxruntime.InferenceSession("digits.onnx")
        metadata = json.loads(session.get_modelmeta().custom_metadata_map["driftgen"])
        noise = portable_noise(metadata["noise"]["tensors"], n=2, seed=0)
        inputs = {"labels": np.array([3, 5]), "alpha": np.array([1.5, 1.5], np.float32)}
        (images,) = session.run(None, noise | inputs)  # [2, 1, 8, 8] in [-1, 1]

    Args:
        model: a :class:`~driftgen.DriftPipeline`, a generator of images, a :class:`~driftgen.DriftingPolicy`
            or its network.
        path: the file to write, ``NAME.onnx``; it must not exist.
        dtype: of the stored weights: ``torch.float32``, ``torch.float16``, or ``torch.int8`` with one scale
            per output channel; or its name.
        decoder: include the decoder of a latent model; its output is the latents otherwise.
    """
    return export_model(model, path, format="onnx", dtype=dtype, decoder=decoder)


@checked
def export_pt2(model: Any, path: str | Path, *, decoder: bool = True) -> Path:
    """Write a model as a program of ``torch.export``, in float32 and for a batch of any size.

    Example::

        export_pt2(dg.DriftPipeline.from_pretrained("digits"), "digits.pt2")
        files = {"driftgen.json": ""}  # receives the metadata
        program = torch.export.load("digits.pt2", extra_files=files).module()
        images = program(noise, labels, alpha)  # in the order of the metadata's "inputs"

    Arguments are those of :func:`export_onnx`.
    """
    return export_model(model, path, format="pt2", decoder=decoder)


@checked
def export_model(
    model: Any,
    path: str | Path,
    *,
    format: Literal["onnx", "pt2"] = "onnx",
    dtype: torch.dtype | str = torch.float32,
    decoder: bool = True,
) -> Path:
    """Write a model in one of the :data:`FORMATS`; see :func:`export_onnx` and :func:`export_pt2`."""
    stored = check_export(path, format, dtype)
    destination = Path(path)
    with torch.no_grad(), without_kernels():
        graph = make_graph(model, decoder=decoder)
    text = json.dumps(graph.metadata | {"dtype": stored}, allow_nan=False)
    try:
        with _quiet(), torch.no_grad(), without_kernels():
            program = _trace(graph)
            proto = _to_onnx(graph, program) if format == "onnx" else None
    except RuntimeError as error:
        name = graph.metadata["architecture"]
        raise InputError(f"{name} cannot be exported to {format}: {first_line(error)}") from None
    destination.parent.mkdir(parents=True, exist_ok=True)
    if proto is None:
        with atomic_write(destination) as scratch, _quiet():
            torch.export.save(program, scratch, extra_files={f"{METADATA}.json": text})
        return destination
    if stored != "float32":
        compress_weights(proto, DTYPES[stored])
    size = sum(len(weight.raw_data) for weight in proto.graph.initializer)
    if size > LARGEST:
        raise InputError(
            f"the weights take {size / 1e9:.1f} GB, an ONNX file holds 2 GB: choose dtype float16 or int8, "
            "or format pt2"
        )
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, text
    with atomic_write(destination) as scratch:
        scratch.write_bytes(proto.SerializeToString(deterministic=True))
    return destination


def check_export(path: str | Path, format: str, dtype: torch.dtype | str) -> str:
    """Raise InputError unless a model can be exported to this file; return the name of the dtype."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    stored = str(dtype).removeprefix("torch.")
    if stored not in DTYPES:
        raise unknown_name("dtype", stored, DTYPES)
    if format == "pt2" and stored != "float32":
        raise InputError(f"dtype={stored}: weights of format pt2 are float32")
    destination = Path(path)
    if destination.suffix != f".{format}":
        raise InputError(f"{destination}: a file of format {format} must be named NAME.{format}")
    if os.path.lexists(destination):
        raise InputError(f"{destination} exists already: choose another file", topic="file-exists")
    if format == "onnx":
        for name in ("onnx", "onnxscript"):
            try:
                importlib.import_module(name)
            except ImportError:
                raise InputError(
                    f"{name} is not installed, which the export needs: pip install 'driftgen[onnx]'",
                    topic="missing-extra",
                ) from None
    return stored


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of an exported ONNX file."""
    import onnx

    with reading(path, "an exported model"):
        proto = onnx.load_model_from_string(read_bytes(path))
        for entry in proto.metadata_props:
            if entry.key == METADATA:
                return dict(parse_json(entry.value))
    raise InputError(f"{path} has no metadata of driftgen: export the model again")


def _trace(graph: Graph) -> torch.export.ExportedProgram:
    """Record the module with a dynamic batch, without source locations."""
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in graph.inputs)
    program = torch.export.export(
        graph.module, tuple(graph.inputs.values()), dynamic_shapes=(shapes,), strict=False
    )
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        node.meta.pop("stack_trace", None)
    return program


def _to_onnx(graph: Graph, program: torch.export.ExportedProgram) -> Any:
    """Convert a program to an ``onnx.ModelProto`` with the names of the graph, without source locations."""
    converted = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(graph.inputs),
        output_names=[graph.output],
        verbose=False,
    )
    assert converted is not None
    proto = converted.model_proto
    inner = proto.graph
    del inner.value_info[:]
    for item in (inner, *inner.node, *inner.input, *inner.output, *inner.initializer):
        del item.metadata_props[:]
        item.doc_string = ""
    for value in (*inner.input, *inner.output):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    proto.producer_name = "driftgen"
    return proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the remarks of the exporter about its own parts."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
