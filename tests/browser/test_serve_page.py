"""The page of `shardwise serve` in a browser: ask, compare, change, share; and a name of markup is text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser.test_report_page import serious

HOSTILE = "<script>alert(1)</script>"
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def address(browser: Any) -> Iterator[str]:
    argv = [sys.executable, "-m", "shardwise", "serve", "--port", "0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+/", server.stderr.readline())
        assert found is not None
        yield found[0]
        server.terminate()


def test_questions_are_asked_compared_and_shared(browser: Any, address: str, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740})
    problems: list[str] = []
    requests: list[str] = []
    page.on("request", lambda one: requests.append(one.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(address)
    for name, value in (
        ("model", "gpt2"), ("cluster", "1x4xA100-80G"), ("seq_len", "1024"), ("global_batch_size", "16"),
    ):  # fmt: skip
        page.fill(f"#field-{name}", value)
    page.click("button:has-text('Ask')")
    page.wait_for_selector("#the-recommended-plan", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert serious(page) == []
    shared = page.url
    page.click("button:has-text('Keep to compare')")
    page.fill("#field-fix", "tp=2")
    page.click("button:has-text('Ask')")
    page.wait_for_selector("#what-differs", timeout=WAIT_MS)
    assert "tp 2" in page.locator("#the-two-plans .headline").nth(1).text_content()
    page.locator("#what-memory").fill("5")
    page.locator("#what-memory").dispatch_event("change")
    page.wait_for_selector("h3:has-text('with memory=2x')", timeout=WAIT_MS)

    page.goto("about:blank")
    page.goto(shared)  # the link asks again
    page.wait_for_selector("#the-recommended-plan", timeout=WAIT_MS)
    assert page.input_value("#field-model") == "gpt2"

    config = {
        "model_type": "llama", "_name_or_path": HOSTILE, "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    page.set_input_files("#field-config", tmp_path / "config.json")
    page.wait_for_selector("[role=status]:has-text('The model is that of config.json')")
    page.click("button:has-text('Ask')")
    page.wait_for_selector("[role=status]:text-is('Answered.')", timeout=WAIT_MS)
    assert page.locator("main script").count() == 0
    page.fill("#field-cluster", "../secret.yaml")
    page.click("button:has-text('Ask')")
    page.wait_for_selector("[role=status]:has-text('is not a cluster')")
    problems = [one for one in problems if "400" not in one]  # the console names the refused question
    assert problems == []
    assert all(one.startswith((address, "about:")) for one in requests)
    page.close()
