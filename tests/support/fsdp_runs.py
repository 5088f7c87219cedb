"""Configuration of the FSDP tests."""

from driftgen.training.recipes import load_recipe

SMALL = {
    "train": [
        "batch.classes=4",
        "batch.generated=4",
        "batch.positives=4",
        "batch.unconditional=2",
        "generator.kind=dit",
        "generator.options={hidden_size: 32, depth: 2, num_heads: 2, patch_size: 2, style_codebooks: 2}",
        "ema=[0.9, 0.5]",
    ],
    "pretrain": ["batch_size=8", "mae.options={base_channels: 64, blocks: [1, 1]}", "ema=[0.9]"],
}
ALWAYS = ["output.metrics_every=1", "output.samples_every=10", "output.checkpoint_every=5", "optim.warmup=5"]


def config(task, *changes):
    recipe = "digits" if task == "train" else "mae-digits"
    return load_recipe(recipe, [*SMALL[task], *ALWAYS, *changes], task)
