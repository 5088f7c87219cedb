"""The pictures of results/README.md. To add one, add a ``Picture``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from driftgen.errors import InputError
from tools.records import Results, fill

__all__ = ["PICTURES", "Picture", "gallery"]


@dataclass(frozen=True)
class Picture:
    """One picture with its record.

    Attributes:
        path: picture, relative to results/.
        what: what one sees; may contain values of the record, as in ``fill``.
        record: JSON file of the run that made the picture, relative to results/.
        width: percent of the page.
        command: command, where the record has none or several.
        evaluator: evaluator, where the record has none.
        hardware: hardware, where the record has that of another command.
    """

    path: str
    what: str
    record: str
    width: int = 100
    command: str | None = None
    evaluator: str | None = None
    hardware: str | None = None


PICTURES = (
    Picture(
        "cifar10/samples.png",
        "**CIFAR-10 in one network call each**, eight per class, not selected, by "
        "[the model that ships](cifar10/README.md).",
        "cifar10/evaluation.json",
        width=50,
        command="driftgen demo",
        evaluator="the samples themselves; FID on its page",
        hardware="one NVIDIA H200 for the training, a CPU for this sheet",
    ),
    Picture(
        "cifar10/neighbors/neighbors.png",
        "**The nearest training images** of samples of this model: the first ten samples, and the ten "
        "closest to a training image. {share:.1%} count as near-copies, and {heldout_share:.0%} of "
        "held-out images do.",
        "cifar10/neighbors/neighbors.json",
        width=60,
        evaluator="cosine similarity of the features of mae-cifar10-labels",
    ),
    Picture(
        "small-sets/fashion-mnist/samples.png",
        "**Fashion-MNIST in one network call each**, not selected, after twelve minutes of "
        "[training](small-sets/README.md).",
        "small-sets/fashion-mnist/evaluation.json",
        width=50,
        command="driftgen train fashion-mnist --set optim.steps=3840",
    ),
    Picture(
        "small-sets/tiny-imagenet/samples.png",
        "**20 classes of Tiny-ImageNet, 64 pixels**, after seven minutes of "
        "[training](small-sets/README.md).",
        "small-sets/tiny-imagenet/evaluation.json",
        width=50,
        command="driftgen train folder --size base",
    ),
    Picture(
        "demo-digits/samples.png",
        "**Digits in one network call each**, ten per class, as `make demo` trains them on a CPU: "
        "{figures[recognized]:.1%} are recognized.",
        "demo-digits/evaluation.json",
        width=40,
    ),
    Picture(
        "toy-generator/swiss-roll/evolution.png",
        "**A generator learns a swiss roll.** The loss is the mean squared drift. "
        "It falls to the noise of a batch.",
        "toy-generator/swiss-roll/metrics.json",
    ),
    Picture(
        "toy-generator/checkerboard/evolution.png",
        "**The same with a checkerboard**, whose eight squares must get equal shares: "
        "the weakest gets {least_mode_share:.2f} of its share in the data.",
        "toy-generator/checkerboard/metrics.json",
    ),
    Picture(
        "toy-bimodal/generator-collapsed/evolution.gif",
        "**A collapsed start recovers.** All samples begin in one mode of a bimodal target and end in both.",
        "toy-bimodal/generator-collapsed/metrics.json",
        width=70,
    ),
    Picture(
        "toy-bimodal/points-far/evolution.png",
        "**Points without a network** drift to a bimodal target from far away.",
        "toy-bimodal/points-far/metrics.json",
    ),
    *(
        Picture(
            f"toy-bimodal/{kind}-{init}/evolution.png",
            f"**{who}** {start}: the weaker mode gets {{least_mode_share:.2f}} of its share in the data.",
            f"toy-bimodal/{kind}-{init}/metrics.json",
        )
        for kind, who in (("points", "Points"), ("generator", "A generator"))
        for init, start in (
            ("between", "from between the modes"),
            ("far", "from far away"),
            ("collapsed", "from one mode"),
        )
        if (kind, init) != ("points", "far")
    ),
    Picture(
        "toy-antisymmetry/points/comparison.png",
        "**Anti-symmetry, points without a network**: the same imbalance.",
        "toy-antisymmetry/points/metrics.json",
        evaluator="unbiased energy distance to 4096 fresh points",
    ),
    Picture(
        "toy-antisymmetry/generator/comparison.png",
        "**Anti-symmetry matters.** With attraction and repulsion out of balance, "
        "samples and data no longer match when training ends.",
        "toy-antisymmetry/generator/metrics.json",
        evaluator="unbiased energy distance to 4096 fresh points",
    ),
    Picture(
        "playground/playground.png",
        "**The playground**, a page without a server ([what it does](../docs/playground.md)): points "
        "drift to two moons; the arrows belong to the point under the pointer.",
        "playground/frames.json",
        width=80,
    ),
    Picture(
        "browser/browser.png",
        "**Images inside the browser** ([how](../docs/browser.md)): the packaged model runs in the page, "
        "one network call per click.",
        "browser/browser.json",
        width=80,
    ),
    Picture(
        "studio/runs-desktop.png",
        "**The studio** ([what it does](../docs/studio.md)): the Runs tab, with a short run on digits.",
        "studio/studio.json",
        width=60,
        evaluator="a screenshot in Chromium",
    ),
    Picture(
        "studio/sample-desktop.png",
        "**Its Sample tab**: a class, guidance and a seed, and the samples of a model.",
        "studio/studio.json",
        width=60,
        evaluator="a screenshot in Chromium",
    ),
    Picture(
        "studio/sample-phone.png",
        "**The Sample tab on a phone.**",
        "studio/studio.json",
        width=30,
        evaluator="a screenshot in Chromium",
    ),
    Picture(
        "studio/runs-phone.png",
        "**The Runs tab on a phone.**",
        "studio/studio.json",
        width=30,
        evaluator="a screenshot in Chromium",
    ),
    *(
        Picture(
            f"health/{name}.png",
            f"**{title}** ([all seven](../docs/health.md)): {shown}.",
            "health/health.json",
        )
        for name, title, shown in (
            ("healthy", "A healthy run", "drift falls, spread and diversity are about 1"),
            ("collapse", "A run without repulsion", "the samples of a class become one image"),
            ("divergence", "Too much repulsion", "spread grows without bound"),
            (
                "skipped-steps",
                "A learning rate 1,000 times too high",
                "collapse, then steps that are skipped",
            ),
            ("low-temperature", "Temperatures too low", "only the nearest neighbor acts on a sample"),
            ("untrained-encoder", "An encoder with random weights", "a shallow one can go unnoticed"),
            ("initial-weights", "An average that is too slow", "it still holds the initial weights"),
        )
    ),
    Picture(
        "identifiability/identifiability.png",
        "**When does zero drift mean p = q?** The paper's appendix in numbers; "
        "[its page](identifiability/README.md) explains the panels.",
        "identifiability/identifiability.json",
    ),
    Picture(
        "policy/pusht/stills.png",
        "**PushT in one network call per chunk**: the best and the worst of 50 episodes of "
        "[the policy that ships](policy/README.md#pusht). Its mean score on them is {mean:.2f}.",
        "policy/pusht/first/unet-8-bits.json",
    ),
    Picture(
        "policy/pusht-image/stills.png",
        "**The same from images**: the best and the worst episodes of [a U-Net](policy/README.md#u-net), "
        "mean score {mean:.2f}.",
        "policy/pusht-image/first/unet.json",
    ),
    Picture(
        "policy/pusht/spread.png",
        "**Chunks of drifting, diffusion and regression from one observation of PushT**, beside those of the "
        "demonstrations.",
        "policy/pusht/spread.json",
    ),
    Picture(
        "policy/two-ways/spread.png",
        "**One observation, two ways around an obstacle** (gray). Drifting and diffusion draw both, "
        "regression drives between them.",
        "policy/two-ways/spread.json",
    ),
    Picture(
        "first-hour/samples.png",
        "**The first half hour on 1,600 photos** of jellyfish, butterflies, pizza and buses, on two CPU "
        "cores, from the packaged model of CIFAR-10: colors and textures of each class, and some shapes. "
        "{figures[agreement]:.0%} of the samples are nearest to held-out photos of their class.",
        "first-hour/evaluation.json",
    ),
    Picture(
        "first-hour/random-weights/samples.png",
        "**The same from random weights**: colors and noisy textures, no shapes, although "
        "{figures[agreement]:.0%} are nearest to photos of their class. The judge sees texture, not shape.",
        "first-hour/random-weights/evaluation.json",
    ),
    Picture(
        "tokenizer-taef2/reconstructions.png",
        "**A tiny autoencoder** (taef2): real 64-pixel images above, reconstructions below, "
        "{figures[psnr_db][mean]:.1f dB} PSNR.",
        "tokenizer-taef2/metrics.json",
        command="python results/tokenizer-taef2/measure.py",
    ),
    Picture(
        "cifar10-first/encoder/reconstructions.png",
        "**A masked autoencoder on CIFAR-10**, an early version: images, masked images, reconstructions.",
        "cifar10-first/summary.json",
        width=60,
        command="driftgen pretrain mae-cifar10",
        evaluator="masked training images",
    ),
    Picture(
        "cifar10-first/grid-step-600.png",
        "**Samples of the same early CIFAR-10 run** after 600 steps.",
        "cifar10-first/summary.json",
        width=45,
        command="driftgen train cifar10",
        evaluator="the samples themselves",
    ),
    Picture(
        "cifar10-first/drift.png",
        "**Drift of a first CIFAR-10 run** of six minutes, at three temperatures: "
        "far too short for good samples.",
        "cifar10-first/summary.json",
        width=45,
        command="driftgen train cifar10",
        evaluator="drift of each batch",
    ),
)


def gallery(results: Results) -> str:
    """Return each picture with one line: what it shows, command, hardware, evaluator."""
    return "\n\n".join(_entry(picture, results) for picture in PICTURES)


def _entry(picture: Picture, results: Results) -> str:
    if not (results.folder / picture.path).is_file():
        raise InputError(f"results/{picture.path} does not exist: remove it from tools/gallery.py")
    record: dict[str, Any] = results.load(picture.record)
    command = picture.command or re.sub(r" --out \S+", "", record["command"])
    measured_on = f"one {record['gpu']}" if record.get("gpu") else record["hardware"]
    hardware = picture.hardware or measured_on
    evaluator = picture.evaluator or _evaluator(record["evaluator"])
    what = fill(picture.what, record)
    alt = re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", what)
    image = f'<img src="{picture.path}" width="{picture.width}%" alt="{alt}">'
    hardware = re.sub(r"\b1 threads", "1 thread", hardware)
    made_by = f"`{command}` · {hardware} · {evaluator}"
    return f"{image}\n\n{what}<br>\n<sub>{made_by}</sub>"


def _evaluator(entry: str | dict[str, Any]) -> str:
    """Return an evaluator in words: records of ``driftgen eval`` describe theirs as a mapping."""
    return entry if isinstance(entry, str) else f"{entry['encoder']}, {entry['dtype']}"
