"""The names of ``driftgen``."""

import subprocess
import sys

import pytest

import driftgen as dg


def test_dir_lists_every_public_name():
    assert set(dg.__all__) <= set(dir(dg))
    assert all(getattr(dg, name) is not None for name in dg.__all__)
    for name in ("train", "pretrain", "Run", "register_generator", "register_encoder", "evaluation"):
        assert name in dg.__all__


@pytest.mark.slow
def test_names_that_need_files_are_imported_on_first_use():
    code = (
        "import sys, driftgen as dg\n"
        "heavy = ('driftgen.training', 'driftgen.pipeline', 'driftgen.report', 'huggingface_hub')\n"
        "print([name for name in heavy if name in sys.modules], 'train' in dir(dg))\n"
        "print(dg.evaluation.precision_recall.__name__, dg.Run.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] True", "driftgen.evaluation.precision_recall Run"]


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(dg, "no_such_name")
