"""Cached launches pass the same arguments to the same compiled kernel as Triton does."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# A driver that compiles for a GPU, as Triton does, and writes down what would be launched on it.
SCRIPT = """
import json, torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

seen = []

class Utils:
    def load_binary(self, name, kernel, shared, device):
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.hash

    def __call__(self, x, y, z, stream, function, metadata, *rest):
        values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in rest[3:]]
        seen.append([self.name, [x, y, z], values])

class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

driver.set_active(Driver())

from driftgen.ops.launch import Launch

@triton.jit
def add_kernel(x, y, out, n, factor, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n).to(tl.float32)
    if y is not None:
        value += factor * tl.load(y + i, mask=i < n)
    tl.store(out + i, tl.floor(value) if ROUND else value, mask=i < n)

block = torch.zeros(1000)
tensors = [block[64 * k :] for k in range(3)]
crooked = [block[64 * k + 1 :] for k in range(3)]
half = [block.half(), *tensors[1:]]
alone = [tensors[0], None, tensors[2]]
calls = [tensors, tensors[::-1], crooked, half, alone, tensors, half, alone]
launch = Launch(add_kernel, 7, block.device, 100, 0.5, BLOCK=128, ROUND=True, num_warps=2)
count, real = 0, type(add_kernel).run
def run(self, *arguments, **options):
    global count
    count += 1
    return real(self, *arguments, **options)
type(add_kernel).run = run
for given in calls:
    launch(*given)
usual = count
again = Launch(add_kernel, 7, block.device, 100, 0.25, BLOCK=256, ROUND=False, num_warps=2)
again.prepare(torch.float16, torch.float32, torch.float32)
again._compilation.result()
known = sum(len(cache) for cache, *_ in add_kernel.device_caches.values())
again(*half)
compiled = sum(len(cache) for cache, *_ in add_kernel.device_caches.values()) - known
del seen[len(calls):]
for given in calls:
    add_kernel[(7,)](*given, 100, 0.5, ROUND=True, BLOCK=128, num_warps=2)
ours, others = seen[: len(calls)], seen[len(calls) :]
print(json.dumps({"ours": ours, "usual": others, "looked": usual, "compiled": compiled}))
"""


@pytest.mark.slow
def test_cached_launches_match_those_of_triton(tmp_path):
    # Triton reads the source of a kernel from its file. A child process, since this one uses the interpreter.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {
        "PATH": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["ours"] == found["usual"]
    assert found["looked"] == 4  # once for each kind of tensors, and whenever they are not aligned
    assert found["compiled"] == 0  # of what was prepared
    variants = [name for name, *_ in found["ours"]]
    assert len(set(variants[:5])) == 4
    assert variants[5:] == [variants[0], *variants[3:5]]
