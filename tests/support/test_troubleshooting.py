"""Every warning and common error names a section of the troubleshooting page that exists."""

import ast
import re
import traceback
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from driftgen.cli import app
from driftgen.errors import InputError, explained, unknown_name
from driftgen.support.troubleshooting import TOPIC, find_section, paragraphs, topics
from driftgen.training import health

ROOT = Path(__file__).parents[2]
HEALTH = Path(health.__file__)


@cache
def named_topics():
    """Return (file, topic) for every topic that the package names."""
    found = []
    for path in (ROOT / "driftgen").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"topic=|Problem\(|explained\(", text):
            found += [(path, topic) for topic in _topics_of(ast.parse(text))]
    return found


def _topics_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.id if isinstance(node.func, ast.Name) else ""
            values = [k.value for k in node.keywords if k.arg == "topic"]
            values += node.args[1:2] if function in ("Problem", "explained") else []
            yield from (value.value for value in values if isinstance(value, ast.Constant))


def test_named_topics_exist_and_every_topic_is_named():
    named = named_topics()
    assert len(named) > 50
    for path, topic in named:
        assert topic in topics(), f"{path.name}: {topic}"
    assert {topic for _, topic in named} == set(topics())


def test_every_health_warning_names_its_topic():
    problems = re.findall(r"yield Problem\(", HEALTH.read_text(encoding="utf-8"))
    assert len([path for path, _ in named_topics() if path == HEALTH]) == len(problems) == 13
    (text,) = health.Health().update({"step": 1, "loss": float("nan")})
    assert text.endswith("(driftgen explain not-finite)")


def test_the_guide_has_an_anchor_for_every_topic():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = [title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    assert headings == topics()


def test_every_section_has_a_message_and_advice():
    for topic in topics():
        title, message, *rest = find_section(topic).split("\n\n")
        assert title.startswith("## ")
        assert message.startswith("Message: `"), topic
        assert rest, topic
        assert not any("`" in text or "](" in text for text in paragraphs(topic))


def test_quoted_messages_are_those_of_the_code():
    """The words before the first value of each quoted message stand in the package."""
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "driftgen").rglob("*.py")]
    plain = " ".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in code)
    for topic in topics():
        message = find_section(topic).split("\n\n")[1]
        for quoted in re.findall(r"`([^`]+)`", message):
            parts = re.split(r"\.\.\.|\d[\d.%]*|\b(?:NAME|N|HOST)\b|runs/\S+|: ", quoted)
            longest = max((part.strip(" ():,?'") for part in parts), key=len)
            assert longest in plain, f"{topic}: {longest!r}"


def test_an_error_names_its_topic_in_tracebacks_but_not_in_its_text():
    error = unknown_name("recipe", "digit", ["digits"])
    assert "explain" not in str(error)
    assert error.topic == "unknown-name"
    assert traceback.format_exception_only(error)[-1] == "driftgen explain unknown-name\n"
    assert InputError("x").topic is None
    assert explained("x", None) == "x"


def test_the_command_names_the_topic(capsys, monkeypatch):
    from driftgen.cli.root import main

    monkeypatch.setattr("sys.argv", ["driftgen", "train", "digit"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert TOPIC.search(line)[1] == "unknown-name"


def test_explain():
    run = CliRunner().invoke(app, ["explain", "collapse"])
    assert run.exit_code == 0
    assert "loss.repulsion" in run.output
    listed = dict(line.split(maxsplit=1) for line in CliRunner().invoke(app, ["explain"]).output.splitlines())
    assert list(listed) == topics()
    assert listed["collapse"] == "Every class became one image, or all samples one image."
    assert listed["not-found"] == "Paths are relative to the current folder."
    assert listed["slow-loss"].endswith(", or float64.")
    assert isinstance(CliRunner().invoke(app, ["explain", "colapse"]).exception, InputError)
