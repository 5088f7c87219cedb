"""Download from and upload to the Hub, against a local server."""

import json
from pathlib import Path

from driftgen.interop import hub
from tests.support.fork_server import run_code
from tests.support.hub_server import hub_server

DATA = Path(__file__).parents[1] / "data"
PIXEL = DATA / "artifacts" / "ditgen_C_pixel_patch4" / "params_ema"


def run(code, address, cache, **environment):
    """Run code in a second process: the client reads its address when it is imported."""
    env = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
    done = run_code(code, cwd=cache, env={**env, "PATH": "", "HF_HUB_DISABLE_TELEMETRY": "1", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def released(name, folder):
    return {f"{hub.RELEASED[name][0]}/{name}/{p.name}": p.read_bytes() for p in folder.iterdir()}


def test_a_released_model_is_downloaded_by_name_and_cached(tmp_path):
    code = (
        "import driftgen as dg; pipe = dg.DriftPipeline.from_pretrained('hf://ablation')\n"
        "net = dg.load_official('hf://ablation')\n"
        "print(pipe.guidance, pipe(2, output='numpy', seed=1).shape, net.config.num_classes)"
    )
    repositories = {hub.RELEASE_REPOSITORY: released("ablation", PIXEL) | {"models/gen/jax/other/x": b"no"}}
    with hub_server(repositories) as address:
        assert run(code, address, tmp_path) == "2.0 (1, 16, 16, 3) 10"
        assert not list(tmp_path.rglob("other"))  # only the requested folder is downloaded
    assert run(code, address, tmp_path) == "2.0 (1, 16, 16, 3) 10"  # from the cache: the server is down


def test_push_and_fetch_again(tmp_path):
    folder = PIXEL.as_posix()
    repositories = {}
    with hub_server(repositories) as address:
        push = (
            f"import driftgen as dg; pipe = dg.DriftPipeline.from_pretrained({folder!r})\n"
            "print(pipe.push_to_hub('me/tiny', private=True))"
        )
        assert run(push, address, tmp_path) == f"{address}/me/tiny"
        assert set(repositories["me/tiny"]) == {"config.json", "model.safetensors", "README.md"}
        assert b'from_pretrained("me/tiny")' in repositories["me/tiny"]["README.md"]
        fetch = (
            "import driftgen as dg, numpy as np\n"
            f"a = dg.DriftPipeline.from_pretrained({folder!r})(3, seed=0, output='numpy')\n"
            "b = dg.DriftPipeline.from_pretrained('me/tiny')(3, seed=0, output='numpy')\n"
            "print(np.array_equal(a, b))"
        )
        assert run(fetch, address, tmp_path) == "True"


REFUSED = {
    "hf://ablation": "cannot be reached: download it on a machine with a network",
    "nobody/nothing": "nobody/nothing is neither a folder here nor in the local cache, and the Hugging Face",
    "hf://abltion": "hf://abltion is not a released model: choose from hf://latent_L_sota",
    "runs/nope": "runs/nope not found: runs holds no run or model; make one with driftgen train",
    "no such thing": "no such thing does not exist: give a folder, owner/repository, hf://name, or a model",
}


def test_without_a_network(tmp_path):
    code = (
        "import driftgen as dg, json\nlines = {}\n"
        f"for name in {list(REFUSED)!r}:\n"
        "    try: dg.DriftPipeline.from_pretrained(name)\n"
        "    except dg.InputError as error: lines[name] = str(error)\n"
        "print(json.dumps(lines))"
    )
    lines = json.loads(run(code, "http://127.0.0.1:9", tmp_path))
    for name, message in REFUSED.items():
        assert message in lines[name]
        assert "\n" not in lines[name]


def test_a_missing_repository(tmp_path):
    code = (
        "import driftgen as dg\n"
        "try: dg.DriftPipeline.from_pretrained('nobody/nothing')\n"
        "except dg.InputError as error: print(error)"
    )
    with hub_server({}) as address:
        line = run(code, address, tmp_path)
    assert "nobody/nothing cannot be downloaded from the Hugging Face Hub: RepositoryNotFoundError" in line


def test_names():
    assert hub.is_hub_name("owner/repository")
    assert hub.is_hub_name("hf://ablation")
    assert not hub.is_hub_name("/a/folder")
    assert not hub.is_hub_name("folder")
