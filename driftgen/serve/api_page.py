"""The page of the interface: all paths with their fields, and a form to try them. It loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

__all__ = ["api_page"]

TEMPLATE = Path(__file__).with_suffix(".html")


def api_page(openapi: Mapping[str, Any], model: str, about: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI description and the description of the model."""
    example = json.dumps(_example(about))
    paths = [
        _path(name, method, entry, example)
        for name, methods in openapi["paths"].items()
        for method, entry in methods.items()
    ]
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(model=model, description=openapi["info"]["description"], paths=paths)


def _example(about: Mapping[str, Any]) -> dict[str, Any]:
    if about["kind"] == "images":
        return {"number": 8, "seed": 0}
    values = {
        key: "a PNG file in base64" if len(shape) == 3 else [0.0] * shape[0]
        for key, shape in about["observations"].items()
    }
    return {"observation": values, "seed": 0}


def _path(name: str, method: str, about: Mapping[str, Any], example: str) -> dict[str, Any]:
    body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = [(key, field.get("description", "")) for key, field in body.get("properties", {}).items()]
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
        "example": example,
    }
