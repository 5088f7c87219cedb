"""The page that generates images, in Chromium, where something is missing or damaged: a plain sentence."""

import shutil

import pytest

from tools.chromium import chromium_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium: apt-get install chromium"),
]


def truncate(folder):
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-200_000])


FAULTS = {
    "a damaged model": (truncate, "The model cannot be loaded: Failed to load model"),
    "no model": (lambda f: (f / "model.onnx").unlink(), "The model cannot be fetched: model.onnx gives 404."),
    "an empty model": (lambda f: (f / "model.onnx").write_bytes(b""), "The model cannot be loaded: "),
    "no metadata": (lambda f: (f / "model.json").unlink(), "The description of the model cannot be fetched"),
    "damaged metadata": (lambda f: (f / "model.json").write_text("{"), "model.json is damaged"),
    "other metadata": (lambda f: (f / "model.json").write_text("[]"), "does not describe a generator"),
    "no runtime": (lambda f: shutil.rmtree(f / "ort"), "onnxruntime-web cannot be loaded"),
    "no worker": (
        lambda f: (f / "browser/worker.mjs").unlink(),
        "The script that runs the network cannot be",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_give_a_sentence(browser, serve, folder_of, tmp_path, fault):
    damage, sentence = FAULTS[fault]
    folder = shutil.copytree(folder_of("digits")[1], tmp_path / "page")
    damage(folder)
    assert sentence in trouble(browser, serve(folder))


def trouble(browser, url, script=None):
    """The sentence on a page that cannot work. Nothing is thrown, and no control is shown."""
    errors = []
    context = browser.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    if script:
        page.add_init_script(script)
    page.goto(url)
    page.wait_for_selector("#trouble", timeout=60_000)
    text = page.inner_text("#trouble")
    assert page.is_hidden("#loading")
    assert page.is_hidden("main")
    context.close()
    assert not errors
    return text


def test_a_failed_request_is_told_until_one_of_its_kind_succeeds(browser, serve, folder_of, tmp_path):
    folder = shutil.copytree(folder_of("digits")[1], tmp_path / "page")
    worker = folder / "browser" / "worker.mjs"
    text = worker.read_text(encoding="utf-8")
    for line, failure in (
        (
            "  if (id !== latest) return;\n",
            "  if (seed === 13) throw new Error('ERROR_MESSAGE: no room\\nat x');\n",
        ),
        ("  const key = [seed, left, right].join();\n", "  if (seed === 14) throw 7;\n"),
    ):
        assert text.count(line) == 1
        text = text.replace(line, line + failure)
    worker.write_text(text, encoding="utf-8")
    errors = []
    context = browser.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(serve(folder))

    def choose(seed, condition):
        page.fill("#seed", str(seed))
        page.wait_for_function(condition, timeout=60_000)

    shown, done = "!document.getElementById('trouble').hidden", "page.images.length === page.settings.number"
    page.wait_for_function(f"page.ready && {done} && page.walk.last", timeout=60_000)
    assert page.is_hidden("#trouble")
    frames = page.evaluate("page.walk.last")
    choose(13, shown)
    assert page.inner_text("#trouble") == "no room"
    assert page.is_visible("#grid")  # other requests still work
    assert page.get_attribute(".stage", "aria-busy") == "false"
    assert page.is_disabled("#download")  # the sheet would be blank
    page.wait_for_function("page.walk.dirty === false && !page.walk.waiting && page.walk.last")
    assert frames["pixels"] != page.evaluate("page.walk.last.pixels")
    assert page.is_visible("#trouble")  # the walk goes on with the new seed, the images are still missing
    choose(5, f"page.settings.seed === 5 && {done}")
    assert page.is_hidden("#trouble")
    assert page.is_enabled("#download")
    page.click("#play")
    choose(14, shown)
    assert page.inner_text("#trouble") == "out of memory, or the file is damaged."
    assert page.inner_text("#play") == "Play"
    page.wait_for_function(done)
    assert page.is_visible("#trouble")
    choose(6, f"!({shown})")
    page.click("#play")
    page.wait_for_function("page.walk.playing && page.walk.frames.length > 2", timeout=60_000)
    context.close()
    assert not errors


def test_no_webassembly(browser, serve, folder_of):
    text = trouble(browser, serve(folder_of("digits")[1]), "delete globalThis.WebAssembly")
    assert text.startswith("This browser lacks WebAssembly with SIMD")


def test_a_page_from_a_file(browser, folder_of):
    page = folder_of("digits")[1] / "index.html"
    assert "python -m http.server" in trouble(browser, page.as_uri())
