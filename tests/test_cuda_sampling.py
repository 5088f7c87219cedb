"""Fast sampling on a GPU: graphs replay what was recorded, 8-bit products are close, images of a seed are
the same."""

import gc
import json

import numpy as np
import pytest
import torch
from torch import nn

import driftgen as dg
from driftgen.bench.sampling_bench import MODES, fp8_errors
from driftgen.errors import InputError
from driftgen.generators import DiT, Noise, UNet2D
from driftgen.generators.fp8 import Fp8Linear, check_fp8, has_fp8, quantize
from driftgen.ops.cuda_graphs import GraphedFunction
from driftgen.serve.served_model import ServedImages
from tests.support.accuracy import error
from tests.support.pipelines import lively

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def eight_bits():
    try:
        check_fp8("cuda")
    except InputError as error:
        pytest.skip(str(error))


def dit(**options):
    sizes = {"input_size": 16, "hidden_size": 256, "depth": 3, "num_heads": 4, "num_classes": 10}
    return lively(DiT(**{**sizes, **options})).cuda().eval().requires_grad_(False)


def inputs(network, n, seed=0):
    noise = network.sample_noise(n, torch.Generator().manual_seed(seed))
    return *noise, torch.arange(n, device="cuda") % 10, torch.linspace(1, 2, n, device="cuda")


def called(network):
    return lambda gaussian, style, labels, alpha: network(Noise(gaussian, style), labels, alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [dit, lambda: lively(UNet2D.preset("32px")).cuda().eval()])
def test_replays_are_the_eager_call_bit_for_bit(make, dtype):
    network = make().to(dtype)
    graphed = GraphedFunction(called(network))
    kept = []
    for n, seed in [(3, 0), (3, 1), (1, 2), (4, 3), (3, 4), (1, 5)]:
        given = inputs(network, n, seed)
        with torch.inference_mode():
            want = called(network)(*given)
        kept.append((graphed(*given), want))
    assert len(graphed.captured) == 3
    for got, want in kept:  # after all calls: a result is not written to again
        assert torch.equal(got, want)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_memory_of_recordings_is_bounded():
    network = dit(input_size=32, hidden_size=384, num_heads=6).bfloat16()
    graphed = GraphedFunction(called(network), max_graphs=4)
    with torch.inference_mode():
        called(network)(*inputs(network, 2))

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    held = reserved()
    graphed(*inputs(network, 128))
    first = reserved() - held
    assert first > 2**26
    for n in (64, 96, 112, 120, 124, 126):
        graphed(*inputs(network, n))
    assert len(graphed.captured) == 4
    assert reserved() - held < 1.4 * first  # one after the other in the same place
    graphed.forget()
    assert reserved() - held < 0.5 * first
    assert graphed(*inputs(network, 3)).isfinite().all()


@pytest.mark.parametrize("output", ["latent", "numpy", "tensor"])
def test_the_host_queues_a_batch_while_another_one_runs(output):
    pipe = dg.DriftPipeline(lively(UNet2D.preset("32px")).cuda(), batch_size=4).capture()
    labels, alphas, rng = [1, 2, 3, 4], [1.0, 1.5, 2.0, 1.0], torch.Generator().manual_seed(0)
    want = pipe.generate(pipe.noise(4, 0), labels, alphas, output=output)
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = pipe._launch(labels, alphas, pipe._noise(4, rng), 4, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(pipe._finished(copy, output), want)


def test_images_of_a_seed():
    network = dit().bfloat16()
    want = dg.DriftPipeline(network, batch_size=4)(1, num_images=9, seed=3, output="latent")
    pipe = dg.DriftPipeline(network, batch_size=4).compile()
    whole = pipe(1, num_images=9, seed=3, output="latent")
    assert error(whole, want) < 0.02
    assert torch.equal(pipe(1, num_images=9, seed=3, output="latent"), whole)
    assert torch.equal(pipe(1, num_images=6, seed=3, output="latent"), whole[:6])  # a last batch, filled up
    rest = torch.cat(list(pipe.stream([1] * 9, seed=3, output="latent", skip=5)))
    assert error(rest, whole[5:]) < 0.02  # at other places in their batch
    for n in (1, 2, 3):  # sizes 1, 2, 4
        assert error(pipe(1, num_images=n, seed=3, output="latent"), whole[:n]) < 0.02
    pipe.batch_size = 2
    assert error(pipe(1, num_images=9, seed=3, output="latent"), whole) < 0.02
    assert len(pipe._call.graphed.captured) == 3
    other = pipe(1, num_images=9, seed=4, output="latent")
    assert error(other, whole) > 0.1
    # The same kernels, launched one by one.
    plain = dg.DriftPipeline(network, batch_size=4).compile(graphs=False)
    assert torch.equal(plain(1, num_images=9, seed=3, output="latent"), whole)
    # Without compiling, a captured call is the eager one at the same size.
    captured, eager = (dg.DriftPipeline(network, batch_size=4) for _ in range(2))
    captured.capture()
    options = {"num_images": 8, "seed": 3, "output": "latent"}
    assert torch.equal(captured(1, **options), eager(1, **options))
    # Labels and guidance are inputs, too, not part of the recording.
    pipe.batch_size = 4
    for label, alpha in ((2, 1.0), (7, 3.0)):
        options = {"num_images": 4, "guidance": alpha, "seed": 3, "output": "latent"}
        assert torch.equal(pipe(label, **options), plain(label, **options))


def test_a_compiled_pipeline_moves():
    network = dit()
    want = dg.DriftPipeline(network)([0, 1], seed=0, output="latent")
    pipe = dg.DriftPipeline(network.bfloat16()).compile()
    assert error(pipe([0, 1], seed=0, output="latent"), want) < 0.03
    pipe.to(dtype=torch.float32)
    assert not pipe._call.graphed.captured
    assert error(pipe([0, 1], seed=0, output="latent"), want) < 0.01  # of weights that were rounded


@pytest.mark.parametrize(("rows", "width", "out"), [(272, 768, 2304), (816, 2048, 768), (16, 1024, 5504)])
def test_products(eight_bits, rows, width, out):
    layer = nn.Linear(width, out).cuda().bfloat16()
    small = Fp8Linear(layer)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        got, plain = small(x), layer(x)
        q, scale = quantize(x)
        weight, scales = quantize(layer.weight)
        want = (q.double() * scale) @ (weight.double() * scales).t() + layer.bias.double()
    assert got.dtype == torch.bfloat16
    assert error(got, want) < 0.01
    assert error(got, plain) < 0.05


def test_errors_of_eight_bits(eight_bits):
    weak, strong = fp8_errors("S/2-32px", torch.bfloat16, torch.device("cuda"))
    assert weak["against_eager"] < 0.01
    assert weak["against_float32"] < 0.01
    assert strong["against_eager"] < 0.07
    assert strong["against_float32"] < 0.07


def test_a_pipeline_in_eight_bits(eight_bits, tmp_path):
    plain = dg.DriftPipeline(dit(), batch_size=4)
    plain.save_pretrained(tmp_path)
    want = plain([1, 2, 3], num_images=6, seed=0, output="latent")
    pipe = dg.DriftPipeline.from_pretrained(tmp_path, device="cuda", fp8=True, batch_size=4)
    assert has_fp8(pipe.generator)
    eager = pipe([1, 2, 3], num_images=6, seed=0, output="latent")
    assert error(eager, want) < 0.06
    fast = pipe.compile()([1, 2, 3], num_images=6, seed=0, output="latent")
    assert error(fast, want) < 0.06
    assert error(fast, eager) < 0.03  # less is rounded on the way where kernels are joined
    assert error(pipe(1, seed=0, output="latent"), fast[:1]) < 0.03
    assert len(pipe._call.graphed.captured) == 2


def test_benchmark(eight_bits, here, tmp_path):
    words = ["--preset", "S/2-32px", "--batch", 2, "--repeats", 2, "--device", "cuda"]
    done = here("bench", "sampling", *words, "--json", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == list(MODES)
    details = ["graph, compiled", "graph, fp8", "pipeline", "pipeline, 8 batches"]
    assert [row["detail"] for row in rows[2:]] == details
    small = rows[3]
    assert [row["std"] for row in small["errors"]] == [0.02, 0.3]
    assert small["floor"]["bytes"] < 0.8 * rows[2]["floor"]["bytes"]
    assert all(row["fits"] and row["peak_bytes"] > 0 for row in rows)


@pytest.mark.parametrize("exact", [False, True])
def test_served_images_do_not_depend_on_their_batch(exact):
    pipe = dg.DriftPipeline(dit(in_channels=3).bfloat16(), batch_size=8)
    served = ServedImages(pipe, exact=exact)
    served.warm_up()
    assert len(pipe._call.graphed.captured) == len(served.sizes) == (1 if exact else 4)
    requests = [{"seed": i, "labels": [i % 10] * (1 + i % 3), "guidance": 1.0 + i % 2} for i in range(8)]
    alone = []
    for i, request in enumerate(requests):
        served.add(i, request, {})
        alone.append(served.run([(i, 0, len(request["labels"]))]))
    parts = [(i, row, row + 1) for i, request in enumerate(requests) for row in range(len(request["labels"]))]
    for i, request in enumerate(requests):
        served.add(i, request, {})
    together = np.concatenate([served.run(parts[first : first + 8]) for first in range(0, len(parts), 8)])
    difference = np.abs(together.astype(int) - np.concatenate(alone).astype(int))
    assert (difference > 3).mean() < 0.01  # bfloat16 rounds to 8 bits
    assert len(pipe._call.graphed.captured) == len(served.sizes)  # no size is captured again
