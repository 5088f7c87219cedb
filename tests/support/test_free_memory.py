"""Free memory, and the refusal of what does not fit into it."""

from types import SimpleNamespace

import pytest
import torch

from driftgen.errors import InputError
from driftgen.support import free_memory as module
from driftgen.support import peak_memory
from driftgen.support.free_memory import free_memory
from driftgen.support.peak_memory import check_fits, total_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write the files of a system: 16 GiB, 4 GiB available, 1 GiB of swap, and the given control groups."""
    monkeypatch.setattr(module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(peak_memory, "total_memory", lambda device: 16 * GIB)

    def write(groups=(), **files):
        (tmp_path / "proc/self").mkdir(parents=True)
        sizes = {"MemTotal": 16, "MemAvailable": 4, "SwapFree": 1}
        text = "".join(f"{name}: {size * 2**20} kB\n" for name, size in sizes.items())
        (tmp_path / "proc/meminfo").write_text(text)
        (tmp_path / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in groups))
        for place, content in files.items():
            path = tmp_path / "groups" / place.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))

    return write


def version_2(place, limit, usage, cached):
    return {
        f"{place}memory.max": limit,
        f"{place}memory.current": usage,
        f"{place}memory.stat": f"anon 1\nfile {cached}\n",
    }


def version_1(place, limit, usage, cached):
    return {
        f"memory__{place}memory.limit_in_bytes": limit,
        f"memory__{place}memory.usage_in_bytes": usage,
        f"memory__{place}memory.stat": f"cache 1\ntotal_cache {cached}\n",
    }


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ((), {}, 5 * GIB),  # with swap
        (("0::/job",), version_2("job__", "max\n", 9 * GIB, 0), 5 * GIB),
        (("0::/job",), version_2("job__", 3 * GIB, 2 * GIB, GIB // 2), 3 * GIB // 2),
        (("0::/job/part",), version_2("job__", 3 * GIB, 2 * GIB, 0), GIB),  # of a group around it
        (("0::/elsewhere",), version_2("", 3 * GIB, 2 * GIB, 0), GIB),  # of a container, which is the root
        (("4:memory:/job", "0::/"), version_1("job__", 3 * GIB, 2 * GIB, GIB), 2 * GIB),
        (("4:memory:/job",), version_1("job__", 2**63 - 4096, 2 * GIB, GIB), 5 * GIB),  # no limit
        (("broken", "0::/job"), version_2("job__", "", "x", ""), 5 * GIB),
    ],
)
def test_free_memory_of_linux(groups, files, expected, system):
    system(groups, **files)
    assert free_memory(CPU) == expected


def test_no_answer_of_other_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROC", tmp_path)
    assert free_memory(CPU) is None
    assert free_memory(torch.device("mps")) is None
    check_fits("this", total_memory(CPU) // 2, CPU)


def test_this_machine():
    free = free_memory(CPU)
    assert free is None or 0 < free < 2**60


def test_what_torch_holds_on_a_gpu_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 6 * GIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * GIB)
    )
    assert free_memory(GPU) == 5 * GIB
    check_fits("this", 5 * GIB, GPU)
    with pytest.raises(InputError, match=r"^this takes 5\.0 GiB .* the GPU has 5\.0 GiB free of 16\.0 GiB: "):
        check_fits("this", 5 * GIB + 1, GPU)
    with pytest.raises(InputError, match=r"the GPU has 16\.0 GiB: lower the sizes$"):
        check_fits("this", 17 * GIB, GPU)


def test_what_is_free_and_not_what_there_is(system):
    system()
    check_fits("this", 5 * GIB, CPU)
    with pytest.raises(
        InputError, match=r"this takes 8\.0 GiB of memory at least, the machine has 5\.0 GiB free"
    ):
        check_fits("this", 8 * GIB, CPU, "lower it")


def test_garbage_does_not_count(monkeypatch):
    """Objects that refer to each other hold memory until the collector runs."""
    free = iter([GIB, 8 * GIB])
    monkeypatch.setattr(peak_memory, "total_memory", lambda device: 16 * GIB)
    monkeypatch.setattr(peak_memory, "free_memory", lambda device: next(free))
    check_fits("this", 6 * GIB, CPU)
