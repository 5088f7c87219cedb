"""Checkpoints: what goes in comes out bit by bit, and the keep rules say which ones stay."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driftgen.training.checkpoint import Checkpoints
from driftgen.training.sharding import copy_like
from tests.support.checkpoint_states import names, state, step_of
from tests.support.fork_server import run_code
from tests.support.helpers import fails

# --- what goes in comes out -------------------------------------------------------------------------------


def test_tensors_come_back_bit_by_bit(tmp_path):
    base = torch.randn(6, 8)
    base[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors = {
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
        "int32": torch.tensor([-(2**31)], dtype=torch.int32),
        "int16": torch.tensor([-5, 7], dtype=torch.int16),
        "int8": torch.tensor([-128, 127, 1], dtype=torch.int8),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "empty bfloat16": torch.empty(2, 0, dtype=torch.bfloat16),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[0].expand(3, 8),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared a": base,
        "shared b": base.view(-1)[10:20],
        "parameter": torch.nn.Parameter(base[1]),
        'odd/name "with" ψ': torch.ones(1),
    }
    path = Checkpoints(tmp_path).save(7, tensors, {"a": [1, None, "ψ"], "b": {"c": 0.1}})
    found = Checkpoints(tmp_path).load()
    assert (found.step, found.path, found.record) == (7, path, {"a": [1, None, "ψ"], "b": {"c": 0.1}})
    assert found.tensors.keys() == tensors.keys()
    for name, want in tensors.items():
        got = found.tensors[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[want.element_size()]
        assert torch.equal(
            got.contiguous().view(width) if got.ndim else got,
            want.detach().contiguous().view(width) if want.ndim else want,
        ), name
    # Any reader of safetensors can open it, and finds each tensor at a multiple of its width.
    other = load_file(path / "state.safetensors")
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in other.values() if tensor.numel())


def test_what_is_loaded_can_be_changed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.load().tensors["weights"].add_(1)
    assert step_of(checkpoints.load()) == 1


def test_no_tensors_and_nothing_there(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b")
    assert checkpoints.load() is None
    assert checkpoints.steps == checkpoints.damaged == []
    checkpoints.save(0, {}, {})
    found = checkpoints.load()
    assert (found.step, found.tensors, found.record) == (0, {}, {})


def test_wrong_input(tmp_path):
    fails(lambda: Checkpoints(tmp_path, 0), "^keep_last=0 must be at least 1")
    fails(lambda: Checkpoints(tmp_path, 1, 0), "^keep_every=0 must be at least 1")
    checkpoints = Checkpoints(tmp_path / "new")
    fails(lambda: checkpoints.save(-1, {}, {}), "^step=-1")
    fails(
        lambda: checkpoints.save(1, {"z": torch.zeros(1, dtype=torch.complex64)}, {}),
        "^tensor 'z' is torch.c",
    )
    fails(lambda: checkpoints.save(1, {"s": torch.eye(2).to_sparse()}, {}), "^tensor 's' is .*sparse")
    with pytest.raises(TypeError):
        checkpoints.save(1, {}, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        checkpoints.save(1, {}, {"a": float("nan")})
    # All before anything is written.
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    fails(
        lambda: Checkpoints(tmp_path / "file").save(1, {}, {}),
        "step-00000001 could not be written to .*no earlier",
    )


def test_saving_makes_no_second_copy(tmp_path):
    """Tensors that must be copied first are saved through a buffer that does not grow with their number."""
    code = """
import sys, torch
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.sharding import copy_like
from tests.support.helpers import peak
tensors = {str(i): torch.ones(1 << 10, 1 << 10).t() for i in range(32)}  # 4 MB each
Checkpoints(sys.argv[1]).save(0, dict(list(tensors.items())[:8]), {})
before = peak()
Checkpoints(sys.argv[1]).save(1, tensors, {})
print((peak() - before) // 2**20)
"""
    done = run_code(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20


# --- which ones stay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "every", "want"),
    [(1, None, [12]), (2, None, [11, 12]), (3, 4, [0, 4, 8, 10, 11, 12]), (20, None, list(range(13)))],
)
def test_keep_rules(tmp_path, last, every, want):
    checkpoints = Checkpoints(tmp_path, last, every)
    for step in range(13):
        path = checkpoints.save(step, state(step), {"step": step})
        assert path == tmp_path / f"step-{step:08d}"
    assert checkpoints.steps == want
    assert names(tmp_path) == [f"step-{step:08d}" for step in want]
    assert step_of(checkpoints.load()) == 12


def test_steps_of_more_than_eight_digits(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (5, 99_999_999, 100_000_000):
        checkpoints.save(step, state(step, 1), {})
    assert checkpoints.steps == [99_999_999, 100_000_000]
    assert checkpoints.load().step == 100_000_000


def test_the_same_step_again(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state(3), {"n": 1})
    real, seen = Path.replace, []

    def replace(self, target):
        seen.append(Checkpoints(tmp_path).load().record["n"])
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    checkpoints.save(3, state(3), {"n": 2})
    assert seen == [1, 1]  # at no moment is there none
    assert names(tmp_path) == ["step-00000003"]
    assert checkpoints.load().record == {"n": 2}


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "best").mkdir()
    checkpoints = Checkpoints(tmp_path, 1)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    assert names(tmp_path) == ["best", "step-00000002", "step-00000009", "step-notes"]
    assert step_of(checkpoints.load()) == 2


def test_moments_from_a_file_have_the_strides_of_the_parameter():
    """Fused Adam refuses moments of other strides than those of a channels-last parameter."""
    parameter = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    moment = torch.randn(4, 3, 2, 2)
    copied = copy_like(moment, parameter)
    assert copied.stride() == parameter.stride() != moment.stride()
    assert torch.equal(copied, moment)
    assert torch.equal(copy_like(torch.tensor(3.0), None), torch.tensor(3.0))
    copied.zero_()
    assert moment.abs().sum() > 0
