"""What a run is made of: every value of a recipe, with its meaning and its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from driftgen.data.config import Augment, Data, Queue
from driftgen.support.config_base import Count, Natural, Positive, Section, Share

__all__ = [
    "Augment",
    "Batch",
    "Data",
    "Encoder",
    "Expect",
    "Generator",
    "Guidance",
    "Loss",
    "Masking",
    "Optimizer",
    "Output",
    "PretrainConfig",
    "Queue",
    "TrainConfig",
]


class Generator(Section):
    """f: its class and the options on top of a preset."""

    kind: Literal["dit", "unet", "mlp"] = "dit"
    preset: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class Encoder(Section):
    """One φ: a saved MAE, an artifact of the authors or a run of ``driftgen pretrain`` (``mae``), a model of
    transformers (``backbone``), or a file of ResNet-50 weights (``resnet50``).
    """

    kind: Literal["mae", "backbone", "resnet50"] = "mae"
    path: str
    decode_first: bool = False  # it sees images, the generator makes latents
    # Of its features(): every_k_block, vectors, mean_std, patch_sizes, ...
    switches: dict[str, Any] = Field(default_factory=dict)


class Loss(Section):
    """The drifting loss."""

    temperatures: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.02, 0.05, 0.2)
    kernel: str = "laplace"
    normalization: str = "both"
    attraction: float = 1.0
    repulsion: float = 1.0
    normalize_features: bool = True
    normalize_drift: bool = True
    convention: Literal["release", "paper"] = "release"


class Guidance(Section):
    """p(α) ∝ α^-power on [low, high], and a share of α = 1."""

    low: Annotated[float, Field(ge=1)] = 1.0
    high: Annotated[float, Field(ge=1)] = 4.0
    power: float = 3.0
    no_guidance: Share = 0.0


class Batch(Section):
    """One step: N_c classes, for each N_neg generated, N_pos positive and N_unc unconditional samples."""

    classes: Count = 64
    generated: Annotated[int, Field(ge=2)] = 64
    positives: Count = 64
    unconditional: Natural = 16
    micro: Count = 1  # parts that the classes of one step are split into, to save memory
    mode: Literal["exact", "previous"] = "exact"  # where the statistics of a split step come from


class Optimizer(Section):
    """AdamW; the learning rate grows linearly from 1e-6 to ``lr`` over ``warmup`` steps and stays there."""

    lr: Positive = 2e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Natural = 5000
    clip: Positive = 2.0
    steps: Count = 30_000


class Output(Section):
    """What a run writes, and how often, in steps."""

    metrics_every: Count = 10
    samples_every: Count = 1000
    checkpoint_every: Count = 1000
    keep_last: Count = 2
    keep_every: Count | None = None  # steps whose checkpoints stay for good
    report_every: Count = 1000
    sample_guidance: Annotated[float, Field(ge=1)] = 1.0
    tensorboard: bool = False
    wandb: str | None = None  # project


class Expect(Section):
    """What a recipe's header promises: hardware, hours, and the number to expect."""

    hardware: str = ""
    hours: str = ""
    result: str = ""


class _Run(Section):
    about: str = ""  # one line for the list of recipes
    expect: Expect = Expect()
    seed: Natural = 0
    data: Data = Data()
    tokenizer: dict[str, Any] | None = None  # options of driftgen.tokenizers.build_tokenizer
    optim: Optimizer = Optimizer()
    ema: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=1)] = (0.999,)
    # Decay min(d, (1 + t) / (10 + t)) at update t. A run keeps the value it started with.
    ema_warmup: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    output: Output = Output()


class TrainConfig(_Run):
    """``driftgen train``: a one-step generator."""

    task: Literal["train"] = "train"
    generator: Generator = Generator()
    encoders: tuple[Encoder, ...] = ()
    vanilla: bool = True  # the sample itself is a feature too
    loss: Loss = Loss()
    guidance: Guidance = Guidance()
    batch: Batch = Batch()
    queue: Queue = Queue()
    checkpoint_blocks: bool = False
    # On one GPU the launches of a step are recorded once and replayed, unless it is split or checkpointed.
    cuda_graph: bool = True
    fsdp: bool = False

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.guidance.low > self.guidance.high:
            raise ValueError("guidance.low must not be above guidance.high")
        if self.batch.micro > self.batch.classes:
            raise ValueError("batch.micro must not be above batch.classes")
        if not self.encoders and not self.vanilla:
            raise ValueError("encoders is empty and vanilla is false: nothing to measure the drift in")
        return self


class Masking(Section):
    """The masked autoencoder, and its classification fine-tuning over the last steps."""

    preset: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)  # of driftgen.features.ResNetMAE
    finetune_steps: Natural = 0
    finetune_weight: Share = 0.1
    finetune_ramp: Count = 1000


class PretrainConfig(_Run):
    """``driftgen pretrain``: a masked autoencoder, whose encoder becomes φ."""

    task: Literal["pretrain"] = "pretrain"
    batch_size: Count = 8192
    micro: Count = 1
    # Capture the step as a CUDA graph: one process on a GPU, micro=1.
    cuda_graph: bool = True
    mae: Masking = Masking()
    ema: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=1)] = (0.9995,)
    fsdp: bool = False
