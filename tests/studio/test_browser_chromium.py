"""The page that generates images, in Chromium: Python's images, walks, settings, keyboard."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.support.images import to_uint8
from driftgen.support.portable_noise import portable_noise
from tests.support import exported
from tests.support.web_pages import CONTRASTS, SIZES, UNNAMED
from tools.chromium import chromium_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium: apt-get install chromium"),
]

GUIDE = Path(__file__).parents[2] / "docs" / "browser.md"
SEED = 2**53 - 100  # of two words
DONE = "page.ready && page.images.length === page.settings.number"


@pytest.fixture
def visit(browser, serve):
    """Open the page of a folder; at the end nothing may have been written to the console."""
    complaints, contexts = [], []

    def call(folder, size="desktop", scheme="light", plain=False, script=None, **options):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if script:
            page.add_init_script(script)
        page.goto(serve(folder, plain))
        until(page, DONE)
        return page

    yield call
    for context in contexts:
        context.close()
    assert not complaints


def until(page, condition, seconds=60):
    page.wait_for_function(condition, timeout=1000 * seconds)


def images_of(page):
    """The newest images: floats that the network gave, and pixels of the canvases."""
    values = page.evaluate("page.values.flatMap((batch) => [...batch])")
    pixels = page.evaluate(
        """[...document.querySelectorAll('#grid canvas')].map((canvas) => {
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
        copy.drawImage(canvas, 0, 0);
        return [...copy.getImageData(0, 0, canvas.width, canvas.height).data];
        })"""
    )
    size = page.evaluate("[page.model.channels, page.model.height, page.model.width]")
    floats = np.array(values, np.float32).reshape(-1, *size)
    return floats, np.array(pixels, np.uint8).reshape(len(pixels), *size[1:], 4)[..., :3]


@torch.no_grad()
def by_python(pipe, folder, n, seed, label=None, alpha=None, noise=None):
    """The same images by PyTorch: floats and pixels."""
    record = json.loads((folder / "model.json").read_text())
    number = record["classes"]["number"]
    labels = np.arange(n) % number if label is None else np.full(n, label)
    inputs = portable_noise(record["noise"]["tensors"], n, seed) if noise is None else noise
    inputs |= {"labels": labels, "alpha": np.full(n, alpha or record["guidance"]["default"], np.float32)}
    floats = exported.expected(pipe, inputs)
    pixels = to_uint8(torch.from_numpy(floats))
    return floats, np.broadcast_to(pixels, (*pixels.shape[:3], 3))


def compare(found, expected):
    """Assert that images agree, and return the largest difference of floats and of pixels."""
    assert expected[0].std() > 0.05
    difference = np.abs(found[0] - expected[0]).max()
    steps = np.abs(found[1].astype(int) - expected[1]).max()
    assert difference < 1e-4
    assert steps <= 1  # pixels are truncated: rounding may cross a step
    return difference, steps


@pytest.mark.parametrize("name", ["digits", "dit", "unet"])
def test_images_are_those_of_python(visit, folder_of, name, record_property):
    pipe, folder = folder_of(name)
    page = visit(folder)
    number = page.evaluate("page.settings.number")
    differences = [compare(images_of(page), by_python(pipe, folder, number, 0))]
    page.fill("#seed", str(SEED))
    until(page, f"page.settings.seed > 1 && {DONE}")
    differences.append(compare(images_of(page), by_python(pipe, folder, number, SEED)))
    record_property("largest differences of floats and pixels", str(np.max(differences, axis=0)))


def test_a_slow_network_shows_images_one_by_one(visit, folder_of, tmp_path):
    pipe, folder = folder_of("digits")
    copy = shutil.copytree(folder, tmp_path / "copy")
    model = copy / "browser" / "model.mjs"
    text = model.read_text(encoding="utf-8")
    assert "Math.floor(200 / " in text
    model.write_text(text.replace("Math.floor(200 / ", "Math.floor(1e-9 / "), encoding="utf-8")
    page = visit(copy)
    assert page.evaluate("page.report.calls") == 20
    assert "20 images, 20 network calls: " in page.inner_text("#status")
    compare(images_of(page), by_python(pipe, folder, 20, 0))


def test_the_guide_gives_the_image_of_the_page(visit, folder_of, tmp_path, monkeypatch):
    _, folder = folder_of("digits")
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "page").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "docs/browser.md", "exec"), names)
    difference = names["pixels"][0].astype(int) - images_of(visit(folder))[1][7]
    assert np.abs(difference).max() <= 1


def test_noise_in_chromium_is_pythons_bit_for_bit(visit, folder_of):
    _, folder = folder_of("dit")
    page = visit(folder)
    record = json.loads((folder / "model.json").read_text())
    found = page.evaluate(
        """async (tensors) => {
        const { portableNoise } = await import('./portable_noise.mjs');
        const noise = portableNoise(tensors, 50, 123456789012345);
        const words = (data) => [...new Uint32Array(data.buffer)];
        return Object.fromEntries(Object.entries(noise).map(([name, { data }]) => [name, words(data)]));
        }""",
        record["noise"]["tensors"],
    )
    expected = portable_noise(record["noise"]["tensors"], 50, 123456789012345)
    assert list(found) == list(expected) == ["noise", "style"]
    for name, values in expected.items():
        np.testing.assert_array_equal(np.array(found[name], np.uint32), values.reshape(-1).view(np.uint32))


def test_weights_in_eight_bits(visit, folder_of):
    """Against onnxruntime in Python on the same file."""
    _, folder = folder_of("unet", "int8")
    found, _ = images_of(visit(folder))
    call, metadata = exported.open_onnx(folder / "model.onnx")
    n = len(found)
    inputs = portable_noise(metadata["noise"]["tensors"], n, 0)
    inputs |= {"labels": np.arange(n) % 4, "alpha": np.full(n, 1, np.float32)}
    np.testing.assert_allclose(found, call(inputs), rtol=0, atol=1e-4)


def test_class_guidance_seed_and_number(visit, folder_of):
    pipe, folder = folder_of("digits")
    page = visit(folder)
    page.get_by_label("7", exact=True).check()
    page.fill("#seed", "5")
    page.fill("#guidance", "2.5")
    page.get_by_label("4", exact=True).nth(1).check()
    until(page, f"page.settings.number === 4 && {DONE}")
    assert page.evaluate("page.settings") == {"chosen": 7, "alpha": 2.5, "seed": 5, "number": 4}
    assert page.inner_text("#guidance-now") == "2.50"
    compare(images_of(page), by_python(pipe, folder, 4, 5, label=7, alpha=2.5))
    assert page.locator("#grid canvas").first.get_attribute("aria-label") == "Image 1: 7"
    before, _ = images_of(page)
    calls = page.evaluate("page.request")
    page.click("#again")
    until(page, f"page.request > {calls} && {DONE}")
    assert page.evaluate("page.request") == calls + 1  # one request per click, in one network call
    assert page.evaluate("page.report.calls") == 1
    assert "4 images, one network call: " in page.inner_text("#status")
    assert np.abs(images_of(page)[0] - before).max() > 0.1
    assert page.input_value("#seed") == str(page.evaluate("page.settings.seed"))
    page.fill("#seed", "5")
    until(page, f"page.settings.seed === 5 && {DONE}")
    np.testing.assert_array_equal(images_of(page)[0], before)


def test_a_seed_that_is_none(visit, folder_of):
    page = visit(folder_of("digits")[1])
    page.fill("#seed", "-1")
    assert "A seed is an integer from 0" in page.inner_text("#seed-note")
    assert page.get_attribute("#seed", "aria-invalid") == "true"
    assert page.evaluate("page.settings.seed") == 0
    page.click("#again")
    until(page, DONE)
    assert page.get_attribute("#seed", "aria-invalid") == "false"


def test_a_model_without_guidance_and_with_many_classes(visit, folder_of):
    pipe, folder = folder_of("many classes")
    page = visit(folder)
    assert page.is_hidden("#guidance")
    assert page.is_hidden("#classes")
    assert page.locator("#class-list option").all_inner_texts() == ["Every class", *map(str, range(30))]
    page.select_option("#class-list", "29")
    until(page, f"page.settings.chosen === 29 && {DONE}")
    compare(images_of(page), by_python(pipe, folder, 20, 0, label=29))


def test_the_newest_request_wins(visit, folder_of):
    """Many changes at once: the images are those of the last one, and one label runs through them."""
    pipe, folder = folder_of("unet")
    page = visit(folder)
    page.evaluate(
        """for (const k of [0, 1, 2, 3, 1, 2]) document.querySelectorAll('#classes input')[k + 1].click();
        document.querySelector('#numbers input[value="50"]').click();"""
    )
    until(page, f"page.settings.number === 50 && {DONE}")
    compare(images_of(page), by_python(pipe, folder, 50, 0, label=2))


def test_a_walk_between_noises(visit, folder_of):
    pipe, folder = folder_of("dit")
    page = visit(folder)
    until(page, "page.walk.last && !page.walk.waiting")
    grid = images_of(page)[1]
    assert page.evaluate("page.walk.last.place") == 0
    frame = "[...page.walk.last.pixels]"
    first = np.array(page.evaluate(frame), np.uint8).reshape(8, 8, 4)[..., :3]
    np.testing.assert_array_equal(first, grid[0])  # it starts at the first image
    page.evaluate("page.walk.place = 1.25; page.walk.dirty = true")
    until(page, "page.walk.last.place === 1.25")
    record = json.loads((folder / "model.json").read_text())
    noise = portable_noise(record["noise"]["tensors"], 3, 0)
    a, b = noise["noise"][1].astype(np.float64), noise["noise"][2].astype(np.float64)
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    way = (np.sin(0.75 * angle) * a + np.sin(0.25 * angle) * b) / np.sin(angle)
    between = {"noise": way[None].astype(np.float32), "style": noise["style"][1:2]}
    found = np.array(page.evaluate(frame), np.uint8).reshape(1, 8, 8, 4)[..., :3]
    _, expected = by_python(pipe, folder, 1, 0, label=1, noise=between)
    assert np.abs(found.astype(int) - expected).max() <= 1
    height = page.locator(".walk").bounding_box()["height"]
    page.click("#play")
    assert page.inner_text("#play") == "Pause"
    until(page, "document.getElementById('rate').textContent.includes('frames/s')")
    assert page.locator(".walk").bounding_box()["height"] == height
    until(page, "page.walk.frames.length >= 5")  # within one second
    page.click("#play")
    place = page.evaluate("page.walk.place")
    assert place != 1.25
    page.wait_for_timeout(300)
    assert page.evaluate("page.walk.place") == place
    assert "image 2 → 3" in page.inner_text("#place-now") or place > 2


def test_a_walk_from_a_single_image(visit, folder_of):
    page = visit(folder_of("digits")[1])
    page.check("#numbers input[value='1']")
    until(page, f"page.settings.number === 1 && {DONE}")
    assert page.get_attribute("#place", "max") == "2"
    assert page.inner_text("#status").startswith("1 image, one network call: ")
    page.click("#play")
    until(page, "page.walk.place > 0.2 && page.walk.last.place > 0.2")


def test_download(visit, folder_of):
    page = visit(folder_of("digits")[1])
    page.get_by_label("3", exact=True).check()
    until(page, f"page.settings.chosen === 3 && {DONE}")
    with page.expect_download() as waiting:
        page.click("#download")
    assert waiting.value.suggested_filename == "digits-3-seed-0.png"
    with open(waiting.value.path(), "rb") as file:
        sheet = np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))
    assert sheet.shape == (4 * 128 + 3 * 32, 5 * 128 + 4 * 32, 3)
    expected = images_of(page)[1]
    for i, image in enumerate(expected):
        y, x = 160 * (i // 5), 160 * (i % 5)
        tile = sheet[y : y + 128, x : x + 128]
        np.testing.assert_array_equal(tile, image.repeat(16, 0).repeat(16, 1))


def test_threads_and_servers_without_headers(visit, folder_of):
    pipe, folder = folder_of("unet")
    many = "Object.defineProperty(navigator, 'hardwareConcurrency', { value: 4 })"
    for options, threads in (({"script": many}, "2 threads"), ({"plain": True}, "1 thread")):
        page = visit(folder, **options)
        assert threads in page.inner_text("#facts")
        compare(images_of(page), by_python(pipe, folder, page.evaluate("page.settings.number"), 0))


def test_everything_by_keyboard(visit, folder_of):
    page = visit(folder_of("digits")[1])
    ids = []
    page.keyboard.press("Tab")
    for _ in range(9):
        ids.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        outline = page.evaluate(
            "getComputedStyle(document.activeElement.matches('.chips input') ? "
            "document.activeElement.nextElementSibling : document.activeElement).outlineStyle"
        )
        assert outline != "none" or not ids[-1], ids[-1]
        page.keyboard.press("Tab")
    assert {"again", "download", "class", "guidance", "seed", "number", "place", "play"} <= set(ids)
    page.focus("#again")
    before = page.evaluate("page.request")
    page.keyboard.press("Enter")
    assert page.evaluate("page.request") == before + 1
    page.focus("input[name=class]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("page.settings.chosen") == 0
    page.focus("#guidance")
    page.keyboard.press("End")
    assert page.evaluate("page.settings.alpha") == 4
    page.focus("#seed")
    page.keyboard.press("Control+a")
    page.keyboard.type("12")
    page.keyboard.press("Enter")
    assert page.evaluate("page.settings.seed") == 12
    page.focus("#place")
    page.keyboard.press("ArrowRight")
    until(page, "page.walk.last.place > 0")
    page.focus("#play")
    page.keyboard.press("Space")
    assert page.evaluate("page.walk.playing")
    until(page, DONE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_text_is_readable_and_fits(visit, folder_of, size, scheme, tmp_path):
    page = visit(folder_of("digits")[1], size=size, scheme=scheme)
    page.fill("#seed", "x")
    texts = page.evaluate(CONTRASTS)
    page.screenshot(path=tmp_path / f"{size}-{scheme}.png", full_page=True)
    assert not {text: ratio for text, ratio in texts if ratio < 4.5}
    assert len(texts) > 25
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(UNNAMED) == []
    page.check("#numbers input[value='50']")
    until(page, f"page.settings.number === 50 && {DONE}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
