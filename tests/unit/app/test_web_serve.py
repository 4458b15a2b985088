"""The server of `serve`: what a question may say, who may ask, and how a question ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli.main import main
from shardwise.app.cli.serving import _listener
from shardwise.app.web import asking, serve
from shardwise.errors import ConfigError

PORT = 8765
QUESTION = {"model": "gpt2", "cluster": "1x2xA100-80G", "seq_len": 1024, "global_batch_size": 8}


# Questions


def test_a_question_is_arguments_of_plan() -> None:
    found = asking.question_of({**QUESTION, "target": "", "fix": "tp=2", "memory_margin": 0.1})
    assert found == {**QUESTION, "fix": "tp=2", "memory_margin": 0.1}
    assert asking.question_of({**QUESTION, "cluster": "spot-mix"})["cluster"] == "spot-mix"
    config = {"model_type": "llama"}
    del (given := dict(QUESTION))["model"]
    assert asking.question_of({**given, "config": config})["model"] == config


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model": "/etc/passwd"}, "model"),
        ({"model": "examples/tiny.yaml"}, "model"),
        ({"model": "meta-llama/Llama-3.1-8B"}, "model"),
        ({"model": None}, "model"),
        ({"model": ["gpt2"]}, "model"),
        ({"config": "config.json"}, "config"),
        ({"cluster": "/etc/passwd"}, "cluster"),
        ({"cluster": "1x2xA100-80G.yaml"}, "cluster"),
        ({"cluster": "1x2x../../a"}, "cluster"),
        ({"cluster": "cluster.yaml"}, "cluster"),
        ({"cluster": {"nodes": []}}, "cluster"),
        ({"calibration": "a.yaml"}, "'calibration'"),
        ({"events": "trace.jsonl"}, "'events'"),
        ({"space": "space.yaml"}, "'space'"),
        ({"workers": 64}, "'workers'"),
        ({"seq_len": "1024"}, "seq_len"),
        ({"seq_len": True}, "seq_len"),
        ({"fix": {"tp": 2}}, "fix"),
        ({"target": "x" * 201}, "target"),
    ],
)
def test_a_question_names_no_file(
    change: Mapping[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file of that name is there."""
    monkeypatch.chdir(tmp_path)
    for name in ("cluster.yaml", "1x2xA100-80G.yaml", "config.json"):
        Path(name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        asking.question_of({**QUESTION, **change})
    assert caught.value.key == key


@pytest.mark.parametrize("given", [None, [], "gpt2", 3])
def test_a_question_is_an_object(given: object) -> None:
    with pytest.raises(ConfigError, match="is not an object"):
        asking.question_of(given)


def test_an_answer_is_a_report_and_with_changes_two() -> None:
    one = asking.answer(asking.question_of(QUESTION), budget_s=60.0)
    assert len(one["plans"]) == 1  # type: ignore[arg-type]
    two = asking.answer(asking.question_of({**QUESTION, "changes": "memory=2x"}), budget_s=60.0)
    plans: Any = two["plans"]
    first, second = plans
    assert (
        second["best"]["peak_memory_bytes"]["capacity"] > 1.9 * first["best"]["peak_memory_bytes"]["capacity"]
    )
    assert first["target"] == second["target"] and second["file"] == "with memory=2x"


# Requests


def requested(
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    is_gone: Callable[[], bool] = lambda: False,
) -> tuple[int, bytes, dict[str, str]]:
    """The status, the body and the headers of the answer of the application to one request."""
    given = {"host": f"127.0.0.1:{PORT}", **(headers or {})}
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        while not is_gone():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("127.0.0.1", PORT), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    # In a thread: the loop of Playwright may run in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, serve.application(PORT, budget_s=5.0)(scope, receive, send)).result()
    start = next(one for one in sent if one["type"] == "http.response.start")
    text = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
    return start["status"], text, {name.decode(): value.decode() for name, value in start["headers"]}


def asked(question: object, **more: Any) -> tuple[int, bytes]:
    body = question if isinstance(question, bytes) else json.dumps(question).encode()
    headers = {"content-type": "application/json", **more.pop("headers", {})}
    status, text, _ = requested("POST", "/questions", body=body, headers=headers, **more)
    return status, text


def test_the_page_asks_only_its_server() -> None:
    status, text, headers = requested("GET", "/")
    assert status == 200 and b"connect-src 'self'" in text and b"default-src 'none'" in text
    assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": f"evil.example:{PORT}"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:1"},
        {"host": f"127.0.0.1:{PORT}", "origin": "http://evil.example"},
        {"host": f"127.0.0.1:{PORT}", "origin": f"https://127.0.0.1:{PORT}"},
        {"host": f"127.0.0.1:{PORT}", "origin": "null"},
    ],
)
def test_other_pages_cannot_ask(headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "ask", lambda *_, **__: pytest.fail("was asked"))
    assert requested("GET", "/", headers=headers)[0] == 403
    assert asked(QUESTION, headers=headers)[0] == 403


@pytest.mark.parametrize("origin", [f"http://127.0.0.1:{PORT}", f"http://localhost:{PORT}"])
def test_the_own_page_can_ask(origin: str) -> None:
    assert requested("GET", "/", headers={"host": origin.removeprefix("http://"), "origin": origin})[0] == 200


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/../pyproject.toml", "/assets/base.js", "/docs", "/openapi.json"]
)
def test_there_is_nothing_else(path: str) -> None:
    assert requested("GET", path)[0] == 404


def test_what_is_no_question_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "ask", lambda *_, **__: pytest.fail("was asked"))
    assert asked(QUESTION, headers={"content-type": "text/plain"})[0] == 415
    assert asked(b"{")[0] == asked(b"\xff")[0] == asked(b"[" * 100_000)[0] == 400
    assert asked(b" " * (serve.LARGEST_QUESTION + 1))[0] == 400
    status, text = asked({**QUESTION, "model": "/etc/passwd"})
    assert status == 400 and json.loads(text)["error"]["key"] == "model"


class Process:
    """A process of a question that never answers by itself."""

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def join(self) -> None:
        assert self.killed


def test_lines_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process, (receiver, sender) = Process(), Pipe(duplex=False)
    records: list[dict[str, object]] = [{"progress": "one"}, {"report": {"plans": []}}]
    for record in records:
        sender.send_bytes(json.dumps(record).encode())
    sender.close()
    monkeypatch.setattr(serve, "ask", lambda question, budget_s: (process, receiver))
    status, text = asked(QUESTION)
    assert status == 200
    assert [json.loads(line) for line in text.splitlines()] == records
    assert process.killed


def test_a_question_ends_when_its_page_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    process, (receiver, sender) = Process(), Pipe(duplex=False)
    monkeypatch.setattr(serve, "ask", lambda question, budget_s: (process, receiver))
    asked(QUESTION, is_gone=lambda: True)  # it would wait for ever
    assert process.killed
    sender.close()


def test_a_question_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process, (receiver, sender) = Process(), Pipe(duplex=False)
    monkeypatch.setattr(serve, "ask", lambda question, budget_s: (process, receiver))
    monkeypatch.setattr(serve, "GRACE_S", -5.0)  # budget 5 s: over at once
    _, text = asked(QUESTION)
    assert "time" in json.loads(text)["error"]["message"] and process.killed
    sender.close()


@pytest.mark.slow
def test_a_process_answers_and_reports_errors() -> None:
    for question, key in ((QUESTION, "report"), ({**QUESTION, "fix": "tp=3"}, "error")):
        process, connection = asking.ask(asking.question_of(question), budget_s=60.0)
        found: dict[str, Any] = {}
        while key not in found:
            found = json.loads(connection.recv_bytes())
        process.join()
        assert process.exitcode == 0
    assert found["error"]["kind"] in ("config", "infeasible")


def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.app.cli.serving.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert "pip install 'shardwise[web]'" in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    assert f"--port: cannot be used; found {port}: address already in use" in capsys.readouterr().err


def test_the_address_can_be_opened_as_soon_as_it_is_printed() -> None:
    """A connection waits until the server runs; a socket that is only bound refuses it."""
    listener = _listener("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), timeout=5.0):
        pass
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), timeout=5.0)
