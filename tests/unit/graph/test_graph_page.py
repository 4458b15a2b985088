"""docs/reference/operators.md agrees with the kinds."""

from __future__ import annotations

from tests.unit.graph.operators_page import EXAMPLES, HEADING, PAGE, rendered, written

from shardwise.graph import check_op
from shardwise.graph.kinds import KINDS


def test_every_kind_has_an_example_that_passes_its_check() -> None:
    assert [op.kind for op in EXAMPLES] == list(KINDS)
    for op in EXAMPLES:
        check_op(op)


def test_the_page_of_operators_is_generated_from_the_kinds() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(), "python -m tests.unit.graph.operators_page writes it anew"
    assert text.count(HEADING) == 1
    assert "split h, keys whole" in rendered()
