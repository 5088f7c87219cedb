"""The wheel and the sdist, built here and installed elsewhere, work from what they carry."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def files(folder):
    """Files below a folder of the repository, without compiled ones."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in paths}


def build(builder, out):
    (path,) = builder(str(ROOT)).build(directory=str(out), versions=["standard"])
    return Path(path)


def test_extras_of_all():
    """``all`` names every extra but those for people who change the package."""
    extras = PROJECT["optional-dependencies"]
    names = re.fullmatch(r"driftgen\[(.+)\]", extras["all"][0])[1].split(",")
    assert sorted(names) == sorted(extras.keys() - {"all", "dev", "docs"})


@pytest.mark.slow
def test_every_file_of_the_package_travels(tmp_path):
    with zipfile.ZipFile(build(WheelBuilder, tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files("driftgen")
    with tarfile.open(build(SdistBuilder, tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert files("driftgen") | files("tests") | {"LICENSE", "README.md", "PKG-INFO"} <= names


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the wheel, built from the sdist; libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with tarfile.open(build(SdistBuilder, folder)) as sdist:
        sdist.extractall(folder, filter="data")
    (source,) = folder.glob("driftgen-*/")
    (wheel,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("bin/python" if os.name == "posix" else "Scripts/python.exe")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    # A path in a .pth file adds the libraries, but not the editable driftgen, itself a .pth file among them.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries), encoding="utf-8")
    return python


@pytest.fixture
def run(installed, tmp_path):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment = clean | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}

    def call(*words, code=None):
        command = [str(installed), "-m", "driftgen", *words] if code is None else [str(installed), "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.slow
def test_the_installed_package_works_elsewhere(run, tmp_path):
    origin = Path(run(code="import driftgen; print(driftgen.__file__)").strip())
    assert ROOT not in origin.parents
    assert "ok" in run("doctor")

    # The quick demo trains: most digits are recognized, and the page says that a longer one exists.
    *_, note, page = run("demo", "--quick").splitlines()
    assert note == "A quick run: driftgen demo trains for minutes, to better digits."
    assert page == str(Path("runs", "demo-quick", "report.html"))
    assert (tmp_path / page).is_file()
    record = json.loads((tmp_path / "runs" / "demo-quick" / "evaluation.json").read_text(encoding="utf-8"))
    assert record["figures"]["recognized"] > 0.5

    for name in ("digits", "cifar10"):
        run("sample", name, "--number", "4", "--out", f"{name}-samples")
        assert len(list((tmp_path / f"{name}-samples").glob("*.png"))) >= 4
    run("sample", "runs/demo-quick", "--number", "2", "--out", "own")

    if find_spec("gym_pusht"):
        told = run("policy", "rollout", "pusht", "--seed", "3", "--video", "out.mp4")
        assert re.search(r"seed 3: score (0\.[89]\d+|1\.000), ", told)
        assert (tmp_path / "out.mp4").stat().st_size > 10_000

    play = run("toy", "--play").splitlines()[0]
    assert Path(play).is_relative_to(origin.parent)
    assert "<canvas" in Path(play).read_text(encoding="utf-8")
    assert "cifar10" in run("recipes")
    run("train", "digits", "--dry-run", "--set", "optim.steps=2")
