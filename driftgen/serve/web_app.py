"""The HTTP interface of a server: routes, limits, the bearer token, and errors as one sentence in JSON."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import driftgen
from driftgen.errors import InputError
from driftgen.serve.api_page import api_page
from driftgen.serve.batcher import Batcher, OverloadedError, Ticket, UnavailableError
from driftgen.serve.image_formats import MEDIA_TYPES, encode, encode_all, preferred_format, usable_formats
from driftgen.serve.model_process import ModelProcess
from driftgen.serve.observation_body import parse_observation
from driftgen.serve.request_bodies import (
    ActionRequest,
    ImageRequest,
    RequestError,
    choose_seed,
    parse_images,
    read_body,
    validate,
)
from driftgen.serve.service_metrics import ServiceMetrics

__all__ = ["Limits", "make_app"]

INLINE_BYTES = 2**16  # of images that are encoded on the event loop: a thread costs more than they do
IMAGES, ACTIONS, HEALTH, METRICS = "/v1/images", "/v1/actions", "/healthz", "/metrics"
PATHS = (IMAGES, ACTIONS, HEALTH, METRICS)
GONE = 499  # nginx's status for a client that has hung up; nobody receives it

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes:
        images: images of one request.
        body: bytes of a body.
        token: bearer token that requests must carry; None for none.
    """

    images: int = 64
    body: int = 2**24
    token: str | None = None


def make_app(batcher: Batcher, model: ModelProcess, limits: Limits, stopping: asyncio.Event) -> Any:
    """Return the ASGI application of a model that is loaded."""
    metrics = ServiceMetrics(batcher, model)
    app = FastAPI(
        title="driftgen",
        version=driftgen.__version__,
        description=f"Samples of {model.options.model} in one network call each.",
        docs_url=None,
        redoc_url=None,
    )
    if model.about["kind"] == "images":
        _add_images(app, batcher, model, limits, metrics)
    else:
        _add_actions(app, batcher, model, limits, metrics)

    @app.get(
        HEALTH,
        summary="State of the server; status 503 while the model is being restarted or the server stops.",
    )
    async def health() -> JSONResponse:
        status = "stopping" if stopping.is_set() else "ready" if model.ready else "restarting"
        about = {
            "status": status,
            "model": model.options.model,
            "kind": model.about["kind"],
            "about": model.about["model"],
            "device": model.about["device"],
            "waiting": batcher.waiting,
            "restarts": model.restarts,
            "process": model.pid,
        }
        if model.about["kind"] == "actions":
            about |= {name: model.about[name] for name in ("observations", "observed", "executed", "horizon")}
        return JSONResponse(about, 200 if status == "ready" else 503)

    @app.get(METRICS, summary="Counters and latency percentiles for Prometheus.")
    async def show_metrics() -> Response:
        return Response(metrics.show(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi(), model.options.model, model.about))

    answered = IMAGES if model.about["kind"] == "images" else ACTIONS

    async def tell(request: Request, error: Exception) -> Response:
        if getattr(error, "status_code", None) == 404 and request.url.path in (IMAGES, ACTIONS):
            return JSONResponse({"error": f"this server answers {answered}: see /docs"}, 404)
        return _error(error)

    for kind in (HTTPException, RequestError, OverloadedError, UnavailableError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, tell)
    return _Gate(app, metrics, limits.token)


def _add_images(
    app: FastAPI, batcher: Batcher, model: ModelProcess, limits: Limits, metrics: ServiceMetrics
) -> None:
    formats = usable_formats(model.about["image_shape"])

    @app.post(
        IMAGES,
        summary="Sample images: JSON with base64, or one image alone if the Accept header asks for its type.",
        openapi_extra=_schema(ImageRequest),
    )
    async def images(request: Request) -> Response:
        alone = preferred_format(request.headers.get("accept", ""))
        asked = validate(ImageRequest, await _body(request, limits))
        if alone is not None and "format" in asked.model_fields_set and asked.format != alone:
            raise RequestError(
                422, f"format is {asked.format}, the Accept header asks for {MEDIA_TYPES[alone]}"
            )
        wanted = parse_images(asked, model.about, limits.images)
        if (alone or wanted.format) not in formats:
            raise RequestError(422, f"the server's Pillow writes {', '.join(formats)} alone")
        if alone not in (None, "npy") and len(wanted.labels) != 1:
            raise RequestError(
                422, f"{len(wanted.labels)} images do not fit into one file: accept application/json"
            )
        ticket = batcher.submit(len(wanted.labels), wanted.message())
        pixels = await _result(request, batcher, ticket)
        metrics.rows.inc(len(pixels))
        headers = {"X-Seed": str(wanted.seed)}
        if alone is not None:
            data = await _encoded(encode, pixels if alone == "npy" else pixels[0], alone)
            return Response(data, media_type=MEDIA_TYPES[alone], headers=headers)
        names = model.about["class_names"]
        return JSONResponse(
            {
                "images": await _encoded(encode_all, pixels, wanted.format),
                "format": wanted.format,
                "labels": wanted.labels,
                "classes": None if names is None else [names[label] for label in wanted.labels],
                "guidance": wanted.guidance,
                "seed": wanted.seed,
                "height": pixels.shape[1],
                "width": pixels.shape[2],
            },
            headers=headers,
        )


def _add_actions(
    app: FastAPI, batcher: Batcher, model: ModelProcess, limits: Limits, metrics: ServiceMetrics
) -> None:
    about = model.about
    first = about["observed"] - 1  # index of the action of the latest observation

    @app.post(
        ACTIONS,
        summary="Actions of the policy for an observation: those to execute, and the whole chunk.",
        openapi_extra=_schema(ActionRequest),
    )
    async def actions(request: Request) -> JSONResponse:
        asked = validate(ActionRequest, await _body(request, limits))
        seed = choose_seed(asked.seed)
        try:
            arrays = parse_observation(asked.observation, about["observations"], about["observed"])
        except InputError as error:
            raise RequestError(422, str(error)) from None
        ticket = batcher.submit(1, {"seed": seed}, arrays)
        (chunk,) = await _result(request, batcher, ticket)
        if not np.isfinite(chunk).all():
            raise RequestError(
                422, "the actions are not finite: the observation is far from the demonstrations"
            )
        metrics.rows.inc()
        executed = chunk[first : first + about["executed"]]
        return JSONResponse({"actions": executed.tolist(), "chunk": chunk.tolist(), "seed": seed})


async def _body(request: Request, limits: Limits) -> Any:
    return await read_body(request.stream(), request.headers.get("content-length"), limits.body)


async def _result(request: Request, batcher: Batcher, ticket: Ticket) -> NDArray[Any]:
    """Wait for the rows of a request. A client that hangs up frees its place in the queue."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        either: set[asyncio.Future[Any]] = {gone, ticket.result}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ticket.result.done():
            raise ClientDisconnect
        return ticket.result.result()
    finally:
        gone.cancel()
        batcher.cancel(ticket)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _encoded(function: Callable[..., Any], pixels: NDArray[np.uint8], file_format: str) -> Any:
    if pixels.size <= INLINE_BYTES:
        return function(pixels, file_format)
    return await asyncio.to_thread(function, pixels, file_format)


def _error(error: Exception) -> Response:
    """Return the answer to a request that failed: one sentence."""
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, OverloadedError | UnavailableError):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
        status = 429 if isinstance(error, OverloadedError) else 503
        return JSONResponse({"error": str(error)}, status, headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    if isinstance(error, RequestError):
        return JSONResponse({"error": str(error)}, error.status)
    if isinstance(error, HTTPException):
        words = {404: "this path does not exist: see /docs", 405: "this path takes another method: see /docs"}
        return JSONResponse(
            {"error": words.get(error.status_code, str(error.detail))}, error.status_code, headers
        )
    return JSONResponse({"error": "the server has failed: its log says why"}, 500)


def _schema(kind: Any) -> dict[str, Any]:
    errors = {
        "400": "no JSON object", "401": "wrong token", "413": "body too large", "422": "a wrong value",
        "429": "the queue is full: see Retry-After", "503": "the model is being restarted: see Retry-After",
    }  # fmt: skip
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {
        "requestBody": {"content": content, "required": True},
        "responses": {status: {"description": text} for status, text in errors.items()},
    }


class _Gate:
    """Checks the token before anything is read, and counts every answer."""

    def __init__(self, app: FastAPI, metrics: ServiceMetrics, token: str | None) -> None:
        self.app, self.metrics = app, metrics
        self.token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)  # type: ignore[arg-type]
            return
        began, status = time.perf_counter(), 0

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            refused = self._refusal(scope)
            await (refused or self.app)(scope, receive, counted)  # type: ignore[arg-type]
        finally:
            self.metrics.count(path if path in PATHS else "other", status, time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that need not be read: without the token, or to a full queue."""
        path = scope["path"]
        if self.token is not None and path in (IMAGES, ACTIONS, METRICS):
            scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(token.strip(), self.token) or scheme.lower() != b"bearer":
                headers = {"WWW-Authenticate": "Bearer"}
                return JSONResponse({"error": "the bearer token is missing or wrong"}, 401, headers)
        if path in (IMAGES, ACTIONS) and scope["method"] == "POST":
            try:
                self.metrics.batcher.check_room()
            except (OverloadedError, UnavailableError) as error:
                return _error(error)
        return None
