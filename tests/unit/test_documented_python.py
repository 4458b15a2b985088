"""docs/how-to/python-api.md: its examples give what they show, and its recipes run."""

from __future__ import annotations

import contextlib
import doctest
import re
import sys
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.documented.pages import ROOT

PAGE = ROOT / "docs/how-to/python-api.md"

QUESTIONS = [
    {"model": "gpt2", "cluster": f"1x{devices}xA100-80G", "seq_len": 1024, "global_batch_size": 8}
    for devices in (1, 2)
]


def blocks(language: str) -> list[str]:
    """The blocks of the page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def recipe(name: str) -> str:
    """The block that defines `name`, after the imports of the first recipe."""
    first = blocks("python")[0]
    (found,) = [block for block in blocks("python") if re.search(rf"^(def|class) {name}\b", block, re.M)]
    return found if found == first else f"{first}\n{found}"


def test_the_examples_give_what_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "\n".join(blocks("pycon"))
    assert source.count(">>> ") > 15
    test = doctest.DocTestParser().get_doctest(source, {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with contextlib.chdir(tmp_path):
        failed = runner.run(test).failed
    assert failed == 0, capsys.readouterr().out


def test_the_recipe_of_processes_runs(tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(recipe("sweep_in_processes"), space)  # noqa: S102 - a block of our own page
    found = space["sweep_in_processes"](QUESTIONS, 2, tmp_path / "sweep.jsonl")
    assert [row["devices_used"] for row in found] == [1, 2]


class Jobs:
    """As submitit's AutoExecutor: jobs with a result, which a thread waits for."""

    def __init__(self, folder: str) -> None:
        self.folder, self.parameters = folder, dict[str, Any]()

    def update_parameters(self, **parameters: Any) -> None:
        self.parameters |= parameters

    def submit(self, fn: Any, *args: Any) -> Any:
        assert self.parameters == {"timeout_min": 30}
        return types.SimpleNamespace(result=lambda: fn(*args))


class Tasks:
    """As dask's Client: its executor has futures of concurrent.futures."""

    def __init__(self, address: str) -> None:
        assert address == "tcp://scheduler:8786"

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_executor(self) -> Any:
        def submit(fn: Any, *args: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(fn(*args))
            return future

        return types.SimpleNamespace(submit=submit)


@pytest.mark.parametrize(
    ("name", "modules", "arguments"),
    [
        ("sweep_on_slurm", {"submitit": {"AutoExecutor": Jobs}}, {"timeout_min": 30}),
        (
            "sweep_on_dask",
            {"dask": {}, "dask.distributed": {"Client": Tasks}},
            {"address": "tcp://scheduler:8786"},
        ),
    ],
)
def test_recipes_for_clusters_run_on_stand_ins(
    name: str,
    modules: dict[str, dict[str, Any]],
    arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, attributes in modules.items():
        stand_in = types.ModuleType(module)
        stand_in.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, module, stand_in)
    space: dict[str, Any] = {}
    exec(recipe(name), space)  # noqa: S102 - a block of our own page
    found = space[name](QUESTIONS, out=tmp_path / "sweep.jsonl", **arguments)
    assert [row["devices_used"] for row in found] == [1, 2]
