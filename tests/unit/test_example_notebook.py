"""examples/planning.ipynb: its cells run in order and show tables; outputs are not committed."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.documented.pages import ROOT

NOTEBOOK = json.loads((ROOT / "examples/planning.ipynb").read_text("utf-8"))


def run_cell(source: str, space: dict[str, Any]) -> object:
    """Runs a cell as a notebook does; the value of its last expression, or None."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    exec(compile(ast.Module(body, []), "cell", "exec"), space)  # noqa: S102 - a cell of our own notebook
    return None if last is None else eval(compile(last, "cell", "eval"), space)  # noqa: S307


@pytest.mark.slow
def test_the_cells_run_in_order_and_show_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    shown: list[str] = []
    with contextlib.chdir(tmp_path):
        for cell in NOTEBOOK["cells"]:
            if cell["cell_type"] == "code":
                value = run_cell("".join(cell["source"]), space)
                render = getattr(value, "_repr_html_", None)
                shown += [] if render is None else [f"{type(value).__name__}: {render()}"]
    kinds = [text.partition(":")[0] for text in shown]
    comparisons = ["PlanComparison", "PlanComparison"]
    assert kinds == ["Plan", "PlanExplanation", *comparisons, "FrontierAnswer", "Sweep", "CheckedPlan"]
    assert all("<table>" in text for text in shown)
    assert "GiB too much" in capsys.readouterr().out  # the strategy that does not fit
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "sweep.jsonl"]
    assert space["small"].step_time_s > space["plan"].step_time_s


def test_the_notebook_has_no_outputs_and_valid_cells() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 10
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
