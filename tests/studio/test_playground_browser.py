"""The playground in Chromium: by mouse, by keyboard, on a phone, in light and dark."""

import time

import pytest

from driftgen.studio.playground_page import PLAYGROUND
from tests.support.web_pages import CONTRASTS, SIZES, UNNAMED
from tools.chromium import chromium_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium: apt-get install chromium"),
]


@pytest.fixture
def visit(browser):
    """Open the page; at the end nothing may have been written to the console."""
    complaints, contexts = [], []

    def call(fragment="", size="desktop", scheme="light", **options):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(PLAYGROUND.as_uri() + fragment)
        page.wait_for_function("playground.report.x.length === 1000 || !playground.target.points.length")
        return page

    yield call
    for context in contexts:
        context.close()
    assert not complaints


def until(page, condition, seconds=60):
    page.wait_for_function(condition, timeout=1000 * seconds)


def at(page, x, y):
    """A place of the plane, as fractions of its picture, in pixels of the page."""
    box = page.locator("#plane").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def settings(page):
    return page.evaluate("playground.settings")


def test_points_drift_to_the_data(visit, tmp_path):
    page = visit()
    page.click("#play")
    until(page, "playground.report.steps >= 60")
    # While a step is under way, which still counts.
    until(page, "playground.waiting && (document.getElementById('play').click(), true)")
    until(page, "!playground.waiting")
    steps = page.evaluate("playground.report.steps")
    assert page.inner_text("#status") == f"Paused after {steps} steps."
    losses = page.evaluate("playground.losses")
    assert losses[-1] < 1e-3 * max(losses)
    assert float(page.inner_text("#distance")) < 0.02
    shares = [float(text) for text in page.locator("#shares output").all_inner_texts()]
    assert len(shares) == 2
    assert min(shares) > 0.9
    steps = page.evaluate("playground.report.steps")
    page.click("#once")
    until(page, f"playground.report.steps > {steps}")
    page.click("#restart")
    until(page, "playground.report.steps === 0 && playground.report.x.length === 1000")
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_arrows_of_the_point_under_the_pointer(visit):
    page = visit()
    look = "playground.looking"
    page.mouse.move(*at(page, 0.52, 0.5))
    until(page, "playground.report.parts !== null")
    before = page.locator("#plane").screenshot()
    page.mouse.move(*at(page, 0.45, 0.5))
    page.wait_for_timeout(200)
    assert page.locator("#plane").screenshot() != before
    assert page.evaluate(look)[0] < 0
    page.mouse.move(5, 5)
    assert page.evaluate(look) is None


def test_draw_a_target_drop_a_start_and_share_both(visit):
    page = visit()
    page.get_by_label("Draw it").check()
    assert "Draw the target" in page.inner_text("#hint")
    for y in (0.3, 0.7):
        page.mouse.move(*at(page, 0.3, y))
        page.mouse.down()
        page.mouse.move(*at(page, 0.7, y), steps=12)
        page.mouse.up()
    assert [len(stroke) > 10 for stroke in settings(page)["strokes"]] == [True, True]
    assert page.locator("#shares li").count() == 2
    page.get_by_label("By hand").check()
    assert "Drop points" in page.inner_text("#hint")
    page.mouse.click(*at(page, 0.5, 0.5))
    page.mouse.click(*at(page, 0.55, 0.5))
    until(page, "playground.report.x.length === 1000")
    assert page.is_hidden("#hint")
    page.click("#play")
    until(page, "playground.report.steps >= 40")
    page.click("#play")
    assert float(page.inner_text("#distance")) < 0.1
    page.click("#share")
    link = page.input_value("#share-link")
    page.keyboard.press("Escape")
    page.click("#restart")
    until(page, "playground.report.steps === 0 && playground.report.x.length === 1000")
    other = visit("#" + link.partition("#")[2])
    expected, found = settings(page), settings(other)
    for name in ("strokes", "drops"):
        lists = [[value for stroke in part[name] for value in stroke] for part in (expected, found)]
        assert lists[1] == pytest.approx(lists[0], abs=0.011)
        del expected[name], found[name]
    assert found.pop("temperature") == pytest.approx(expected.pop("temperature"), rel=1e-3)
    assert found == expected
    points = [page.evaluate("[...playground.report.x]") for page in (page, other)]
    assert points[1] == pytest.approx(points[0], abs=0.02)
    page.get_by_label("Drop q").check()
    page.click("#clear")
    assert settings(page)["drops"] == []


def test_sliders_change_a_run_that_goes_on(visit):
    page = visit("#target=two-moons&seed=4")
    assert settings(page)["temperature"] == 0.35
    page.click("#play")
    page.fill("#repulsion", "0")
    assert "Out of balance" in page.inner_text("#symmetry")
    page.select_option("#kernel", "gaussian")
    page.select_option("#normalization", "y")
    page.check("#fresh")
    until(page, "playground.report.steps >= 30")
    now = settings(page)
    assert (now["repulsion"], now["kernel"], now["normalization"], now["fresh"]) == (0, "gaussian", "y", True)
    assert page.evaluate("playground.losses.length") >= 30


def test_samples_that_leave_the_picture_are_counted(visit):
    page = visit("#attraction=0&repulsion=2&step=2&temperature=2")
    page.click("#play")
    until(page, "document.getElementById('status').textContent.includes('outside the picture')")


@pytest.mark.parametrize("normalization", ["both", "y", "none", "sinkhorn"])
@pytest.mark.parametrize("kernel", ["laplace", "gaussian", "inverse_multiquadric"])
def test_every_kernel_and_normalization_moves_the_points(visit, kernel, normalization):
    page = visit(f"#kernel={kernel}&normalization={normalization}")
    first = page.evaluate("[...playground.report.x]")
    page.click("#play")
    until(page, "playground.report.steps >= 3")
    last = page.evaluate("[...playground.report.x]")
    assert max(abs(a - b) for a, b in zip(first, last, strict=True)) > 0.005


def test_the_generator_learns_while_the_page_stays_smooth(visit):
    page = visit("#mover=generator")
    assert page.is_visible("#rate")
    assert page.is_hidden("#step")
    assert page.evaluate("playground.report.noise.length") == 1000
    page.click("#play")
    until(page, "playground.report.steps >= 150", 120)
    losses = page.evaluate("playground.losses")
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    frames = sorted(page.evaluate("playground.frames"))
    assert frames[len(frames) // 2] < 16  # milliseconds of script


def test_script_of_a_frame_at_500_points(visit):
    page = visit("#fresh=true")
    page.click("#play")
    until(page, "playground.frames.length >= 120")
    frames = sorted(page.evaluate("playground.frames"))
    assert frames[len(frames) // 2] < 16


def test_the_tour_by_keyboard(visit):
    page = visit(size="phone")
    page.focus("#start-tour")
    page.keyboard.press("Enter")
    titles = []
    for stop in range(5):
        assert page.evaluate("document.activeElement.id") == "tour-next"
        titles.append(page.inner_text("#tour-title"))
        assert page.inner_text("#tour-count") == f"{stop + 1} of 5"
        assert page.evaluate("playground.playing") == (stop >= 2)
        page.keyboard.press("Enter")
    assert len(set(titles)) == 5
    assert page.is_hidden("#tour")
    assert page.evaluate("document.activeElement.id") == "start-tour"


def test_everything_by_keyboard(visit):
    page = visit()
    ids, names = [], []
    page.keyboard.press("Tab")
    for _ in range(40):
        ids.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        outline = page.evaluate(
            "getComputedStyle(document.activeElement.matches('.chips input') ? "
            "document.activeElement.nextElementSibling : document.activeElement).outlineStyle"
        )
        if ids[-1]:
            assert outline != "none", ids[-1]
        names.append(page.evaluate("document.activeElement.tagName"))
        page.keyboard.press("Tab")
    reached = {"start-tour", "share", "plane", "play", "once", "restart", "mover", "target", "start"}
    reached |= {"temperature", "step", "attraction", "repulsion", "kernel", "normalization", "fresh"}
    assert reached <= set(ids)
    page.focus("#play")
    page.keyboard.press("Space")
    assert page.evaluate("playground.playing")
    page.focus("input[name=target]")
    page.check("input[name=target][value=drawing]")
    page.focus("#plane")
    page.keyboard.press("Enter")  # nothing before the cross is shown
    for key in ("ArrowLeft", "ArrowUp", "Enter", "Shift+ArrowRight", "Enter"):
        page.keyboard.press(key)
    strokes = settings(page)["strokes"]
    assert [len(stroke) for stroke in strokes] == [2, 2]
    assert strokes[0][0] < 0 < strokes[0][1]
    page.focus("#temperature")
    before = settings(page)["temperature"]
    page.keyboard.press("ArrowRight")
    assert settings(page)["temperature"] > before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_text_is_readable_and_fits(visit, size, scheme, tmp_path):
    page = visit("#repulsion=0.5", size=size, scheme=scheme)
    texts = page.evaluate(CONTRASTS)
    page.click("#start-tour")
    texts += page.evaluate(CONTRASTS)
    page.screenshot(path=tmp_path / f"{size}-{scheme}.png", full_page=True)
    assert not {text: ratio for text, ratio in texts if ratio < 4.5}
    assert len(texts) > 60
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(UNNAMED) == []


def test_drawing_by_touch_on_a_phone(visit):
    page = visit("#target=drawing", size="phone", has_touch=True, is_mobile=True)
    page.get_by_label("Draw p").check()
    page.touchscreen.tap(*at(page, 0.4, 0.5))
    until(page, "playground.settings.strokes.length === 1")


def test_odd_links_open_the_page(visit):
    long = ("#strokes=" + "9." * 20000, "#" + "x" * 5000)
    for fragment in ("#target=%00&seed=1e99", "#%E0%A4%A", "#drops=_._.", *long):
        page = visit(fragment)
        page.click("#once")
        time.sleep(0.2)
        assert page.evaluate("playground.settings.target") == "bimodal"


def test_a_step_that_fails_is_told_and_the_next_one_runs(browser, tmp_path):
    text = PLAYGROUND.read_text(encoding="utf-8")
    line = "  if (!current) return;\n"
    assert text.count(line) == 1
    copy = tmp_path / "playground.html"
    failure = "  if (data.settings?.step === 2) throw new Error('no room');\n"
    copy.write_text(text.replace(line, line + failure), encoding="utf-8")
    page = browser.new_page()
    page.goto(copy.as_uri())
    until(page, "playground.report.x.length === 1000")
    page.click("#play")
    until(page, "playground.report.steps >= 3")
    page.fill("#step", "2")
    until(page, "!playground.playing")
    assert page.inner_text("#status") == "The computation failed: Uncaught Error: no room"
    assert page.inner_text("#play") == "Play"
    until(page, "playground.waiting === 0")
    page.fill("#step", "1")
    steps = page.evaluate("playground.report.steps")
    page.click("#play")
    until(page, f"playground.playing && playground.report.steps > {steps + 3}")
    page.context.close()
