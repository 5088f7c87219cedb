"""Files from elsewhere: damage, odd values, pipes, bombs and absurd sizes give one line with the file."""

import ast
import json
import logging
import os
import random
import socket
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.data.config import Data
from driftgen.data.decode import MAX_PIXELS, center_crop, decode
from driftgen.data.images import open_images
from driftgen.data.latents import LatentCache
from driftgen.generators.image_mlp import ImageMLP
from driftgen.report.run_files import read_run
from driftgen.support import meta_init, untrusted_files, yaml_files
from driftgen.support.distributed import Distributed
from driftgen.support.meta_init import check_network_size
from driftgen.support.peak_memory import total_memory
from driftgen.support.untrusted_files import read_array, read_arrays, read_json, reading
from driftgen.support.yaml_files import parse, read_text
from driftgen.tokenizers import Identity
from driftgen.training.ablation_run import _read_json
from driftgen.training.config import Batch
from driftgen.training.recipes import load_recipe
from driftgen.training.step_memory import check_step, step_bytes
from tests.support.damaged_files import damage, odd_record, try_format
from tests.support.file_formats import FORMATS, SLOW_FORMATS, Format
from tests.support.helpers import fails

NAMES = [entry.name for entry in FORMATS]


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    """Import what loaders import on first use, before the first test is timed."""
    for name in ("zarr", "h5py", "pyarrow.parquet", "matplotlib.pyplot", "huggingface_hub"):
        pytest.importorskip(name)


@pytest.mark.parametrize("entry", FORMATS, ids=NAMES)
def test_damage_is_one_line_that_names_the_file(entry, tmp_path):
    counts = try_format(entry, 0, 12, tmp_path)
    assert not counts.faults, "\n".join(map(str, counts.faults))
    assert counts.tried == 12 == counts.kinds["loaded"] + counts.kinds["refused"]
    assert counts.tried == counts.kinds["damages"] + counts.kinds["odd values"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", FORMATS + SLOW_FORMATS, ids=[*NAMES, *(e.name for e in SLOW_FORMATS)])
def test_much_damage(entry, tmp_path):
    counts = try_format(entry, 1000, 400, tmp_path)
    assert not counts.faults, "\n".join(map(str, counts.faults[:20]))


@pytest.mark.parametrize(
    ("name", "seed"), [("image, TIFF", 5197), ("images, parquet", 5030), ("policy scores", 4844)]
)
def test_libraries_print_nothing_about_damage(name, seed, tmp_path):
    """Pillow and datasets log errors that they raise, too; NumPy warns about the squares of large scores."""
    entry = next(entry for entry in FORMATS + SLOW_FORMATS if entry.name == name)
    counts = try_format(entry, seed, 1, tmp_path)
    assert not counts.faults, "\n".join(map(str, counts.faults))
    assert counts.tried == 1


@pytest.mark.filterwarnings("ignore")  # the loader also runs before it is listened to
@pytest.mark.parametrize("how", ["print", "descriptor", "warning", "log", "handler"])
def test_a_loader_that_prints_is_found(how, tmp_path):
    own = logging.getLogger("library with a handler of its own")
    if how == "handler":
        own.addHandler(logging.StreamHandler())
        own.propagate = False
    says = {
        "print": lambda: print("x"),
        "descriptor": lambda: os.write(2, b"x"),
        "warning": lambda: warnings.warn("x", stacklevel=1),
        "log": lambda: logging.getLogger("library").error("x"),
        "handler": lambda: own.error("x"),
    }
    entry = Format("any", lambda folder: (folder / "a").write_text("x"), lambda folder: says[how](), ("a",))
    counts = try_format(entry, 0, 2, tmp_path)
    assert [fault.text.split(": ")[-1] for fault in counts.faults] == ["prints 'x'"] * 2


def test_cases_are_kept_by_their_seed():
    """The same seed gives the same case, and different seeds give many kinds."""
    content = bytes(range(256)) * 4
    assert damage(content, random.Random("a")) == damage(content, random.Random("a"))
    kinds = {damage(content, random.Random(i))[0].split()[0] for i in range(200)}
    assert len(kinds) == 9
    record = {"a": 1, "b": [2, {"c": None}]}
    assert len({odd_record(record, random.Random(i))[0] for i in range(300)}) > 60
    assert record == {"a": 1, "b": [2, {"c": None}]}


def test_numbers_of_an_ablation_record_are_numbers(tmp_path):
    (tmp_path / "r.json").write_text('{"seconds": "1.5", "scores": {"a": {"1.0": {"fid": 3}}}, "more": "x"}')
    expected = {"seconds": 1.5, "scores": {"a": {"1.0": {"fid": 3.0}}}, "more": "x"}
    assert _read_json(tmp_path / "r.json") == expected


class Panic(BaseException):
    pass


Panic.__name__ = "PanicException"


def test_any_error_of_a_parser_becomes_one_line():
    errors = [
        *(ValueError("a\nb"), KeyError("k"), MemoryError(), RecursionError("x"), NotImplementedError()),
        *(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), OSError(5, "Input/output error"), Panic("rust")),
        *(AttributeError("a"), ZeroDivisionError(), AssertionError(), StopIteration()),
    ]
    for error in errors:
        with (
            pytest.raises(dg.InputError, match=r"^f\.x cannot be read as a y \(.+\): copy it again$"),
            reading("f.x", "a y"),
        ):
            raise error
    with pytest.raises(dg.InputError, match=r"^mine$"), reading("f.x", "a y"):
        raise dg.InputError("mine")
    with pytest.raises(KeyboardInterrupt), reading("f.x", "a y"):
        raise KeyboardInterrupt


def loaders(path):
    yield lambda: read_json(path, "a record")
    yield lambda: read_array(path)
    yield lambda: read_arrays(path)
    yield lambda: untrusted_files.read_tensors(path)
    yield lambda: open_images(Data(path=str(path), size=8, workers=0))


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_only_regular_files_are_opened(kind, tmp_path):
    """A named pipe without a writer would block for ever; /dev/zero has no end."""
    for suffix in (".npy", ".npz", ".json", ".safetensors"):
        path = tmp_path / f"a{suffix}"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                os.chdir(tmp_path)
                server.bind(path.name)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        for load in loaders(path):
            with pytest.raises(dg.InputError, match=rf"a{suffix}"):
                load()


def test_a_pipe_among_images_and_in_a_model(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    os.mkfifo(folder / "a.png")
    fails(lambda: open_images(Data(path=str(folder), size=8, workers=0)), r"a\.png")
    model = tmp_path / "model"
    dg.save_model(ImageMLP(input_size=4, in_channels=1, hidden_size=16, depth=1, condition_size=4), model)
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
        fails(lambda: dg.load_model(model), rf"{name}( is a named pipe| holds no)?")
    cache = tmp_path / "cache"
    cache.mkdir()
    os.mkfifo(cache / "cache.json")
    fails(lambda: LatentCache(cache), "cache.json is a named pipe")


def test_numbers_of_json_are_finite(tmp_path):
    path = tmp_path / "a.json"
    for text in ('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": 1' + "0" * 5000 + "}", "[" * 10**5):
        path.write_text(text)
        fails(lambda: read_json(path, "a record"), r"a\.json cannot be read as a record")
    path.write_text("3")
    fails(lambda: read_json(path, "a record"), "holds no JSON object")


def test_sizes_are_checked_before_anything_is_allocated(tmp_path):
    """An array whose header claims more than the file holds, and a small zip file that unpacks to much."""
    header = np.lib.format.header_data_from_array_1_0(np.zeros(1)) | {"shape": (10**15,)}
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    fails(lambda: read_array(tmp_path / "a.npy"), r"a\.npy cannot be read as an array")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", b"x")
        archive.filelist[0].file_size = total_memory(torch.device("cpu")) + 1
    fails(lambda: read_arrays(tmp_path / "a.npz"), r"a\.npz takes .* GiB of memory at least, the machine has")


def test_a_member_that_is_no_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", b"\0" * 200)
    fails(lambda: read_arrays(tmp_path / "a.npz"), r"a\.npz cannot be .* \(images is not a NumPy array\)")


def test_yaml_aliases_are_counted():
    """Nine lines stand for a billion values; a few aliases are fine."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    fails(lambda: parse("\n".join(lines), "own.yaml"), r"own\.yaml: more than 100,000 values, aliases")
    merges = ["a0: &a0 {x: 1, y: 2}"]
    merges += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)]
    fails(lambda: parse("\n".join(merges), "own.yaml"), "more than 100,000 values")
    fails(lambda: parse("&a [*a]", "own.yaml"), "a value contains itself")
    assert parse("a: &x {b: 1}\nc: {<<: *x, d: *x}", "x") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}


@pytest.mark.parametrize("option", ["depth", "hidden_size", "condition_size", "input_size", "in_channels"])
@pytest.mark.parametrize("value", [10**9, 10**30, -1, 0, 1.5, "x", None, True])
def test_absurd_options_of_a_saved_model(option, value, tmp_path):
    dg.save_model(ImageMLP(input_size=4, in_channels=1, hidden_size=16, depth=2, condition_size=4), tmp_path)
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    record["options"][option] = value
    path.write_text(json.dumps(record))
    with pytest.raises(dg.InputError, match=r"config\.json|model\.safetensors"):
        dg.load_model(tmp_path)


def test_a_network_larger_than_the_memory_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(meta_init, "LARGEST", 500)
    state = torch.random.get_rng_state()
    fails(
        lambda: check_network_size(lambda: ImageMLP(input_size=8, in_channels=1, hidden_size=10**6)),
        "takes .* GiB of memory at least, the machine has .* GiB: lower its width or depth",
    )
    fails(
        lambda: check_network_size(lambda: torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(10**9))),
        "more than 500 tensors: lower its depth",
    )
    check_network_size(lambda: ImageMLP(input_size=8, in_channels=1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_larger_than_the_memory_is_refused(tmp_path):
    batch = Batch(classes=3, generated=4, positives=5, unconditional=2)
    assert step_bytes(batch, (1, 2, 2)) == 4 * (3 * (2 * 4 + 5 + 2) * 4 + 4 * (4 + 5 + 2))
    assert step_bytes(batch, (1, 2, 2), 3, fused=True) == 4 * (2 * 4 + 5 + 2) * 4
    options = {"batch.classes": 2 * 10**9, "optim.steps": 1}
    fails(lambda: dg.train("digits", out=tmp_path, **options), "a step of 2,000,000,000 classes .* takes")


def test_a_thin_image_takes_little_memory():
    """The two-step result up to one level, and never an image larger than ``16 size``."""
    random_ = np.random.default_rng(0)
    for width, height, size in ((10, 400, 8), (400, 10, 8), (33, 700, 32), (5, 333, 16), (130, 4003, 64)):
        image = Image.fromarray(random_.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = two_steps(image, size)
        difference = np.abs(np.asarray(center_crop(image, size), int) - np.asarray(expected, int))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.01
    normal = Image.fromarray(random_.integers(0, 256, (61, 640, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(center_crop(normal, 48)), np.asarray(two_steps(normal, 48)))
    assert center_crop(Image.new("L", (1, 200_000)), 512).size == (512, 512)  # two steps: 52 GB


def two_steps(image, size):
    """ADM's center crop as published."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = size / min(image.size)
    shape = (round(image.width * factor), round(image.height * factor))
    image = image.resize(shape, Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def test_decoded_pixels_are_bounded(tmp_path):
    side = int(MAX_PIXELS**0.5) + 1
    Image.new("1", (side, side)).save(tmp_path / "a.png")
    fails(
        lambda: open_images(Data(path=str(tmp_path), size=8, workers=0)), r"a\.png .*pixels, at most 134,217"
    )


def shown(tmp_path, image, name="a.png", channels=3, **options):
    image.save(tmp_path / name, **options)
    return decode(
        str(tmp_path / name), image.width if image.width <= image.height else image.height, channels
    )


def test_images_are_decoded_as_a_viewer_shows_them(tmp_path):
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3) * 5
    plain = Image.fromarray(pixels)
    assert np.array_equal(shown(tmp_path, plain), pixels)
    # EXIF orientation: what each number means, by the definition of the standard.
    turns = {
        1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1],
        5: pixels.transpose(1, 0, 2), 6: np.rot90(pixels, -1), 7: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: np.rot90(pixels),
    }  # fmt: skip
    for number, expected in turns.items():
        exif = plain.getexif()
        exif[0x0112] = number
        assert np.array_equal(shown(tmp_path, plain, exif=exif), expected), number
    # CMYK: no ink is white, full black is black, one ink removes its color.
    inks = np.array([[[0, 0, 0, 0], [0, 0, 0, 255]], [[255, 0, 0, 0], [0, 255, 255, 0]]], np.uint8)
    expected = np.array([[[255] * 3, [0] * 3], [[0, 255, 255], [255, 0, 0]]])
    assert np.array_equal(shown(tmp_path, Image.fromarray(inks, "CMYK"), "a.tif"), expected)
    # 16 bits: 65535 is white.
    wide = np.array([[0, 257], [32896, 65535]], np.uint16)
    assert shown(tmp_path, Image.fromarray(wide), channels=1)[..., 0].tolist() == [[0, 1], [128, 255]]
    assert shown(tmp_path, Image.fromarray(wide), "a.tif")[..., 2].tolist() == [[0, 1], [128, 255]]
    # Gray, and gray with alpha: transparent is white.
    gray = Image.fromarray(np.array([[0, 100], [200, 255]], np.uint8))
    assert shown(tmp_path, gray)[..., 1].tolist() == [[0, 100], [200, 255]]
    gray.putalpha(Image.fromarray(np.array([[255, 0], [255, 255]], np.uint8)))
    assert shown(tmp_path, gray)[..., 0].tolist() == [[0, 255], [200, 255]]
    # A palette with a transparent color.
    palette = Image.fromarray(np.array([[0, 1], [2, 0]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    expected = [[[10, 20, 30], [255] * 3], [[70, 80, 90], [10, 20, 30]]]
    assert shown(tmp_path, palette, transparency=1).tolist() == expected
    assert shown(tmp_path, palette, "a.gif", transparency=1).tolist() == expected
    # One bit per pixel.
    assert shown(tmp_path, Image.fromarray(np.array([[True, False], [False, True]])))[..., 0].tolist() == [
        [255, 0],
        [0, 255],
    ]


def test_an_image_with_damaged_exif_is_shown(tmp_path):
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff garbage"
    Image.new("RGB", (8, 8), (90, 90, 90)).save(tmp_path / "a.jpg", exif=exif)
    assert decode(str(tmp_path / "a.jpg"), 8, 3)[0, 0].tolist() == [90, 90, 90]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.int8}, {"max_shard_size": "2KB"}], ids=str)
def test_every_flipped_byte_of_the_weights_is_found(options, tmp_path):
    torch.manual_seed(0)
    model = ImageMLP(input_size=4, in_channels=1, hidden_size=16, depth=1, condition_size=4)
    dg.save_model(model, tmp_path, **options)
    dg.load_model(tmp_path)
    files = sorted(path for path in tmp_path.iterdir() if path.name.startswith("model"))
    assert json.loads((tmp_path / "config.json").read_text())["checksums"].keys() == {f.name for f in files}
    for seed in range(20):
        rng = random.Random(seed)
        path = rng.choice([file for file in files if file.suffix == ".safetensors"])
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content) // 2, len(content))
        content[at] ^= 1 << rng.randrange(8)
        before = path.read_bytes()
        path.write_bytes(content)
        fails(lambda: dg.load_model(tmp_path), r"model.*\.safetensors is damaged .*checksum.* --no-verify")
        dg.load_model(tmp_path, verify=False)
        path.write_bytes(before)


def test_models_without_checksums_load(tmp_path):
    dg.save_model(ImageMLP(input_size=4, in_channels=1, hidden_size=16, depth=1, condition_size=4), tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    del record["checksums"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    dg.load_model(tmp_path)
    record["checksums"] = {"../../etc/passwd": "0" * 64}
    (tmp_path / "config.json").write_text(json.dumps(record))
    fails(lambda: dg.load_model(tmp_path), "has no checksum in config.json")


def test_flipped_latents_are_found_when_they_are_read(tmp_path):
    entry = next(entry for entry in FORMATS if entry.name == "latent cache")
    entry.make(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    cache = LatentCache(tmp_path)
    cache.load(torch.arange(4), 0)  # of the other shard
    fails(lambda: [cache.load(torch.arange(6), seed) for seed in range(4)], "00001.* is damaged .checksum of")


def test_absurd_batches_of_pretraining_and_of_policies(tmp_path):
    fails(
        lambda: dg.pretrain("mae-digits", out=tmp_path, batch_size=2**31 - 1),
        "a step of batch_size=2147483647",
    )
    options = {"batch.observations": 2**31 - 1}
    fails(
        lambda: dg.train("two-ways", out=tmp_path, **options), "a step of batch.observations=2147483647 takes"
    )


# Calls that parse a file, and the modules that make them inside ``reading`` or catch every exception.
PARSERS = {
    "np.load": {"untrusted_files", "images"},  # images: the digits of the package
    "safe_open": {"untrusted_files", "sharded_safetensors"},
    "load_file": {"untrusted_files", "checkpoint"},
    "torch.load": {"untrusted_files"},
    "zipfile.ZipFile": {"untrusted_files", "inception", "zarr_chunks", "downloads"},  # the last writes
    "tarfile.open": {"tar_shards", "onnxruntime_web"},  # onnxruntime_web: a file of a known checksum
    "lzma.open": {"episode_files"},
    "h5py.File": {"episode_files", "collect"},  # collect: writes
    "Image.open": {"image_files"},
    "open_image": {
        *("decode", "hf_datasets", "lerobot_files", "embedded_images", "observation_body", "sample_folder"),
        "sheets",
        "trackers",  # its own preview
    },
    "json.load": set(),
    "yaml.load": set(),
    "yaml.safe_load": set(),
    "pickle.load": set(),
}


def test_files_are_parsed_in_known_places_alone():
    package, found = Path(dg.__file__).parent, {name: set() for name in PARSERS}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in found:
                found[name].add(path.stem)
            # The text of a file goes to json.loads through read_bytes, which opens regular files alone.
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads":
                assert "read_text" not in ast.unparse(node), f"{path}: use read_json of untrusted_files"
    assert found == PARSERS


def test_large_yaml_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    """PyYAML reads 300 kB per second."""
    path = tmp_path / "config.yaml"
    path.write_text("a: " + "x " * 2**19)
    fails(lambda: read_text(path), "config.yaml has .*: at most .* are read")
    assert read_run(tmp_path).notes == ("config.yaml is left out: it cannot be read.",)
    monkeypatch.setattr(yaml_files, "MAX_VALUES", 100)
    # The bracket that is wrong comes after the values.
    fails(lambda: parse("a: [" + "x," * 5000 + "}", "config.yaml"), "config.yaml: more than 100 values")


def test_labels_of_bytes(tmp_path):
    path, images = tmp_path / "a.npz", np.zeros((2, 4, 4), np.uint8)
    np.savez(path, images=images, labels=np.array(["caf\xe9".encode(), b"x"]))
    assert open_images(Data(path=str(path), size=4)).class_names == ["caf\xe9", "x"]
    odd = np.array([b"caf\xe9", b"x"])
    np.savez(path, images=images, labels=odd)
    fails(lambda: open_images(Data(path=str(path), size=4)), r"a\.npz: labels hold b'caf.*not UTF-8 text")
    np.savez(path, images=images, labels=np.arange(2), class_names=odd)
    fails(lambda: open_images(Data(path=str(path), size=4)), r"a\.npz: class_names hold b'caf.*not UTF-8")


def test_sizes_beyond_the_memory_are_one_line(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((100, 4, 4), np.uint8))
    open_data = partial(open_images, Data(path=str(tmp_path / "a.npz"), size=10**6, channels=1))
    fails(open_data, "100 images of data.size=1000000 takes .* GiB .*: lower data.size")
    x = torch.zeros(1, 2).expand(3_000_000, 2)
    message = "comparing 3,000,000 samples with 6,000,000 takes .* GiB .*: pass fewer samples at a time"
    fails(lambda: dg.drift_field(x, x, temperature=0.1), message)
    fails(lambda: dg.DriftingLoss()(x, x), message)
    batch = load_recipe("digits").batch.model_copy(update={"positives": 10**12})
    processes = Distributed.start("cpu")
    fails(
        lambda: check_step(batch, (1, 8, 8), processes),
        "batch.positives=1,000,000,000,000 .*: lower batch.pos",
    )
    fails(
        lambda: check_step(batch.model_copy(update={"generated": 10**13}), (1, 8, 8), processes),
        "lower batch.generated or batch.classes",
    )


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"tokenizer": 5}, {"tokenizer": Identity(3)}])
def test_wrong_arguments_are_not_blamed_on_the_file(options):
    with pytest.raises(dg.InputError, match=r"batch_size=0|tokenizer=5|decodes 3 channels") as error:
        dg.DriftPipeline.from_pretrained("digits", **options)
    assert "config.json" not in str(error.value)
