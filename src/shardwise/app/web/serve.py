"""The server of `shardwise serve`: one page with a form, and questions that it answers (extra `web`).

It listens on loopback alone. Requests with a foreign Host or Origin are refused, so that no other page can
ask. A question has a size limit and a time budget, and ends when its page is left.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from shardwise.app.web.asking import ask, question_of
from shardwise.app.web.page import page_of
from shardwise.cluster import cluster_names
from shardwise.errors import ConfigError
from shardwise.model import catalogue_names
from shardwise.plans import OBJECTIVES
from shardwise.questions import OPTIMIZERS
from shardwise.strategy import ANY, target_names

HOST = "127.0.0.1"
SCHEMA, VERSION = "shardwise.serve-page", 1

LARGEST_QUESTION = 1 << 20
"""Bytes of a question; configs have kilobytes."""

MOST_QUESTIONS = 2
"""Questions that are answered at one time."""

GRACE_S = 30.0
"""Seconds after its budget at which a question is ended."""

POLL_S = 0.1


def serve_document() -> dict[str, object]:
    """The document of the page: the choices of its form."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "models": list(catalogue_names()),
        "clusters": list(cluster_names()),
        "targets": ["", *target_names(), ANY],
        "objectives": list(OBJECTIVES),
        "optimizers": list(OPTIMIZERS),
    }


def is_own(headers: Any, port: int) -> bool:
    """Whether a request is of our own page: its Host and, where it has one, its Origin are those of the
    server."""
    hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
    origin = headers.get("origin")
    return headers.get("host") in hosts and (origin is None or origin in {f"http://{host}" for host in hosts})


def application(port: int, *, budget_s: float) -> FastAPI:
    """The application for a server at `port`; `budget_s` is the time limit of a question."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    page = page_of("shardwise", serve_document(), asks_server=True)
    running: set[int] = set()

    @app.middleware("http")
    async def only_own(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if not is_own(request.headers, port):
            return JSONResponse({"error": {"message": "a request of another page"}}, status_code=403)
        response = await call_next(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Frame-Options"] = "DENY"
        return response

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page)

    @app.post("/questions")
    async def questions(request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            return _refusal("content-type", "is not application/json", 415)
        try:
            question = question_of(json.loads(await _body(request)))
        except (ValueError, RecursionError) as error:
            return _refusal("question", f"is not JSON: {error}", 400)
        except ConfigError as error:
            return JSONResponse({"error": {"message": str(error), "key": error.key}}, status_code=400)
        if len(running) >= MOST_QUESTIONS:
            return _refusal("question", f"waits: {MOST_QUESTIONS} others are being answered", 429)
        mark = id(question)
        running.add(mark)
        lines = _lines(request, question, budget_s=budget_s, ended=lambda: running.discard(mark))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return app


async def _body(request: Request) -> bytes:
    """The body of a request. ValueError where it is too long."""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > LARGEST_QUESTION:
            raise ValueError(f"it has more than {LARGEST_QUESTION:,} bytes")
    return found


def _refusal(key: str, message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": f"{key}: {message}", "key": key}}, status_code=status)


async def _lines(
    request: Request, question: dict[str, Any], *, budget_s: float, ended: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The lines of the answer, until it is there, its time is over, or the page is left."""
    process, connection = ask(question, budget_s=budget_s)
    end_s = time.monotonic() + budget_s + GRACE_S
    try:
        while True:
            if await asyncio.to_thread(connection.poll, POLL_S):
                try:
                    yield connection.recv_bytes() + b"\n"
                except EOFError:
                    return
            elif time.monotonic() > end_s:
                yield json.dumps({"error": {"message": "the time of the question is over"}}).encode() + b"\n"
                return
            elif await request.is_disconnected():
                return
    finally:
        process.kill()
        process.join()
        connection.close()
        ended()
