"""No line of any command's text is wider than the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import api
from shardwise.app.cli.output import LABEL, Line, TableRow, fitted, plain_text, row

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

WIDTHS = (60, 80, 100, 120)
TINY = str(Path(__file__).parents[3] / "examples" / "tiny.yaml")
JOB = (TINY, "--seq-len", "64", "--global-batch-size", "4")
PLAN = (*JOB, "--cluster", "1x2xA100-80G", "--target", "megatron-lm", "--space", "core")
MIXED = (*JOB, "--cluster", "1x1xA100-80G+1x1xV100-32G")
GRAPH = ("graph:mlp", "--cluster", "1x2xV100-32G", "--global-batch-size", "8192")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Plans of all kinds and a trace of events, each made once."""
    from shardwise.app.cli.main import main

    folder = tmp_path_factory.mktemp("plans")
    names = {name: str(folder / name) for name in ("even", "piped", "uneven", "graph", "events")}
    commands = (
        ("plan", *PLAN, "--save", names["even"]),
        ("plan", *PLAN, "--fix", "pp=2", "--save", names["piped"]),
        ("plan", *MIXED, "--save", names["uneven"]),
        ("frontier", *GRAPH, "--save", names["graph"]),
        ("events", "generate", "preemption", "--cluster", "2x1xA100-80G", "--length", "2h", "--seed", "1",
         "--out", names["events"]),
    )  # fmt: skip
    assert [main(command) for command in commands] == [0] * len(commands)
    names["graph"] = str(next(Path(names["graph"]).iterdir()))
    return names


def too_long(text: str, width: int) -> list[str]:
    """Lines that are wider and have more than one word: a path or an address is not broken, and no command,
    which a shell would not continue."""
    lines = [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1]
    return [line for line in lines if not line[15:].lstrip().startswith("shardwise ")]


COMMANDS = {
    "models": ("models",),
    "devices": ("devices",),
    "graphs": ("graphs",),
    "space": ("space", *MIXED),
    "plan": ("plan", *PLAN),
    "plan, everything": ("plan", *PLAN, "--verbose", "--tokens", "15T"),
    "plan, uneven": ("plan", *MIXED, "--days", "3"),
    "evaluate": ("evaluate", *JOB, "--cluster", "1x2xA100-80G", "--strategy", "pp=2", "--steps", "1000"),
    "explain": ("explain", "even", "--budget", "2s"),
    "explain, everything": ("explain", "piped", "--verbose", "--budget", "1s"),
    "explain, uneven": ("explain", "uneven"),
    "explain, graph": ("explain", "graph"),
    "explain --why-not": ("explain", "even", "--why-not", "tp=2"),
    "frontier": ("frontier", *PLAN, "--memory-limit", "60GiB"),
    "frontier, counts": ("frontier", *PLAN, "--mode", "profile", "--tokens", "15T"),
    "frontier, mixed": ("frontier", *MIXED, "--mode", "devices"),
    "frontier, graph": ("frontier", *GRAPH),
    "compare": ("compare", "even", "piped"),
    "compare, kinds": ("compare", "even", "uneven"),
    "replay": ("replay", *JOB, "--cluster", "2x1xA100-80G", "--target", "any", "--events", "events"),
    "simulate": ("simulate", "piped"),
    "simulate, uneven": ("simulate", "uneven"),
    "simulate, graph": ("simulate", "graph"),
    "check": ("check", "even"),
    "replan": ("replan", "piped", "--events", "slow n0 0.5"),
}  # fmt: skip


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the search are found once and shown in every width: `columns` does not reach them."""

    def first_answer(function: Callable[..., Any]) -> Callable[..., Any]:
        answers: list[Any] = []

        def call(*arguments: Any, **options: Any) -> Any:
            if not answers:
                answers.append(function(*arguments, **options))
            return answers[0]

        return call

    for name in ("plan", "explain", "what_if", "frontier", "check"):
        monkeypatch.setattr(api, name, first_answer(getattr(api, name)))


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_wider_than_the_terminal(
    run: Run, files: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [files.get(word, word) for word in COMMANDS[name]]
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        ran = run(*command)
        assert ran.code == 0, ran.err
        assert len(ran.out.splitlines()) > 3
        assert too_long(ran.out, width) == []


@given(
    st.lists(
        st.lists(st.tuples(st.text("ab ·", max_size=30), st.sampled_from(["", "dim"])), max_size=4),
        max_size=6,
    ),
    st.integers(20, 60),
)
def test_words_stay_in_their_order_and_lines_within_the_width(
    texts: list[list[tuple[str, str]]], width: int
) -> None:
    """Whatever the spans are, as lines and as rows of a table."""
    for kind in (tuple, TableRow):
        lines: list[Line] = [kind(spans) for spans in texts]
        shown = plain_text(fitted(lines, width))
        assert too_long(shown, width) == []
        assert shown.split() == plain_text(lines).split()


def test_the_blank_columns_of_a_table_go_first() -> None:
    """20 columns in 11: of gaps of 6, 3 and 3 columns one is left each. In 14: 2 each."""
    rows = [TableRow([("ab      cd   ef   g", "")]), TableRow([("x       y    z    12", "dim")])]
    assert plain_text(fitted(rows, 11)) == "ab cd ef g\nx  y  z  12\n"
    assert plain_text(fitted(rows, 14)) == "ab  cd  ef  g\nx   y   z   12\n"
    # A line that is no row keeps its blanks.
    assert plain_text(fitted([(("a     b", ""),), *rows], 11)).startswith("a     b\nab cd")


def test_a_long_line_goes_on_behind_its_label() -> None:
    """LABEL is 15: 15 + 5 columns of text."""
    assert LABEL == 15
    shown = plain_text(fitted([row("label", ("one two three", ""))], 22))
    assert shown == " label         one two\n               three\n"
    address = "https://example.com/a-long-address"
    assert plain_text(fitted([row("label", (f"see {address} now", ""))], 30)).splitlines() == [
        " label         see", f"  {address}", "               now",
    ]  # fmt: skip
