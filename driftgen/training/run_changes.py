"""The configuration of a run that is started from Python: a recipe, changes of it, and parts in memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from driftgen.data.hf_datasets import is_dataset_dict
from driftgen.data.in_memory import open_memory
from driftgen.errors import InputError
from driftgen.model_io import register_generator, registered_name
from driftgen.training.build import Parts
from driftgen.training.config import AUTO, MODULE
from driftgen.training.own_images import plan
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_data import with_episodes
from driftgen.training.recipes import COMMANDS, Command, RunConfig, config_class, load_recipe, to_yaml

__all__ = ["resolve"]


def resolve(
    task: Command,
    recipe: str | Path | RunConfig,
    changes: Mapping[str, Any],
    implied: Sequence[str] = (),
    **options: Any,
) -> tuple[RunConfig, Parts]:
    """Return the configuration of a recipe with its changes, and the parts that were passed from Python.

    ``implied`` are changes that come before those of the user, ``options`` those of
    :func:`driftgen.training.own_images.plan`.
    """
    values, data, networks = dict(changes), None, {}
    if not isinstance(values.get("data", {}), Mapping) or is_dataset_dict(values.get("data")):
        data = values.pop("data")
    if isinstance(data, str | Path):
        values, data = {"data.path": str(data), **values}, None
    generator = values.get("generator")
    if generator is not None and not isinstance(generator, Mapping):
        if not isinstance(generator, nn.Module):
            raise InputError(
                f"generator is a {type(generator).__name__}: pass a torch.nn.Module or a dict of values"
            )
        values["generator"] = {"kind": MODULE, "preset": None, "options": _identity(generator)}
        networks["generator"] = generator
    modules: list[nn.Module] = []
    if values.get("encoders") is not None:
        listed = values["encoders"]
        if not isinstance(listed, list):
            several = isinstance(listed, tuple) and not _has_switches(listed)
            listed = list(listed) if several else [listed]
        values["encoders"] = [_encoder_entry(entry, modules) for entry in listed]
    if values.get("init") is not None:
        values["init"] = str(values["init"])
    model = type(recipe) if isinstance(recipe, BaseModel) else config_class(recipe, task)
    overrides = [*implied, *(f"{key}={_yaml(key, value)}" for key, value in _flatten(model, values))]
    config = _load(recipe, overrides, task, **options)
    if isinstance(config, PolicyConfig):
        return with_episodes(config, data)
    opened = None
    if data is not None:
        section = config.data
        if not any(key == "data.size" for key, _ in _flatten(model, values)):
            section = section.model_copy(update={"size": None})  # arrays have a size of their own
        opened, section = open_memory(data, section, config.data.size)
        # Few images: more augmentation.
        planned: Any = _load(recipe, overrides, task, **options, data=opened)
        if planned.data.augment != section.augment:
            section = section.model_copy(update={"augment": planned.data.augment})
            opened, section = open_memory(data, section, config.data.size)
        config = config.model_copy(update={"data": section, "chosen": planned.chosen})
    if "generator" in networks:
        _register_own(networks["generator"])
    return config, Parts(opened, networks.get("generator"), tuple(modules))


def _load(
    recipe: str | Path | RunConfig, overrides: Sequence[str], task: Command, **options: Any
) -> RunConfig:
    if not isinstance(recipe, BaseModel):
        return plan(task, recipe, overrides, **options)
    if recipe.task not in COMMANDS[task]:
        raise InputError(f"recipe is a configuration for {recipe.task}: pass it to driftgen.{recipe.task}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(to_yaml(recipe), encoding="utf-8")
        return load_recipe(path, overrides, task)


def _flatten(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. A dict for a section changes single keys of it; other values replace."""
    for key, value in values.items():
        found = model.model_fields.get(key)
        section = found.annotation if found is not None else None
        if isinstance(value, Mapping) and isinstance(section, type) and issubclass(section, BaseModel):
            yield from ((f"{key}.{inner}", v) for inner, v in _flatten(section, value))
        else:
            yield key, value


def _yaml(key: str, value: Any) -> str:
    """Return a value as JSON, which is YAML on one line."""
    try:
        return json.dumps(
            value, ensure_ascii=False, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v)
        )
    except (TypeError, ValueError, RuntimeError) as error:  # tensors without values raise RuntimeErrors
        raise InputError(f"{key}={value!r} is not a value of a recipe: {error}") from None


def _has_switches(entry: tuple[Any, ...]) -> bool:
    """Return True for a pair of an encoder and its switches, False for a tuple of encoders."""
    return len(entry) == 2 and isinstance(entry[1], Mapping)


def _encoder_entry(entry: Any, modules: list[nn.Module]) -> dict[str, Any]:
    """Return the recipe's entry for one encoder; append the encoder to ``modules`` if it is a network."""
    if isinstance(entry, Mapping):
        return dict(entry)
    if isinstance(entry, str | Path):
        return {"kind": AUTO} if entry == AUTO else {"kind": "mae", "path": str(entry)}
    encoder, switches = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
    if not isinstance(encoder, nn.Module) or not callable(getattr(encoder, "features", None)):
        raise InputError(
            f"encoders: {type(encoder).__name__} is not an encoder: pass a torch.nn.Module with features(x), "
            "a path, or a dict of recipe values"
        )
    if not isinstance(switches, Mapping):
        raise InputError(f"encoders: switches are a {type(switches).__name__}: pass (module, dict)")
    modules.append(encoder)
    return {"kind": MODULE, "options": _identity(encoder), "switches": dict(switches)}


def _identity(network: nn.Module) -> dict[str, Any]:
    """Return the record of a network from Python: a run resumes with the same kind of network only."""
    return {"class": type(network).__qualname__, "parameters": sum(p.numel() for p in network.parameters())}


def _register_own(network: nn.Module) -> None:
    """Register the class of a network from Python under its own name, so that its weights can be saved."""
    cls = type(network)
    if registered_name(cls) is None and callable(getattr(cls, "sample_noise", None)):
        register_generator(cls.__name__, cls)
