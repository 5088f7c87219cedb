"""Changes of a recipe's values, recipes of one's own, every way to get one wrong, and differences of two."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from driftgen.errors import InputError
from driftgen.support.yaml_files import _FastLoader, _load, _Loader
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.recipes import differences, load_recipe, to_yaml

ROOT = Path(__file__).parents[2]


def wrong(*arguments, **options):
    """The one line that refuses."""
    with pytest.raises(InputError) as caught:
        load_recipe(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and gives its path."""

    def write(text):
        path = tmp_path / "own.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


# Changes


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=2e-5", 2e-5),
        ("optim.lr=1E3", 1000.0),
        ("optim.lr=.5", 0.5),
        ("optim.lr = 3.5e-4", 3.5e-4),
        ("optim.steps=1e4", 10_000),
        ("optim.steps=10_000", 10_000),
        ("optim.betas.1=0.99", (0.9, 0.99)),
        ("optim.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("batch.classes=5", 5),
        ("encoders=[]", ()),
        ("encoders.0.path=runs/mine", "runs/mine"),
        ("encoders.1={kind: backbone, path: a/b}", "a/b"),
        ("encoders.1.path=runs/second", "runs/second"),
        ("encoders.0.switches.patch_sizes=[2]", {"patch_sizes": [2]}),
        ("ema.1=0.9", (0.999, 0.9)),
        ("data.augment.flip=no", False),
        ("compile=no", False),
        ("data.augment.crop_scale.0=0.5", (0.5, 1.0)),
        ("data.limit=null", None),
        ("generator.options={depth: 4}", {"depth": 4}),
        ("tokenizer.kind=sd-vae", {"kind": "sd-vae"}),
        # A file may be called anything.
        ("data.path=2024", "2024"),
        ("data.path=~/a=b", "~/a=b"),
        ("data.path=[x]/*: y", "[x]/*: y"),
        ("data.path='a b'", "a b"),
        ("data.path=", None),
        ("about=12:30", "12:30"),
    ],
)
def test_a_value_is_changed(override, value):
    config = load_recipe("cifar10", ["crops.share=0", override])
    keys = override.partition("=")[0].strip().split(".")
    places = {"optim.betas": 2, "ema.1": 1, "data.augment.crop_scale": 3, "encoders.0.switches": 3}
    depth = next((n for start, n in places.items() if ".".join(keys).startswith(start)), len(keys))
    found = config
    for key in keys[:depth]:
        if isinstance(found, tuple):
            found = found[int(key)]
        elif isinstance(found, dict):
            break
        else:
            found = getattr(found, key)
    if override.startswith("encoders.1="):
        found = found.path
    assert found == value
    assert type(found) is type(value)


def test_the_last_change_wins_and_nothing_else_changes():
    config = load_recipe("cifar10", ["optim.lr=1", "optim={lr: 2, steps: 9}", "optim.lr=3"])
    assert (config.optim.lr, config.optim.steps) == (3.0, 9)
    expected = load_recipe("cifar10").model_dump(exclude={"optim"})
    assert config.model_dump(exclude={"optim"}) == expected
    assert load_recipe("cifar10").optim.lr == 3e-3


def test_floats_without_a_point_in_files(recipe):
    assert yaml.safe_load("2e-4") == "2e-4"  # what this guards against
    path = recipe("optim: {lr: 2e-4, clip: 1e+1}\ngenerator: {options: {x: 1e-3, y: -4E2, z: 12, w: 1.5}}\n")
    config = load_recipe(path)
    assert (config.optim.lr, config.optim.clip) == (2e-4, 10.0)
    assert config.generator.options == {"x": 1e-3, "y": -400.0, "z": 12, "w": 1.5}
    assert isinstance(config.generator.options["z"], int)


def test_texts_that_look_like_numbers_survive(tmp_path):
    options = {
        "a": "2e-4",
        "b": "1.0",
        "c": "true",
        "d": "null",
        "e": "12:30",
        "f": "1",
        "g": "é # x: y",
        "h": "",
    }
    options |= {"i": 1e-7, "j": 5e20, "k": [1, [2.0, None]], "l": {"m": {}}, "n": "2024-01-01", "o": "<<"}
    config = TrainConfig.model_validate({"generator": {"options": options}})
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_recipe(path).generator.options == options


# Refusals


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr is not known: did you mean optim.lr?"),
        ("optm.lr=1", "optm.lr is not known: did you mean optim.lr?"),
        ("lr=1", "lr is not known: did you mean optim.lr?"),
        ("path=x", "path is not known: did you mean data.path?"),
        ("augment.flip=true", "augment.flip is not known: did you mean data.augment.flip?"),
        ("encoders.0.pathh=x", "encoders.0.pathh is not known: did you mean encoders.0.path?"),
        ("encoder.0.path=x", "encoder.0.path is not known: did you mean encoders.0.path?"),
        ("optim={lr: 1, stepz: 2}", "optim.stepz is not known: did you mean optim.steps?"),
        ("queue.zzzz=1", "queue.zzzz is not known: choose from queue.kind, queue.class_size, "),
        ("optim.lr.x=1", "optim.lr.x is not known: optim.lr is a single value"),
        ("encoders.5.path=x", "encoders.5 is not known: encoders has 2 entries, choose 0 to 2"),
        ("encoders.first.path=x", "encoders.first is not known: encoders has 2 entries"),
        ("batch.classes=0", "batch.classes: Input should be greater than or equal to 1, got 0"),
        ("batch.classes=many", "batch.classes: Input should be a valid integer"),
        ("batch.classes=", "batch.classes: Input should be a valid integer, got null"),
        ("optim.lr=-1e-4", "optim.lr: Input should be greater than 0, got -0.0001"),
        ("optim.lr=.nan", "optim.lr: Input should be"),
        ("optim=3", "optim: Input should be a section of key: value lines, got 3"),
        ("optim.betas.5=1", "optim.betas.5 is not known: optim.betas has 2 entries"),
        ("ema=[]", "ema: List should have at least 1 item"),
        ("precision=half", "precision: Input should be 'float32' or 'bfloat16', got half"),
        ("encoders.0={kind: mae}", "encoders.0.path is not set"),
        ("guidance.low=3.9", "guidance.low must not be above guidance.high"),
        ("task=pretrain", "task: Input should be 'train', got pretrain"),
        ("optim.lr", "'optim.lr' is not an override: write key=value, such as optim.lr=VALUE"),
        ("=3", "'=3' is not an override: write key=value, such as optim.lr=2e-4"),
        ("batch={", "batch: "),
        ("batch=!!python/object/apply:os.getcwd []", "batch: could not determine a constructor"),
    ],
)
def test_wrong_changes(override, message):
    assert wrong("cifar10", [override]).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lrr: 1\n", ": optim.lrr is not known: did you mean optim.lr?"),
        (
            "encoders:\n  - {path: a, knd: mae}\n",
            ": encoders.0.knd is not known: did you mean encoders.0.kind?",
        ),
        ("batch:\n  classes: 0\n", ": batch.classes: Input should be greater than or equal to 1, got 0"),
        ("batch: {classes: 0, positives: x}\nseed: -1\nema: [2]\n", "(and 1 more)"),
        ("seed: 1\noptim: {lr: [1\n", ", line 3: "),
        ("seed: 1\n\tema: 3\n", ", line 2: "),
        ("optim:\n  lr: 1\n  lr: 2\n", ", line 3: lr is a duplicate key"),
        ("a: 1\n---\nb: 2\n", ", line 2: "),
        ("seed: 1\nabout: \x07\n", ", line 2: a character that YAML does not allow"),
        ("about: !!python/name:os.getcwd\n", ", line 1: could not determine a constructor"),
        (b"about: \xff\n", " is not UTF-8 text"),
        ("generator: {options: &a {x: *a}}\n", ", line 1: a value contains itself"),
        ("seed: !!int x\n", ", line 1: invalid literal"),
        ("encoders: {path: x}\n", ": encoders: Input should be a valid list, got "),
        ("", " holds no configuration"),
        ("- 1\n", " holds no configuration"),
        ("1: 2\n", ": 1 is not known: choose from"),
        ("task: sing\n", ": task: Input should be one of 'train', 'pretrain', 'policy', got sing"),
        ("task: [x]\n", ": task: Input should be one of 'train', 'pretrain', 'policy'"),
    ],
)
def test_wrong_files(recipe, text, message):
    path = recipe(text)
    said = wrong(path)
    assert said.startswith(path)
    assert message in said


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(path.read_text(), id=path.stem) for path in (ROOT / "driftgen").rglob("*.yaml")),
        "[2e-4, 1e3, .5, 1_000, 0x10, 010, +3, -.inf, .nan, ~, null, '', yes, on, 12:30, 2020-01-01, True]",
        "base: &a {x: 1}\nother: {<<: *a, y: [1, *a]}\n",
        "text: |\n  two\n  lines\nfolded: >-\n  one\n  line\n? key\n: value\n",
    ],
)
def test_both_loaders_read_the_same(text):
    fast, slow = (repr(_load(loader, text)) for loader in (_FastLoader, _Loader))  # nan is not equal to nan
    assert fast == slow


def test_deep_nesting_is_one_line(recipe):
    """It would overflow the stack of libyaml."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)  # an error at the usual limit takes a second
    try:
        assert "nested too deeply" in wrong(recipe("[" * 100_000))
    finally:
        sys.setrecursionlimit(limit)


def test_blame_goes_to_the_file_only_where_it_is_due(recipe):
    path = recipe("batch: {classes: 0}\n")
    assert wrong(path, ["optim.lr=1"]).startswith(f"{path}: batch.classes: ")
    assert load_recipe(path, ["batch.classes=1"]).batch.classes == 1


def test_wrong_names(tmp_path):
    assert wrong("cifar").startswith(
        "recipe 'cifar' is not known: did you mean cifar10? choose from cifar10, "
    )
    assert wrong("nothing/like/it").endswith("or give a path to a .yaml file")
    assert wrong(str(tmp_path / "x.yaml")) == f"{tmp_path / 'x.yaml'} does not exist"
    (tmp_path / "d.yaml").mkdir()
    assert wrong(str(tmp_path / "d.yaml")).endswith("is a folder: give a regular file")


def test_the_other_command_is_named():
    line = "mae-cifar10 is a recipe for driftgen pretrain: run driftgen pretrain mae-cifar10"
    assert wrong("mae-cifar10", task="train") == line
    assert "driftgen train" in wrong("cifar10", task="pretrain")
    assert isinstance(load_recipe("mae-cifar10", ["micro=2"], task="pretrain"), PretrainConfig)
    assert wrong("mae-cifar10", ["batch.classes=3"]).startswith("batch.classes is not known: did you mean")


def test_a_file_without_a_task_serves_either(recipe):
    path = recipe("seed: 3\n")
    assert load_recipe(path).task == "train"
    assert load_recipe(path, task="pretrain").task == "pretrain"


def test_a_folder_of_the_same_name_is_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_recipe("digits").data.kind == "digits"


# Differences


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (["optim.lr=4e-4"], ["optim.lr: 0.003 -> 0.0004"]),
        (["about=other", "expect.hours=1"], []),
        (["data.path=x"], ["data.path: null -> x"]),
        (["ema=[0.9]"], ["ema: [0.999, 0.9995] -> [0.9]"]),
        (["generator.options.depth=4"], ["generator.options.depth: not set -> 4"]),
        (["encoders.0.path=b"], ["encoders.0.path: runs/mae-cifar10 -> b"]),
        (["compile=false", "seed=1"], ["seed: 0 -> 1", "compile: true -> false"]),
    ],
)
def test_differences(overrides, lines):
    assert differences(load_recipe("cifar10"), load_recipe("cifar10", overrides)) == lines


def test_a_lost_encoder_is_a_difference():
    lines = differences(load_recipe("cifar10"), load_recipe("cifar10", ["encoders=[]"]))
    assert "encoders.0.path: runs/mae-cifar10 -> not set" in lines
    assert all(re.fullmatch(r"encoders\.[01]\.\w+: .* -> not set", line) for line in lines)


def test_the_range_of_the_guidance():
    def found(*changes):
        return load_recipe("digits", ("guidance.low=2", *changes), "train").guidance_range

    assert found() == [1.0, 3.0]  # a share of the recipe's samples has no guidance
    assert found("guidance.no_guidance=0") == [2.0, 3.0]
    assert found("batch.unconditional=0") == [1.0, 1.0]
