"""``driftgen recipes`` shows every description whole, at any width."""

import pytest

from driftgen.training.recipes import recipe_names


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_descriptions_wrap(columns, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = here("recipes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in done.stdout
    expected = []
    for task, command in (("train", ["train"]), ("pretrain", ["pretrain"]), ("policy", ["policy", "train"])):
        recipes = [recipe for recipe in recipe_names() if recipe.task == task]
        expected += ["driftgen", *command, *(word for r in recipes for word in (r.name, *r.about.split()))]
    assert done.stdout.split() == expected


def test_a_wrapped_description_stays_in_its_column(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = here("recipes").stdout.splitlines()
    column = lines[1].index("CIFAR-10")
    rest = [line for line in lines[1:] if not line.startswith("driftgen") and not line[:column].strip()]
    assert rest
    assert all(line[column] != " " for line in rest)
    assert not any(line.endswith(" ") for line in lines)
