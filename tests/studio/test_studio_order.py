"""Events of the studio that overtake each other on their way to the server: the newest result stays."""

import pytest

from tests.support.studio_folders import add_run
from tests.support.studio_pages import Held, choose, generate
from tools.chromium import chromium_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium_path() is None, reason="needs chromium: apt-get install chromium"),
]
SAMPLE_INPUTS = 8
LOOK_INPUTS = 3  # of the Runs tab


def in_force(page):
    """Let answers that came be shown."""
    page.wait_for_timeout(500)


def test_images_stay_when_the_answer_to_the_choice_of_the_model_comes_after_them(visit):
    page = visit(model="cifar10")
    held = Held(page, lambda data: len(data) < SAMPLE_INPUTS and data[:1] == ["digits"])
    choose(page, "#model", "digits")
    generate(page, 16)
    held.release()
    page.click("#classes input")
    page.wait_for_selector("#classes [role=option][aria-label='3']")
    in_force(page)
    assert page.locator("#images .grid img").count() == 16


def test_of_two_buttons_the_one_pressed_last_shows_its_images(visit):
    page = visit()
    held = Held(page, lambda data: len(data) == SAMPLE_INPUTS and not held.routes)
    page.click("#generate")
    while not held.routes:
        page.wait_for_timeout(50)
    page.click("#nearest")
    in_force(page)
    held.release()
    page.wait_for_function("document.querySelectorAll('#images .grid img').length === 48")
    in_force(page)
    assert page.locator("#images .grid img").count() == 48


def test_a_button_pressed_again_counts(visit):
    page = visit()
    held = Held(page, lambda data: len(data) == SAMPLE_INPUTS and not held.routes)
    page.click("#new-seed")
    while not held.routes:
        page.wait_for_timeout(50)
    seed = page.get_by_label("Seed", exact=True)
    first = seed.input_value()
    page.click("#new-seed")
    page.wait_for_function(f"document.querySelector('#seed input').value !== {first!r}")
    held.release()
    seed_of_images = "document.querySelector('#images .made')?.textContent.replace('digits, seed ', '')"
    page.wait_for_function(f"{seed_of_images} === document.querySelector('#seed input').value")


def test_leaving_the_model_as_it_is_leaves_the_classes_and_the_images(visit):
    page = visit()
    generate(page, 16)
    choose(page, "#classes", "3")
    page.keyboard.press("Escape")
    page.focus("#model input")
    with page.expect_response("**/queue/join*"):
        page.keyboard.press("Tab")
    in_force(page)
    assert page.locator("#images .grid img").count() == 16
    generate(page, 16)
    page.wait_for_function("document.querySelector('#images .grid span').textContent === '3'")
    assert page.locator("#classes .token").all_inner_texts() == ["3"]


@pytest.mark.parametrize(("tab", "box"), [("Sample", "#model"), ("Policy", "#policy")])
def test_a_model_can_be_chosen_once_the_list_is_there(browser, studio, tab, box):
    page = browser.new_page()
    held = Held(page, lambda data: tab == "Sample" or len(data) == 1)
    page.goto(studio.url)
    page.get_by_role("tab", name=tab).click()
    page.wait_for_selector(f"{box} input:disabled")
    while not held.routes:
        page.wait_for_timeout(50)
    held.release()
    page.wait_for_selector(f"{box} input:enabled")
    page.wait_for_function(f"document.querySelector('{box} input').value.includes('ships with')")
    page.close()


def test_one_question_about_the_runs_at_a_time_and_the_newest_last(visit, studio):
    add_run(studio.folders, "second")
    page = visit("Runs")
    page.wait_for_selector("#run-page .chart")
    held = Held(page, lambda data: len(data) == LOOK_INPUTS)
    choose(page, "#run", "old")
    choose(page, "#other-run", "second")
    page.wait_for_timeout(3000)  # the timer ticks meanwhile
    assert len(held.routes) == 1
    held.release()
    page.wait_for_function("document.querySelector('#run-page h2').textContent.includes('old and second')")


def test_the_command_is_that_of_the_newest_choice(visit):
    page = visit("Train")
    page.wait_for_selector("#job p")
    held = Held(page, lambda data: len(data) == 3 and data[1] in ("auto", "tiny"))
    choose(page, "#data", "shapes")
    page.get_by_label("tiny").check()
    in_force(page)
    held.release()
    in_force(page)
    page.wait_for_function("document.querySelector('#command textarea').value.includes('--size tiny')")


def test_the_timer_is_that_of_the_tab_that_is_shown(visit):
    page = visit()
    held = Held(page, lambda data: len(data) == LOOK_INPUTS)
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_timeout(300)
    page.get_by_role("tab", name="Train").click()
    page.wait_for_selector("#job p")
    held.release()
    in_force(page)
    asked = []
    page.on("request", lambda request: asked.append(request) if "queue/join" in request.url else None)
    page.wait_for_timeout(4500)
    assert asked
    assert all(request.post_data_json["data"] == [None] for request in asked)  # about the training


def test_an_estimate_leaves_a_newer_check_alone(visit):
    page = visit("Train")
    choose(page, "#data", "empty")
    page.wait_for_function("document.querySelector('#command textarea').value.includes('empty')")
    held = Held(page, lambda data: data[:2] == ["empty", "auto"])
    page.click("#cost")
    choose(page, "#data", "shapes")
    page.click("#check")
    page.wait_for_selector("#folder table")
    held.release()
    page.wait_for_selector("#estimate [role=alert]")
    assert "48 images, 2 classes" in page.inner_text("#folder")
