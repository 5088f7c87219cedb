"""The page of the interface: all paths with their fields, and a form to try them. It loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

__all__ = ["api_page"]

TEMPLATE = Path(__file__).with_suffix(".html")
EXAMPLES = {"number": 8, "seed": 0}


def api_page(openapi: Mapping[str, Any], model: str) -> str:
    """Return the page for an OpenAPI description."""
    paths = [
        _path(name, method, about)
        for name, methods in openapi["paths"].items()
        for method, about in methods.items()
    ]
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(model=model, description=openapi["info"]["description"], paths=paths)


def _path(name: str, method: str, about: Mapping[str, Any]) -> dict[str, Any]:
    body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = [(key, field.get("description", "")) for key, field in body.get("properties", {}).items()]
    example = EXAMPLES if name.endswith("images") else {"observation": {}, "seed": 0}
    answers = [
        (status, answer["description"])
        for status, answer in sorted(about["responses"].items())
        if fields and status != "200"
    ]
    return {
        "name": name,
        "method": method.upper(),
        "summary": about.get("summary", ""),
        "fields": fields,
        "answers": answers,
        "example": json.dumps(example),
    }
