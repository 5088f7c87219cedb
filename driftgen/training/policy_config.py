"""The configuration of ``driftgen policy train``: every key of a policy's recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from driftgen.errors import unknown_name
from driftgen.generators.policy_network import CHUNK_GENERATORS
from driftgen.support.config_base import Count, Decay, Natural, Positive, Section, path_replaces
from driftgen.training.config import Expect, Loss, Optimizer, Output

__all__ = ["ChunkGenerator", "Demonstrations", "ImageObservations", "Joint", "PolicyBatch", "PolicyConfig"]


class Demonstrations(Section):
    """The demonstrations that a policy learns from."""

    # replay: see driftgen.policy.episode_files.open_episodes; two-ways: the toy of driftgen.policy.two_ways;
    # memory: passed from Python, see driftgen.train
    kind: Literal["replay", "two-ways", "memory"] = "replay"
    path: str | None = None
    observe: str | None = None  # a preset of the layout, or array names separated by commas
    subset: str | None = None  # list of episodes in a robomimic file, such as train
    episodes: Count | None = None  # maximum number of training episodes
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.02  # share of episodes to measure on, at least one
    on_device: bool = True  # keep all demonstrations on the GPU; false for images that do not fit

    @model_validator(mode="before")
    @classmethod
    def _path_replaces_other_data(cls, values: Any) -> Any:
        return path_replaces(values, ("two-ways", "memory"), "replay")


class ChunkGenerator(Section):
    """The generator f of action chunks, and options on top of a preset."""

    kind: str = "unet1d"  # unet1d, transformer or chunk-mlp
    preset: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in CHUNK_GENERATORS:
            raise unknown_name("generator.kind", kind, CHUNK_GENERATORS)
        return kind


class ImageObservations(Section):
    """Cameras: random crops in training, center crops in a rollout, one encoder for each camera."""

    crop: tuple[Count, Count] | None = None  # height and width; None for the whole image
    features: Count = 64  # width of the features of one camera
    widths: Annotated[tuple[Count, ...], Field(min_length=1)] = (32, 64, 128)  # channels per stage
    keypoints: Count = 32  # of the spatial softmax


class PolicyBatch(Section):
    """Sizes of one step. Each observation history is a group of its own."""

    observations: Count = 256
    generated: Annotated[int, Field(ge=2, le=2**31 - 1)] = (
        16  # chunks per observation; regression and diffusion have one
    )
    # Chunks that attract: the demonstrated one, and those of the nearest observations of the training data.
    positives: Count = 1
    micro: Count = 1  # micro-batches per step, to save memory


class Joint(Section):
    """Groups of several observations, compared in the joint space of observation and chunk."""

    groups: Natural = 0  # groups per step; 0 for one group per observation
    weight: Positive = 1.0  # of the normalized observation, relative to the chunk


class PolicyConfig(Section):
    """Configuration of ``driftgen policy train``: a policy that predicts chunks of actions."""

    task: Literal["policy"] = "policy"
    about: str = ""  # one-line description
    expect: Expect = Expect()
    # drifting: one network call per chunk. regression and diffusion: baselines with the same network and data
    method: Literal["drifting", "regression", "diffusion"] = "drifting"
    seed: Natural = 0
    data: Demonstrations = Demonstrations()
    environment: str | None = None  # name for driftgen policy eval and rollout
    horizon: Count = 16  # actions of a chunk
    observed: Count = 2  # steps of the observation history
    executed: Count = 8  # actions of a chunk that are executed
    generator: ChunkGenerator = ChunkGenerator()
    images: ImageObservations = ImageObservations()
    loss: Loss = Loss()  # docs/policies.md has what one positive per group means for it
    batch: PolicyBatch = PolicyBatch()
    joint: Joint = Joint()
    optim: Optimizer = Optimizer(lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, warmup=500, clip=10.0)
    ema: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.999,)
    ema_warmup: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    cuda_graph: bool = True  # capture the step in a CUDA graph, on one GPU and without micro-batches
    # driftgen policy eval averages the scores of the last 10 checkpoints.
    output: Output = Output(metrics_every=100, keep_last=10)
    fsdp: Literal[False] = False

    @model_validator(mode="after")
    def _fits(self) -> PolicyConfig:
        if self.observed > self.horizon:
            raise ValueError("observed must not be above horizon: a chunk begins at the first observation")
        if not 1 <= self.executed <= self.horizon - self.observed + 1:
            most = self.horizon - self.observed + 1
            raise ValueError(f"executed must be 1 to {most}: horizon - observed + 1 actions lie ahead")
        if self.batch.micro > self.batch.observations:
            raise ValueError("batch.micro must not be above batch.observations")
        if self.joint.groups:
            if self.batch.observations % self.joint.groups:
                raise ValueError("joint.groups must divide batch.observations")
            if self.batch.micro > 1:
                raise ValueError("joint.groups needs batch.micro=1: a group is compared as a whole")
        if self.output.eval_every is not None:
            raise ValueError("output.eval_every is for images: score a policy with driftgen policy eval")
        return self
