"""The studio in Chromium: every tab by mouse and by keyboard, on a phone, in light and dark."""

import json
import re
import zipfile

import pytest

from tests.support.small_policy import save_small_policy
from tests.support.studio_folders import add_photos, add_run
from tests.support.studio_pages import choose, generate
from tests.support.web_pages import CONTRASTS, SIZES, UNNAMED
from tools.chromium import chromium_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium: apt-get install chromium"),
]


def test_images_are_in_view_beside_the_button(visit):
    """Of the model that a visitor finds chosen; in a low window too, where the button is below the fold."""
    page = visit(model="cifar10")
    page.set_viewport_size({"width": 1280, "height": 600})
    generate(page, 16)
    assert page.evaluate("scrollY") > 200
    first = page.locator("#images .grid img").first.bounding_box()
    assert 0 <= first["y"] < 600 - first["height"]
    assert page.locator("#images .grid span").all_inner_texts()[:2] == ["airplane", "automobile"]


def test_sample_every_way(visit):
    page = visit()
    generate(page, 16)
    assert re.fullmatch(
        r"16 images: 1 network call each, [\d.]+ ms per image on cpu\.", page.inner_text("#images .cost")
    )
    first = page.get_attribute("#images .grid img", "src")
    choose(page, "#classes", "3")
    choose(page, "#classes", "7")
    page.keyboard.press("Escape")
    page.get_by_label("Seed", exact=True).fill("5")
    generate(page, 16)
    page.wait_for_function("document.querySelector('#images .grid span').textContent === '3'")
    assert page.locator("#images .grid span").all_inner_texts()[:3] == ["3", "7", "3"]
    assert page.get_attribute("#images .grid img", "src") != first
    page.get_by_label("Same noise, several guidance values").check()
    generate(page, 40)
    assert page.locator("#images .column").all_inner_texts()[0] == "guidance 1"
    assert not page.get_by_label("Second seed").is_visible()
    page.get_by_label("Walk between two noises").check()
    page.get_by_label("Second seed").fill("2")
    generate(page, 72)
    assert page.locator("#images .column").all_inner_texts()[-1] == "seed 2"
    page.click("#images summary")
    assert page.is_visible("#images details img")
    page.click("#nearest")
    page.wait_for_function("document.querySelectorAll('#images .grid img').length === 48")
    assert "1,437 training images" in page.inner_text("#images .cost")
    page.click("#new-seed")
    page.wait_for_function("document.querySelectorAll('#images .grid img').length === 72")
    assert page.get_by_label("Seed", exact=True).input_value() != "5"


def test_columns_fit_a_phone(visit):
    page = visit(size="phone")
    page.get_by_label("Same noise, several guidance values").check()
    generate(page, 40)
    for button, images in (("#generate", 40), ("#nearest", 48)):
        page.click(button)
        page.wait_for_function(f"document.querySelectorAll('#images .grid img').length === {images}")
        for part in ("#images .grid", "#images .column"):
            fits = "(list) => list.every((part) => part.scrollWidth <= part.clientWidth)"
            assert page.locator(part).evaluate_all(fits), (button, part)


def test_download_images(visit, tmp_path):
    page = visit()
    generate(page, 16)
    with page.expect_download() as download:
        page.click("#images .zip")
    download.value.save_as(tmp_path / "images.zip")
    names = zipfile.ZipFile(tmp_path / "images.zip").namelist()
    assert (len(names), names[3]) == (16, "003-3.png")
    with page.expect_download() as download:
        page.locator("#images .grid a").first.click()
    assert download.value.suggested_filename == "digits-seed-0-000-0.png"


def test_a_model_that_does_not_load_is_a_sentence_and_the_page_goes_on(visit, studio):
    broken = add_run(studio.folders, "broken")
    (broken / "model" / "model.safetensors").write_bytes(b"x")
    page = visit()
    for name, message in (
        (str(broken), "broken"),
        ("../..", "leads outside"),
        ("no model", "is no model"),
    ):
        choose(page, "#model", name)
        page.wait_for_function(
            f"document.querySelector('#model-told [role=alert]')?.textContent.includes({json.dumps(message)})"
        )
    choose(page, "#model", "digits")
    page.wait_for_function("!document.querySelector('#model-told [role=alert]')")
    generate(page, 16)


def test_runs_are_read_again_while_they_go_on(visit, studio):
    page = visit("Runs")
    page.wait_for_selector("#run-page .chart")
    choose(page, "#run", "old")
    page.wait_for_function("document.querySelector('#run-page h2').textContent === 'old'")
    text = page.inner_text("#run-page")
    for part in ("Raw drift per temperature", "Spread and within-class diversity", "Samples per second"):
        assert part in text
    assert "driftgen train digits --out runs/old" in text
    with (studio.folders.runs / "old" / "metrics.jsonl").open("a") as file:
        row = {"step": 15, "drift": [0.1] * 3, "warnings": ["collapse: samples are alike; lower optim.lr"]}
        file.write(json.dumps(row) + "\n")
    page.wait_for_selector("#run-page .warning")
    assert "What to do: Lower optim.lr." in page.inner_text("#run-page .warning")
    add_run(studio.folders, "second")
    half = studio.folders.runs / "half"
    half.mkdir()
    (half / "config.yaml").write_text("{")
    page.wait_for_timeout(3000)
    choose(page, "#other-run", "second")
    page.wait_for_function("document.querySelector('#run-page h2').textContent.includes('old and second')")
    choose(page, "#other-run", "(none)")
    choose(page, "#run", "half")
    page.wait_for_function(
        "document.querySelector('#run-page [role=alert]')?.textContent.includes('cannot be read')"
    )


def test_train_from_a_folder_close_the_page_and_stop(visit, studio):
    page = visit("Train")
    choose(page, "#data", "empty")
    page.click("#check")
    page.wait_for_selector("#folder [role=alert]")
    assert "holds no images" in page.inner_text("#folder")
    choose(page, "#data", "../..")
    page.click("#check")
    page.wait_for_function("document.querySelector('#folder').textContent.includes('is outside')")
    choose(page, "#data", "shapes")
    page.get_by_label("tiny").check()
    page.click("#check")
    page.wait_for_selector("#folder table")
    assert "48 images, 2 classes" in page.inner_text("#folder")
    command = "driftgen train data/shapes --size tiny --out runs/shapes --yes"
    page.wait_for_function("c => document.querySelector('#command textarea').value === c", arg=command)
    page.click("#cost")
    page.wait_for_selector("#estimate pre")
    assert command in page.inner_text("#estimate")
    for part in ("time", "memory", "disk"):
        assert re.search(rf"^{part} +[\d:.]+", page.inner_text("#estimate pre"), re.MULTILINE)
    page.click("#start")
    page.wait_for_function("document.querySelector('#job').textContent.includes('has been training since')")
    page.click("#start")
    page.wait_for_function("document.querySelector('#job-told').textContent.includes('stop it first')")
    lines = "document.querySelector('#job details pre')?.textContent ?? ''"
    page.wait_for_function(f"({lines}) !== {json.dumps(page.evaluate(lines))}")
    assert "stop it first" in page.text_content("#job-told")  # while the training prints
    page.context.close()
    other = visit("Train")
    choose(other, "#data", "shapes")
    other.click("#start")
    other.wait_for_function("document.querySelector('#job-told').textContent.includes('stop it first')")
    page = visit("Train")
    page.wait_for_function("document.querySelector('#job').textContent.includes('has been training since')")
    page.click("#stop")
    page.wait_for_function("document.querySelector('#job').textContent.includes('asked to stop')")
    page.wait_for_function("document.querySelector('#job').textContent.includes('was stopped')")
    other.wait_for_function("document.querySelector('#job').textContent.includes('was stopped')")
    # Another training may start now.
    other.wait_for_function("!document.querySelector('#job-told').textContent.trim()", timeout=5000)


@pytest.mark.parametrize("size", SIZES)
def test_a_folder_with_many_damaged_images_shows_counts_and_names(visit, studio, size, tmp_path):
    if not (studio.folders.data / "damaged").exists():
        photos = add_photos(studio.folders, "damaged", count=24)
        for i in range(8):
            (photos / "cats" / f"{i}.png").write_bytes(b"no image")
    page = visit("Train", size)
    choose(page, "#data", "damaged")
    page.click("#check")
    page.wait_for_selector("#folder [role=alert]")
    text = page.inner_text("#folder")
    assert "damaged: 40 readable images, 2 classes." in text
    assert "8 of 48 images cannot be read" in text
    assert re.search(r"cats\s+16\s+dogs\s+24", text)
    assert page.locator("#folder li").count() == 8
    page.locator("#folder .report").scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / f"damaged-{size}.png", full_page=True)
    assert not {shown: ratio for shown, ratio in page.evaluate(CONTRASTS) if ratio < 4.5}
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_roll_out_a_policy(visit, studio):
    pytest.importorskip("gym_pusht")
    page = visit("Policy")
    page.wait_for_function("document.querySelector('#policy input').value.startsWith('pusht')")
    page.click("#roll-out")
    page.wait_for_selector("#episode video")
    told = page.text_content("#episode .cost")
    assert re.search(r"seed 100000: score (0\.[89]|1\.0)", told)
    page.wait_for_function("document.querySelector('#episode video').readyState >= 2")
    folder = save_small_policy(studio.folders.runs / "policy")
    choose(page, "#policy", f"runs/{folder.name}")
    page.click("#roll-out")
    page.wait_for_function(
        f"document.querySelector('#episode .cost')?.textContent !== {json.dumps(told)} && "
        "document.querySelector('#episode video')"
    )
    choose(page, "#policy", "runs/no-policy")
    page.click("#roll-out")
    page.wait_for_selector("#episode [role=alert]")


def walk(page, tab, last):
    """Press Tab from a tab to a control; return the elements on the way. Each shows that it has the focus."""
    page.get_by_role("tab", name=tab).focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('[id]')?.id"))
        inside = page.evaluate("document.activeElement.matches('button, input, a, [tabindex]')")
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert not inside or shown != "none", page.evaluate("document.activeElement.outerHTML")[:300]
        if last in reached:
            break
    return reached


def test_everything_by_keyboard(visit):
    page = visit()
    reached = walk(page, "Sample", "nearest")
    assert {"generate", "new-seed", "nearest"} <= reached
    page.focus("#generate")
    page.keyboard.press("Enter")
    page.wait_for_selector("#images .grid img")
    page.get_by_role("tab", name="Sample").focus()
    page.keyboard.press("Tab")
    runs = page.get_by_role("tab", name="Runs")
    runs.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#run-page h2, #run-page [role=alert]")
    assert runs.get_attribute("aria-selected") == "true"
    for tab, ready, controls in (
        ("Train", "#job p", ["check", "cost", "start", "stop"]),
        ("Policy", "#policy input:enabled", ["roll-out"]),
    ):
        page.get_by_role("tab", name=tab).focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(ready)
        assert {*controls} <= walk(page, tab, controls[-1])
    page.get_by_role("tab", name="Train").focus()
    page.keyboard.press("Enter")
    page.fill("#data input", "shapes")
    page.keyboard.press("Enter")
    page.focus("#check")
    page.keyboard.press("Enter")
    page.wait_for_selector("#folder table")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_text_is_readable_and_fits(visit, size, scheme, tmp_path):
    page, texts = visit(size=size, scheme=scheme), []
    generate(page, 16)
    for tab, ready in (
        ("Sample", "#images .grid"),
        ("Runs", "#run-page .report :is(h2, [role=alert])"),
        ("Train", "#job p"),
        ("Policy", "#episode p"),
    ):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_selector(ready)
        if tab == "Runs":
            choose(page, "#run", "old")
            page.wait_for_selector("#run-page .chart")
        page.wait_for_timeout(300)
        page.screenshot(path=tmp_path / f"{tab.lower()}-{size}-{scheme}.png", full_page=True)
        texts += page.evaluate(CONTRASTS)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
        assert page.evaluate(UNNAMED) == [], tab
    assert not {text: ratio for text, ratio in texts if ratio < 4.5}
    assert len(texts) > 60
