"""The configuration of a run: every key of a recipe, its meaning, default and valid range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from driftgen.data.config import Augment, Data, Queue
from driftgen.model_io import get_architecture
from driftgen.support.config_base import Count, Decay, Natural, Positive, Real, Section, Share

__all__ = [
    "AUTO",
    "MODULE",
    "Augment",
    "Batch",
    "Crops",
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


MODULE = "module"  # kind of a network that was passed from Python; its options name the class
AUTO = "auto"  # kind of an encoder that is chosen when the run starts, see driftgen.training.auto_encoder


class Generator(Section):
    """The generator f: a registered class, and options on top of a preset."""

    kind: str = "dit"  # dit, unet, mlp, decoder, or a name of driftgen.register_generator
    preset: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kind")
    @classmethod
    def _registered(cls, kind: str) -> str:
        return kind if kind == MODULE else get_architecture("generator", kind).name


class Encoder(Section):
    """One feature encoder φ: a registered class, and the path of its weights or its options.

    ``mae`` and ``convnext`` take a saved model, a run of ``driftgen pretrain`` or an artifact of the authors;
    ``backbone`` takes a model of transformers; ``resnet50`` and ``efficientnet-lite0`` take a file of
    weights. A class registered with ``driftgen.register_encoder`` takes a saved model as ``path``, or is
    built from ``options``.
    """

    # mae, convnext, backbone, resnet50, efficientnet-lite0, a name of driftgen.register_encoder, or auto
    kind: str = "mae"
    path: Annotated[str | None, Field(validate_default=True)] = None
    # Saved models that differ from that of ``path`` in their weights only: each step uses one of them all.
    pool: tuple[str, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    decode_first: bool = False  # decode latents to images first, for encoders of images
    # Arguments of features(): every_k_block, vectors, mean_std, patch_sizes, ...
    switches: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Replace ``auto`` if a path names the encoder: nothing is left to choose."""
        if isinstance(values, dict) and values.get("kind") == AUTO and values.get("path") is not None:
            return {**values, "kind": "mae"}
        return values

    @field_validator("kind")
    @classmethod
    def _registered(cls, kind: str) -> str:
        return kind if kind in (MODULE, AUTO) else get_architecture("encoder", kind).name

    @field_validator("path")
    @classmethod
    def _has_weights(cls, path: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind", MODULE)
        if path is None and kind not in (MODULE, AUTO) and get_architecture("encoder", kind).built_in:
            raise PydanticCustomError("missing", "Field required")
        return path

    @field_validator("pool")
    @classmethod
    def _has_path(cls, pool: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if pool and info.data.get("path") is None:
            raise ValueError("a pool has further saved models: set path to the first one")
        return pool

    @property
    def name(self) -> str:
        """Name of the encoder in messages."""
        return self.path or str(self.options.get("class", self.kind))


class Loss(Section):
    """The drifting loss."""

    temperatures: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.02, 0.05, 0.2)
    kernel: str = "laplace"
    normalization: str = "both"
    attraction: Real = 1.0
    repulsion: Real = 1.0
    normalize_features: bool = True
    normalize_drift: bool = True
    convention: Literal["release", "paper"] = "release"


class Guidance(Section):
    """Distribution of α: p(α) ∝ α^-power on [low, high], and α = 1 with probability ``no_guidance``."""

    low: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    high: Annotated[float, Field(ge=1, le=1e6)] = 4.0
    power: Annotated[float, Field(ge=-20, le=20)] = 3.0
    no_guidance: Share = 0.0


class Batch(Section):
    """Sizes of one step: N_c classes, and per class N_neg generated, N_pos positive and N_unc unconditional
    samples.
    """

    classes: Count = 64
    generated: Annotated[int, Field(ge=2, le=2**31 - 1)] = 64
    positives: Count = 64
    unconditional: Natural = 16
    micro: Count = 1  # micro-batches per step, to save memory
    # Statistics of a step in micro-batches: of this step (one more forward pass), or of the previous step.
    mode: Literal["exact", "previous"] = "exact"


class Crops(Section):
    """Random squares that all samples of a class, generated and real, are cropped to before φ.

    φ of a crop is a further feature map: matching in many of them should leave fewer blind spots of φ.
    """

    share: Share = 0.0  # of the classes of a step that are cropped
    scale: tuple[Annotated[float, Field(ge=0.1, le=1)], Annotated[float, Field(ge=0.1, le=1)]] = (0.5, 1.0)


class Optimizer(Section):
    """AdamW, or Muon for matrices and AdamW for the rest. The learning rate rises linearly from 1e-6 to
    ``lr`` over ``warmup`` steps, then follows ``schedule``.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 2e-4
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    momentum: Decay = 0.95  # of Muon
    weight_decay: Annotated[float, Field(ge=0, le=1e9)] = 0.01
    warmup: Natural = 5000
    clip: Positive = 2.0
    steps: Count = 30_000
    # decay: constant, then linear over the last decay_share of the steps; cosine: over all steps after warmup
    schedule: Literal["constant", "cosine", "decay"] = "constant"
    final_lr: Share = 0.0  # rate at the end of the schedule, as a share of lr
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2


class Output(Section):
    """Files of a run; intervals are in steps."""

    metrics_every: Count = 10
    samples_every: Count = 1000
    checkpoint_every: Count = 1000
    keep_last: Count = 2
    keep_every: Count | None = None  # checkpoints at multiples of this step are never deleted
    report_every: Count = 1000
    sample_guidance: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    # Evaluate each average: samples against the training images, or an encoder on the images of eval_data.
    eval_every: Count | None = None
    eval_samples: Annotated[int, Field(ge=2, le=2**31 - 1)] = 5000
    # Default: the FID Inception of $DRIFTGEN_INCEPTION, else the run's own first encoder, else pixels.
    eval_encoder: str | None = None
    eval_reference: str | None = None  # statistics from driftgen eval stats, instead of the training images
    eval_data: str | None = None  # pretraining: labeled images that it does not train on, .npz or a folder
    tensorboard: bool = False
    wandb: str | None = None  # project name


class Expect(Section):
    """Header of a recipe: hardware, hours and the expected result."""

    hardware: str = ""
    hours: str = ""
    result: str = ""


class _Run(Section):
    about: str = ""  # one-line description
    expect: Expect = Expect()
    # Automatic choices and their reasons, such as the size and the encoder; without effect on the run.
    chosen: dict[str, str] = Field(default_factory=dict)
    seed: Natural = 0
    data: Data = Data()
    tokenizer: dict[str, Any] | None = None  # options of driftgen.tokenizers.build_tokenizer
    optim: Optimizer = Optimizer()
    ema: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.999,)
    # Decay min(d, (1 + t) / (10 + t)) at update t. A run keeps the value it started with.
    ema_warmup: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    output: Output = Output()


class TrainConfig(_Run):
    """Configuration of ``driftgen train``: a one-step generator."""

    task: Literal["train"] = "train"
    generator: Generator = Generator()
    init: str | None = None  # initial generator weights: any model that driftgen.load_model loads
    encoders: tuple[Encoder, ...] = ()  # or auto: one that is chosen when the run starts
    # Each step computes φ with this many of the encoders, in turn. Null: all of them.
    encoders_per_step: Count | None = None
    vanilla: bool = True  # use the sample itself as a feature, too
    loss: Loss = Loss()
    guidance: Guidance = Guidance()
    batch: Batch = Batch()
    queue: Queue = Queue()
    crops: Crops = Crops()
    # Of a feature with more vectors (locations), each step compares this many, drawn at random. Null: all.
    vectors: Count | None = None
    checkpoint_blocks: bool = False
    # Compute the features of all real images once, and keep them on the device. Auto: on a GPU, if they fit.
    cache_features: bool | Literal["auto"] = False
    # Capture the step in a CUDA graph, on one GPU and without micro-batches or checkpointed blocks.
    cuda_graph: bool = True
    fsdp: bool = False

    @field_validator("encoders", mode="before")
    @classmethod
    def _one_auto(cls, encoders: Any) -> Any:
        return ({"kind": AUTO},) if encoders == AUTO else encoders

    @property
    def may_cache(self) -> bool:
        """True if the features of a real image are the same at every step."""
        return not self.crops.share and not self.alternates

    @property
    def takes_turns(self) -> bool:
        """True if a step uses some of the encoders."""
        return self.encoders_per_step is not None and self.encoders_per_step < len(self.encoders)

    @property
    def alternates(self) -> bool:
        """True if steps have different encoders, or the same with other weights."""
        return self.takes_turns or any(encoder.pool for encoder in self.encoders)

    @property
    def guidance_range(self) -> list[float]:
        """Smallest and largest α of the training; guidance needs unconditional negatives."""
        low, high = self.guidance.low, self.guidance.high
        return [1.0 if self.guidance.no_guidance else low, high] if self.batch.unconditional else [1.0, 1.0]

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.guidance.low > self.guidance.high:
            raise ValueError("guidance.low must not be above guidance.high")
        if self.batch.micro > self.batch.classes:
            raise ValueError("batch.micro must not be above batch.classes")
        if self.vectors is not None and self.loss.convention != "release":
            raise ValueError("vectors needs loss.convention=release, whose loss is a mean over vectors")
        if self.crops.scale[0] > self.crops.scale[1]:
            raise ValueError("crops.scale: the first number must not be above the second")
        if self.crops.share and self.cache_features is True:
            raise ValueError("crops.share needs features of every step's crops: set cache_features=false")
        if self.encoders_per_step is not None and self.encoders_per_step > max(1, len(self.encoders)):
            raise ValueError(
                f"encoders_per_step={self.encoders_per_step}, but the run has {len(self.encoders)} encoders"
            )
        if self.alternates:
            option = "encoders_per_step" if self.takes_turns else "encoders.pool"
            if self.cache_features is True:
                raise ValueError(f"{option} needs features of every step's encoder: set cache_features=false")
            if self.fsdp:
                raise ValueError(f"{option} does not work with fsdp=true: remove one of them")
            if self.batch.micro > 1 and self.batch.mode == "previous":
                raise ValueError(f"{option} changes the scales from step to step: set batch.mode=exact")
        if self.crops.share and (self.tokenizer is not None or self.data.kind == "latents"):
            raise ValueError("crops.share crops images and not latents: set it to 0")
        if not self.encoders and not self.vanilla:
            raise ValueError(
                "encoders is empty and vanilla is false: set one of them, the drift needs a feature"
            )
        return self


class Masking(Section):
    """The masked autoencoder, and the classification loss of its last steps."""

    preset: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)  # arguments of driftgen.features.ResNetMAE
    finetune_steps: Natural = 0
    finetune_weight: Share = 0.1
    finetune_ramp: Count = 1000


class PretrainConfig(_Run):
    """Configuration of ``driftgen pretrain``: a masked autoencoder, whose encoder serves as φ."""

    task: Literal["pretrain"] = "pretrain"
    batch_size: Count = 8192
    micro: Count = 1
    # Capture the step as a CUDA graph: one process on a GPU, micro=1.
    cuda_graph: bool = True
    mae: Masking = Masking()
    ema: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.9995,)
    fsdp: bool = False
