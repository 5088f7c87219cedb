"""Stand-ins for the classes of LeRobot that the adapter builds on, where LeRobot is not installed.

They have the names, the abstract methods and the parameters that lerobot 0.4.4 and 0.6.1 publish, and as much
behavior as the adapter relies on.
"""

import abc
import sys
import types
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import nn


class FeatureType(StrEnum):
    STATE = "STATE"
    VISUAL = "VISUAL"
    ENV = "ENV"
    ACTION = "ACTION"


class NormalizationMode(StrEnum):
    MIN_MAX = "MIN_MAX"
    IDENTITY = "IDENTITY"


@dataclass
class PolicyFeature:
    type: FeatureType
    shape: tuple


@dataclass
class PreTrainedConfig(abc.ABC):
    n_obs_steps: int = 1
    input_features: dict | None = field(default_factory=dict)
    output_features: dict | None = field(default_factory=dict)
    device: str | None = None
    push_to_hub: bool = True
    choices = {}  # noqa: RUF012, not a field

    @classmethod
    def register_subclass(cls, name):
        def register(subclass):
            cls.choices[name] = subclass
            return subclass

        return register

    @property
    def image_features(self):
        return {key: f for key, f in self.input_features.items() if f.type is FeatureType.VISUAL}

    @property
    def action_feature(self):
        return self.output_features.get("action")

    @property
    @abc.abstractmethod
    def observation_delta_indices(self): ...

    @property
    @abc.abstractmethod
    def action_delta_indices(self): ...

    @property
    @abc.abstractmethod
    def reward_delta_indices(self): ...

    @abc.abstractmethod
    def get_optimizer_preset(self): ...

    @abc.abstractmethod
    def get_scheduler_preset(self): ...

    @abc.abstractmethod
    def validate_features(self): ...


class PreTrainedPolicy(nn.Module, abc.ABC):
    config_class = None
    name = None

    def __init__(self, config, *inputs, **kwargs):
        super().__init__()
        assert isinstance(config, PreTrainedConfig)
        self.config = config

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not cls.config_class or not cls.name:
            raise TypeError(f"Class {cls.__name__} must define config_class and name")

    @abc.abstractmethod
    def get_optim_params(self): ...

    @abc.abstractmethod
    def reset(self): ...

    @abc.abstractmethod
    def forward(self, batch): ...

    @abc.abstractmethod
    def predict_action_chunk(self, batch, **kwargs): ...

    @abc.abstractmethod
    def select_action(self, batch, **kwargs): ...


@dataclass
class AdamWConfig:
    lr: float = 1e-3
    betas: tuple = (0.9, 0.999)
    weight_decay: float = 1e-2


@dataclass
class DiffuserSchedulerConfig:
    name: str = "cosine"
    num_warmup_steps: int | None = None


class _Step:
    def __init__(self, **options):
        self.options = options

    def __call__(self, values):
        return values


class AddBatchDimensionProcessorStep(_Step):
    def __call__(self, values):
        return {key: value[None] for key, value in values.items()}


class _MinMaxStep(_Step):
    """y = 2 (x − min) / (max − min) − 1 for the features of a type with MIN_MAX, and its inverse."""

    def range_of(self, key):
        kind = self.options["features"][key].type.value
        if self.options["norm_map"].get(kind) is not NormalizationMode.MIN_MAX:
            return None
        entry = self.options["stats"][key]
        return entry["min"], entry["max"]


class NormalizerProcessorStep(_MinMaxStep):
    def __call__(self, values):
        result = {}
        for key, value in values.items():
            limits = self.range_of(key)
            result[key] = value if limits is None else 2 * (value - limits[0]) / (limits[1] - limits[0]) - 1
        return result


class UnnormalizerProcessorStep(_MinMaxStep):
    def __call__(self, action):
        low, high = self.range_of("action")
        return (action + 1) / 2 * (high - low) + low


class PolicyProcessorPipeline:
    def __init__(self, steps, name, to_transition=None, to_output=None):
        self.steps, self.name = steps, name

    def __call__(self, values):
        for step in self.steps:
            values = step(values)
        return values


MODULES = {
    "lerobot": {},
    "lerobot.configs": {},
    "lerobot.configs.policies": {"PreTrainedConfig": PreTrainedConfig},
    "lerobot.configs.types": {
        "FeatureType": FeatureType,
        "NormalizationMode": NormalizationMode,
        "PolicyFeature": PolicyFeature,
    },
    "lerobot.optim": {},
    "lerobot.optim.optimizers": {"AdamWConfig": AdamWConfig},
    "lerobot.optim.schedulers": {"DiffuserSchedulerConfig": DiffuserSchedulerConfig},
    "lerobot.policies": {},
    "lerobot.policies.pretrained": {"PreTrainedPolicy": PreTrainedPolicy},
    "lerobot.processor": {
        "AddBatchDimensionProcessorStep": AddBatchDimensionProcessorStep,
        "DeviceProcessorStep": type("DeviceProcessorStep", (_Step,), {}),
        "NormalizerProcessorStep": NormalizerProcessorStep,
        "PolicyProcessorPipeline": PolicyProcessorPipeline,
        "RenameObservationsProcessorStep": type("RenameObservationsProcessorStep", (_Step,), {}),
        "UnnormalizerProcessorStep": UnnormalizerProcessorStep,
    },
    "lerobot.processor.converters": {
        "policy_action_to_transition": None,
        "transition_to_policy_action": None,
    },
}


class StandIn(types.ModuleType):
    """A module of the stand-ins."""


def install(monkeypatch):
    """Put the stand-ins in place of lerobot, and forget the adapter's modules."""
    for name, contents in MODULES.items():
        module = StandIn(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("driftgen.policy.lerobot.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "driftgen.policy.lerobot", raising=False)


def as_lerobot(observation):
    """Return an observation as LeRobot has it: tensors, images as floats with channels first."""
    result = {}
    for key, value in observation.items():
        tensor = torch.as_tensor(value)
        result[key] = tensor.movedim(-1, 0).float() / 255 if tensor.ndim == 3 else tensor
    return result
