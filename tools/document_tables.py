"""Tables of README.md, docs/ and results/README.md."""

from __future__ import annotations

from tools.cifar10_tables import best_row
from tools.policy_tables import headline, shipped_policy
from tools.records import Results, fill, markdown, select
from tools.small_set_tables import best_row as small_set_row

__all__ = [
    "browser",
    "busy_cores",
    "earlier_versions",
    "first_hour",
    "identifiability",
    "initialization",
    "performance",
    "playground",
    "readme",
    "studio",
]

TIME_AND_MEMORY = "{seconds:.3f s}, {peak_bytes:.0f GiB}"


def readme(results: Results) -> str:
    """Headline figures."""
    toy = {
        kind: [
            results.load(f"toy-bimodal/{kind}-{init}/metrics.json")
            for init in ("between", "far", "collapsed")
        ]
        for kind in ("points", "generator")
    }
    share, ratio = (
        {kind: min(run[key] for run in runs) for kind, runs in toy.items()}
        for key in ("least_mode_share", "drift_ratio")
    )
    balanced, *broken = results.load("toy-antisymmetry/generator/metrics.json")["runs"].values()
    step, whole = results.row("speed-h200/step.json"), results.row("speed-h200/step64.json")
    sampled = select(results.load("speed-h200/sampling.json")["rows"], preset="B/2", mode="graph", batch=256)
    loss = results.row("speed-cpu/loss.json")
    from_images, small = headline(results)
    rows = [
        (
            "8×8 digits in one network call, trained by `make demo` on 2 CPU cores; "
            "1,000 samples against held-out digits",
            fill(
                "{recognized:.1%} recognized; precision {precision_heldout:.2f}, recall {recall_heldout:.2f}",
                results.load("demo-digits/evaluation.json")["figures"],
            ),
        ),
        (
            "CIFAR-10 in one network call, the model that ships (8 bits), encoders trained on CIFAR-10 "
            "alone; 50,000 samples against the training images",
            fill(
                "FID {FID:.2f} at guidance {guidance:g}; precision {precision:.2f}, recall {recall:.2f}",
                best_row(results),
            ),
        ),
        (
            "Fashion-MNIST in one network call, encoder trained on it alone; 50,000 samples against the "
            "training images",
            fill(
                "FID {FID:.2f} at guidance {guidance:g}; precision {precision:.2f}, recall {recall:.2f}",
                small_set_row(results),
            ),
        ),
        (
            "PushT in one network call per chunk of actions, the policy that ships (U-Net, from states, "
            "8 bits), 50 episodes on each of three sets of seeds",
            shipped_policy(results),
        ),
        ("PushT from images, a U-Net, mean of 10 checkpoints", from_images),
        ("PushT from states, an MLP trained on a CPU, mean of four trainings (lowest to highest)", small),
        (
            "PushT: **the paper's numbers**, on Diffusion Policy's seeds",
            "drifting 0.86 from states, 0.86 from images; Diffusion Policy 0.91, 0.84",
        ),
        (
            "2-D points and a 2-D generator, bimodal target, the worst of three initial distributions: "
            "share of the weaker mode, relative to its share in the data",
            fill("points {points:.2f}, generator {generator:.2f}", share),
        ),
        (
            "the same: the loss without normalization falls during training by a factor of at least",
            fill("points {points:.0f}x, generator {generator:.0f}x", ratio),
        ),
        (
            "energy distance of a 2-D generator to fresh data, attraction and repulsion in balance (the "
            "anti-symmetric field); the best result out of balance",
            fill(
                "{energy_distance:.3f}; {best:.3f}",
                balanced,
                best=min(run["energy_distance"] for run in broken),
            ),
        ),
        (
            "training step of the paper's ablation, 8 of its 64 classes, one H200 "
            f"(authors' code on the same kind of GPU: {fill(TIME_AND_MEMORY, step['release'])})",
            fill(TIME_AND_MEMORY, step),
        ),
        (
            "the same with all 64 classes, exact, an earlier version "
            "(authors' code: about 970 GiB, extrapolated)",
            fill("{seconds:.2f s}, {peak_bytes:.0f GiB}", whole),
        ),
        (
            "one-step sampling, DiT-B/2, batch 256, bfloat16, one H200 "
            f"(authors' code: {256 / sampled['release']['seconds']:,.0f} images/s)",
            fill("{images_per_second:,.0f images/s}", sampled),
        ),
        (
            "loss with 86 features, against a literal implementation in the same run (2 CPU threads)",
            fill("{references[plain][ratio]:.1f}x as fast", loss),
        ),
        ("ImageNet 256×256, latent L/2: **the paper's number**, not measured here", "FID 1.54"),
    ]
    return markdown(("", "measured"), rows)


def performance(results: Results) -> str:
    """Time and memory on one H200, beside the authors' code."""
    step, largest = results.row("speed-h200/step.json"), results.row("speed-h200/loss.json")
    exact, previous = results.load("speed-h200/step64.json")["rows"]
    small, pretrain = results.row("speed-h200/cifar10.json"), results.row("speed-h200/pretrain.json")
    today, mae = (results.load(f"cifar10/experiments/{name}.json") for name in ("two-encoders", "encoder-2"))
    today_batch = today["config"]["batch"]["classes"] * today["config"]["batch"]["generated"]
    sampled = results.load("speed-h200/sampling.json")["rows"]
    graph, fp8 = (select(sampled, preset="B/2", mode=mode, batch=256) for mode in ("graph", "fp8"))

    def source(name: str) -> str:
        return f"([{name}](../results/speed-h200/{name}.json))"

    rows = [
        (
            f"training step of the paper's ablation, 8 classes {source('step')}",
            fill("{seconds:.3f s}", step),
            fill("{peak_bytes:.0f GiB}", step),
            fill(TIME_AND_MEMORY, step["release"]),
        ),
        (
            f"all 64 classes on one GPU, `batch.micro=8`, exact, an earlier version {source('step64')}",
            fill("{seconds:.2f s}", exact),
            fill("{peak_bytes:.0f GiB}", exact),
            "does not fit",
        ),
        (
            "the same with `batch.mode=previous`",
            fill("{seconds:.2f s}", previous),
            fill("{peak_bytes:.0f GiB}", previous),
            "does not fit",
        ),
        (
            fill("step of an earlier `cifar10`, {steps_per_second:.1f} steps per second ", small)
            + source("cifar10"),
            f"{1 / small['steps_per_second']:.3f} s",
            fill("{peak_bytes:.1f GiB}", small),
            "",
        ),
        (
            fill("training of today's `cifar10`, {samples_per_second:,.0f} samples per second ", today)
            + "([two-encoders](../results/cifar10/experiments/two-encoders.json))",
            f"{today_batch / today['samples_per_second']:.3f} s",
            "",
            "",
        ),
        (
            fill(
                "step of an earlier `mae-cifar10`, {samples_per_second:,.0f} samples per second ",
                pretrain,
            )
            + source("pretrain"),
            fill("{queued_seconds:.3f s}", pretrain),
            fill("{peak_bytes:.1f GiB}", pretrain),
            "",
        ),
        (
            fill(
                "training of today's `mae-cifar10`, {samples_per_second:,.0f} samples per second ",
                mae,
            )
            + "([encoder-2](../results/cifar10/experiments/encoder-2.json))",
            f"{mae['config']['batch_size'] / mae['samples_per_second']:.3f} s",
            "",
            "",
        ),
        (
            f"loss, 65,536 groups of width 256 {source('loss')}",
            fill("{seconds:.3g ms}", largest),
            fill("{peak_ratio:.2f} times inputs + outputs", largest),
            fill("{seconds:.3g ms}, {peak_bytes:.0f GiB}", largest["release"]),
        ),
        (
            fill("sampling, DiT-B/2, batch 256, {images_per_second:,.0f images/s} ", graph)
            + source("sampling"),
            fill("{seconds:.3g ms}", graph),
            "",
            fill("{seconds:.3g ms}", graph["release"]),
        ),
        (
            fill("the same in fp8, {images_per_second:,.0f images/s}", fp8),
            fill("{seconds:.3g ms}", fp8),
            "",
            "",
        ),
    ]
    return markdown(("", "time", "peak memory", "release"), rows)


def initialization(results: Results) -> str:
    """One MLP on digits from three initializations."""
    labels = {
        "default": "default initialization",
        "orthogonal": "`nn.init.orthogonal_(weight, gain=1.5)`",
        "normalized": "`nn.LayerNorm` before each activation",
    }
    runs = results.load("collapse-digits/metrics.json")["rows"]
    metrics = ("diversity", "precision", "recall")
    rows = [(label, *(f"{runs[name][metric]:.2f}" for metric in metrics)) for name, label in labels.items()]
    return markdown(("hidden layers", *metrics), rows)


def playground(results: Results) -> str:
    """Script per frame and steps per second of the playground."""
    record = results.load("playground/frames.json")
    cells = [
        (name, fill("{script_ms_per_frame:.1f} ms", row), fill("{steps_per_second:.0f}", row))
        for name, row in record["figures"].items()
    ]
    where = fill("{browser}; {hardware}, load average {load_average}; {evaluator}: `{command}`.", record)
    return f"{markdown(('', 'script per frame', 'steps per second'), cells)}\n\n{where}"


def browser(results: Results) -> str:
    """Time per image inside a browser, and the difference from PyTorch."""
    record = results.load("browser/browser.json")
    cells = [
        (
            name,
            fill("{model_megabytes:.1f} MB", row),
            fill("{ms_per_image:.1f} ms", row),
            fill("{ms_per_frame:.1f} ms, {frames_per_second:.0f} per second", row),
            fill("{largest_difference:.0e}", row),
            fill("{largest_pixel_difference}, in {different_pixels} of {pixels:,}", row),
        )
        for name, row in record["figures"].items()
    ]
    heads = ("", "model.onnx", "per image", "frame of a walk", "largest difference", "of pixels, 0 to 255")
    where = fill("{browser}; {hardware}, load average {load_average}; ", record)
    return f"{markdown(heads, cells)}\n\n{where}{record['evaluator']}: `{record['command']}`."


def studio(results: Results) -> str:
    """Time to the first image, and many requests at once."""
    record = results.load("studio/studio.json")
    starts, many = record["figures"]["start"], record["figures"]["concurrent"]
    memory = {
        model: tuple(run[f"peak_mb_after_{when}"]["sampling process"] for when in ("one_request", "all"))
        for model, run in many.items()
    }
    requests = fill("{requests} requests for {images_per_request} images at once", next(iter(many.values())))
    lines: tuple[tuple[str, list[str]], ...] = (
        (
            "first image after the start of the command",
            [fill("{seconds_to_first_image:.1f} s", start) for start in starts.values()],
        ),
        (
            "CPU time until then: page, sampling process",
            [
                fill("{cpu_seconds[server]:.1f} s, {cpu_seconds[sampling process]:.1f} s", start)
                for start in starts.values()
            ],
        ),
        (requests, [fill("{answered} answered in {seconds:.1f} s", run) for run in many.values()]),
        (
            "largest shift of an answer from the order of arrival",
            [fill("{largest_shift_in_order}", run) for run in many.values()],
        ),
        (
            "peak memory of the sampling process, after one request and after all",
            [f"{one:.0f}, {all_:.0f} MB" for one, all_ in memory.values()],
        ),
    )
    where = fill(
        "{hardware}, load average {load}; {evaluator}: `{command}`.",
        record,
        load=next(iter(starts.values()))["load_average_before"],
    )
    table = markdown(("", *(f"`{model}`" for model in starts)), [(what, *cells) for what, cells in lines])
    return f"{table}\n\n{where}"


def busy_cores(results: Results) -> str:
    """Time of a CPU step, idle and beside other processes."""
    record = results.load("speed-cpu/busy-cores.json")
    seconds = record["seconds"]
    rows = [
        (name, *(f"{found[name] * 1e3:.3g} ms" for found in seconds.values()))
        for name in next(iter(seconds.values()))
    ]
    return markdown((f"step of `digits`, {record['hardware']}", *seconds), rows)


def earlier_versions(results: Results) -> str:
    """Figures of earlier versions, and of today."""
    run = results.load("cifar10-first/summary.json")
    small, step = results.row("speed-h200/cifar10.json"), results.row("speed-h200/step.json")
    eager = [row for row in results.load("step-h200/step.json")["rows"] if "seconds" in row]
    settings = (
        "whole",
        "in 4 exact parts",
        "in 4 parts with the previous statistics",
        "16 classes in 4 exact parts",
        "64 classes in 16 parts with the previous statistics",
    )
    steps = [
        fill("{setting} {seconds:.2f s} and {memory_gib:.0f} GiB", row, setting=setting)
        for setting, row in zip(settings, eager, strict=True)
    ]
    rows = [
        (
            "[cifar10-first](cifar10-first/)",
            fill(
                "six minutes of the recipe `cifar10` and its encoder on one H200, far too short for good "
                "samples: {generator[steps_per_second]:.2f} steps a second of 640 generated samples and "
                "{generator[memory_gib]:.1f} GiB for the generator, "
                "{encoder[steps_per_second]:.1f} steps of 512 images for its encoder",
                run,
            ),
            fill(
                "{steps_per_second:.1f} steps a second and {peak_bytes:.1f GiB} later, by the same recipe, ",
                small,
            )
            + "[speed-h200](speed-h200/README.md)",
        ),
        (
            "[step-h200](step-h200/)",
            "the paper's ablation step on one H200, not compiled: " + "; ".join(steps),
            fill(
                "{seconds:.3f s} and {peak_bytes:.0f GiB} for the same step, `driftgen bench step --compile`",
                step,
            ),
        ),
        (
            "[sampling-h200](sampling-h200/)",
            "images per second and memory of the generators, and one training step of each preset",
            "`driftgen bench sampling`",
        ),
        (
            "[loss-cpu](loss-cpu/), [loss-h200](loss-h200/)",
            "time and memory of the loss beside a literal implementation in the same run",
            "`driftgen bench loss`",
        ),
    ]
    return markdown(("folder", "what", "today"), rows)


def identifiability(results: Results) -> str:
    """Ways in which linear independence holds or fails."""
    meaning = {
        (False, False): "V = 0 implies q = p",
        (False, True): "V = 0 implies q = p, with other coefficients",
        (True, True): "a q ≠ p has no drift",
    }
    cases = results.load("identifiability/identifiability.json")["degenerate_cases"]
    rows = [
        (
            name,
            fill("{rank} of {pairs}", case),
            meaning[case["other_equilibrium"], case["other_coefficients"]],
        )
        for name, case in cases.items()
    ]
    return markdown(("case", "rank of the vectors", "for p with equal coefficients"), rows)


def first_hour(results: Results) -> str:
    """The size ``tiny`` on real photos: time, and how the samples compare with held-out photos."""
    records = [results.load(f"first-hour/{name}evaluation.json") for name in ("", "random-weights/")]
    header = ("{photos}", "`tiny`; {hardware}", "`tiny`, `init=null`; {hardware}")
    cells = (
        ("time, encoder included", "{minutes:.0f} minutes"),
        (
            "samples nearest to held-out photos of their class (those themselves "
            "{figures[agreement of held-out photos]:.0%}, chance {figures[chance]:.0%})",
            "{figures[agreement]:.0%}",
        ),
        ("diversity, 1 for that of the photos", "{figures[diversity]:.2f}"),
        (
            "near copies of training photos (among held-out photos "
            "{figures[near copies among held-out photos]:.0%})",
            "{figures[near copies]:.0%}",
        ),
    )
    rows = [(fill(name, records[0]), *(fill(text, record) for record in records)) for name, text in cells]
    columns = [fill(text, record) for text, record in zip(header, [records[0], *records], strict=True)]
    return markdown(columns, rows)
