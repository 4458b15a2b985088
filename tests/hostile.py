"""Pages of plans whose model, cluster, devices, nodes, graph and trace have hostile names."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import yaml

from shardwise.app.cli.main import main

NAME = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"q\" 'p' <!-- &amp; $title {0} %s"
"""A name that readers accept, since it is printable."""

MODEL = {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 1000, "seq_len": 512, "name": NAME}
NODES: list[dict[str, object]] = [{"device": NAME, "count": 2, "devices": 2, "name": NAME}]
CLUSTER: dict[str, object] = {"name": NAME, "classes": {NAME: {"device": "V100-32G"}}, "nodes": NODES}
JOB = ("--global-batch-size", "8", "--cluster", "c.yaml")
SEQUENCES = ("--seq-len", "512")
HEAD = {"schema": "shardwise.events", "version": 1, "nodes": 2, "source": NAME}
EVENTS = ({"time_s": 600.0, "kind": "lost", "node": "n1"}, {"time_s": 1200.0, "kind": "joined", "node": "n1"})

COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "plan.yaml", "--out", "page.html"),
    "compare": ("compare", "plan.yaml", "other.yaml", "--out", "page.html"),
    "simulate": ("simulate", "plan.yaml", "--plot", "page.html"),
    "replay": ("replay", "plan.yaml", "--cluster", "c.yaml", "--events", "t.jsonl", "--plot", "page.html"),
    "frontier": (
        "frontier", "m.yaml", *JOB, *SEQUENCES, "--target", "any", "--epsilon", "0.2", "--plot", "page.html",
    ),
    "graph frontier": (
        "frontier", "g.yaml", *JOB, "--epsilon", "0.5", "--save", "plans", "--plot", "page.html",
    ),
    "graph report": ("report", "plans/devices-4-point-1.yaml", "--out", "page.html"),
    "graph simulate": ("simulate", "plans/devices-4-point-1.yaml", "--plot", "page.html"),
}  # fmt: skip
"""For each page the command that writes it, in a folder of `write_inputs`."""


def write_inputs(folder: Path) -> None:
    """Writes the inputs of all commands into the present folder: model, cluster, graph, trace and plans."""
    (folder / "m.yaml").write_text(yaml.safe_dump(MODEL))
    (folder / "c.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (HEAD, *EVENTS)))
    from shardwise.graph import graph_text, load_graph

    graph = yaml.safe_load(graph_text(load_graph("graph:two-tower")))
    (folder / "g.yaml").write_text(yaml.safe_dump({**graph, "name": NAME}, sort_keys=False))
    for name, strategy in (("plan.yaml", "dp=4"), ("other.yaml", "dp=2,pp=2")):
        said = answer("evaluate", "m.yaml", *JOB, *SEQUENCES, "--strategy", strategy, "--save", name)
        assert said.strip(), name


def answer(*argv: str) -> str:
    """All that a command prints, which ends with exit code 0."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(argv))
    assert code == 0, said.getvalue()
    return said.getvalue()


def page_data(text: str) -> Any:
    """The document of a page, of which the name can have ended no element."""
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text and "<!--" not in text and "alert(1)</script>" not in text
    return json.loads(text.split('id="data">')[1].split("</script>")[0])
