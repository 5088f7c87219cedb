"""Train one MLP on the packaged digits from three initializations, 900 steps each.

    python results/collapse-digits/measure.py

Takes about 30 s for each on one core.
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn

import driftgen as dg
from driftgen.data.images import digits
from driftgen.support.provenance import provenance

HERE = Path(__file__).parent


class Net(nn.Sequential):
    def forward(self, noise, labels, alpha):
        x = torch.cat([noise.gaussian.flatten(1), nn.functional.one_hot(labels, 10)], dim=1)
        return super().forward(x).unflatten(1, (1, 8, 8))

    def sample_noise(self, n, generator=None):
        return dg.generators.Noise(torch.randn(n, 1, 8, 8, generator=generator), torch.zeros(n, 0))


def default():
    return Net(nn.Linear(74, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))


def orthogonal():
    net = default()
    for layer in net[::2]:
        nn.init.orthogonal_(layer.weight, gain=1.5)
    return net


def normalized():
    hidden = [nn.Linear(74, 256), nn.LayerNorm(256), nn.SiLU()]
    return Net(*hidden, nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU(), nn.Linear(256, 64))


if __name__ == "__main__":
    rows = {}
    for build in (default, orthogonal, normalized):
        torch.manual_seed(0)
        net, changes = build(), {"optim": {"steps": 900, "warmup": 200}}
        with tempfile.TemporaryDirectory() as folder:
            run = dg.train("digits", folder, data=digits("train"), generator=net, device="cpu", **changes)
            last = run.metrics[-1]
            warnings = [text for row in run.metrics for text in row.get("warnings", [])]
            rows[build.__name__] = {
                "diversity": last["diversity"],
                "spread": last["spread"],
                **run.evaluate(500),
                "warnings": warnings,
            }
    record = {
        **provenance("python results/collapse-digits/measure.py"),
        "evaluator": "precision and recall of 500 samples in pixels, k=3, against 500 training samples; "
        "diversity and spread of the last step",
        "seed": 0,
        "rows": rows,
    }
    (HERE / "metrics.json").write_text(json.dumps(record, indent=1) + "\n")
