import pytest

from tools.chromium import open_chromium


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as browser:
        yield browser
