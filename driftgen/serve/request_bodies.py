"""Bodies of requests: read with a limit, checked, and turned into what the model needs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from driftgen.errors import InputError
from driftgen.generators.base import check_guidance
from driftgen.generators.class_labels import class_indices
from driftgen.support.checked_arguments import show_value

__all__ = [
    "ActionRequest",
    "ImageRequest",
    "Images",
    "RequestError",
    "choose_seed",
    "parse_images",
    "read_body",
    "validate",
]

BODY_SECONDS = 30.0
SEED_BITS = 53  # of a seed that the server draws: JavaScript holds such integers exactly
MOST_SEED = 2**63 - 1
ClassName = Annotated[StrictStr, Field(max_length=200)]
# The first mistake ends the check: an error object for each of a million entries takes gigabytes.
Classes = Annotated[list[StrictInt | ClassName], Field(fail_fast=True)]
Format = Literal["png", "jpeg", "webp", "npy"]
Model = TypeVar("Model", bound=BaseModel)


class RequestError(Exception):
    """A request that cannot be answered: one sentence, and the HTTP status that belongs to it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ImageRequest(_Body):
    """Images to sample."""

    labels: StrictInt | ClassName | Classes | None = Field(
        None, description="One class or one per image, by index or name; all classes in turn if absent."
    )
    number: StrictInt | None = Field(
        None, ge=1, description="Images, with labels repeated in turn; one per label, or one, if absent."
    )
    guidance: StrictFloat | StrictInt | None = Field(
        None, description="Guidance strength, 1 (none) or more; the model's own if absent."
    )
    seed: StrictInt | None = Field(
        None, ge=0, le=MOST_SEED, description="Image i of a seed is always the same; drawn if absent."
    )
    format: Format = Field("png", description="png and npy are exact, jpeg and webp are not.")


class ActionRequest(_Body):
    """An observation to act on."""

    observation: dict[str, Any] = Field(
        description="Values by key, such as observation.state: one step, or the history that the policy "
        "observes, oldest first. Nested lists; PNG or JPEG files in base64 for a camera; or "
        '{"data": base64, "dtype": "float32", "shape": [...]}.'
    )
    seed: StrictInt | None = Field(
        None, ge=0, le=MOST_SEED, description="The same observation and seed give the same actions."
    )


class Images(NamedTuple):
    """A checked request for images."""

    labels: list[int]
    guidance: float
    seed: int
    format: Format

    def message(self) -> dict[str, Any]:
        """Return the request for the model."""
        return {"labels": self.labels, "guidance": self.guidance, "seed": self.seed}


async def read_body(chunks: AsyncIterator[bytes], length: str | None, most: int) -> Any:
    """Return the JSON value of a body of at most ``most`` bytes; ``length`` is its Content-Length."""
    too_large = RequestError(413, f"the body is larger than the limit of {most:,} bytes")
    if length is not None and length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise RequestError(400, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    try:
        return json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {str(error)[:100]}") from None


def validate(kind: type[Model], body: Any) -> Model:
    """Return the body as an object of a kind. Raise RequestError with the first thing that is wrong."""
    if not isinstance(body, dict):
        raise RequestError(400, f"the body must be a JSON object, got {show_value(body)}")
    unknown = next((key for key in body if key not in kind.model_fields), None)
    if unknown is not None:
        raise RequestError(422, f"{unknown[:40]} is not known: give {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "the body"
        if first["type"] == "missing":
            raise RequestError(422, f"{name} is missing") from None
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise RequestError(422, f"{name}={show_value(body.get(name))}: {what}") from None


def parse_images(asked: ImageRequest, about: Mapping[str, Any], most: int) -> Images:
    """Check labels, number and guidance of a request against the model and the limit of images."""
    given = len(asked.labels) if isinstance(asked.labels, list) else 1
    number = asked.number
    if max(given, number or 0) > most:
        raise RequestError(422, f"{max(given, number or 0)} images are above the limit of {most} per request")
    if asked.labels is None and number is None:
        number = 1
    try:
        labels = class_indices(asked.labels, number, about["num_classes"], about["class_names"])
        guidance = about["guidance"] if asked.guidance is None else check_guidance(asked.guidance)
    except InputError as error:
        raise RequestError(422, str(error).replace("num_images", "number")[:300]) from None
    return Images(labels, guidance, choose_seed(asked.seed), asked.format)


def choose_seed(seed: int | None) -> int:
    """Return the seed of a request, drawn if it has none."""
    return secrets.randbits(SEED_BITS) if seed is None else seed
