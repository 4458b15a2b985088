"""Written YAML is read back equal by the strict reader, and by PyYAML where YAML 1.1 has the same meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.errors import InternalError
from shardwise.inputs import dumps, dumps_yaml, parse_mapping

TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
WORDS = (
    "null true no Off y 1e9 017 1_000 12:30:00 # &a *a !t << = ~ [ { ' % @ ` ? | > "
    ".inf .nan 0x10 1.5 - --- ..."
)
MARKS = ["", " ", "- a", "a: b", "a #b", '"', "\\", "\n", "a\nb", "\t", "\x85", "\u2028", "\ufeff", "\x7f"]
AWKWARD = st.sampled_from([*WORDS.split(" "), *MARKS, "\U0001f600", "a" * 300])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
    AWKWARD,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.one_of(TEXT, AWKWARD), inner, max_size=5)
    ),
    max_leaves=25,
)
DOCUMENTS = st.dictionaries(st.one_of(TEXT, AWKWARD), VALUES, min_size=1, max_size=6)


@pytest.mark.slow
@given(DOCUMENTS)
@example(
    {"a": 1e-05, "b": 1e22, "c": -0.0, "d": 5e-324, "e": [1.0, 2], "f": {}, "g": [], "h": [[], [[1]], {}]}
)
@example({"a": [{"b": {"c": [{"d": []}, {}]}}], "e": ["x" * 60, "y" * 60], "f": list(range(60))})
def test_written_yaml_reads_back_equal(document: dict[str, Any]) -> None:
    text = dumps_yaml(document)
    assert _typed(parse_mapping(text, file="plan.yaml")) == _typed(document)
    assert dumps_yaml(document) == text


@pytest.mark.slow
@given(DOCUMENTS, st.sampled_from(["plan.json", "plan.yaml", "a/b.JSON", "plan"]))
def test_a_file_reads_back_equal_whatever_its_name(document: dict[str, Any], name: str) -> None:
    text = dumps(document, file=name)
    assert _typed(parse_mapping(text, file=name)) == _typed(document)
    assert (text == dumps_yaml(document)) == (not name.lower().endswith(".json"))


@pytest.mark.slow
@given(DOCUMENTS)
def test_a_general_yaml_reader_agrees(document: dict[str, Any]) -> None:
    assert _typed(yaml.safe_load(dumps_yaml(document))) == _typed(document)


def _typed(value: object) -> str:
    """A text that distinguishes 1 from 1.0 and from true, and -0.0 from 0.0."""
    return json.dumps(value, sort_keys=True)


def test_the_text_has_one_key_a_line_and_short_lists_on_one_line() -> None:
    document = {
        "schema": "shardwise.plan",
        "band_s": [1.5, 2.0],
        "job": {"dtype": "bf16", "is_on": True, "off": None},
        "stages": [{"layers": 20, "chunks": [10, 10]}, {"layers": 19}],
        "lines": ["x" * 60, "y" * 60],
    }
    assert dumps_yaml(document) == (
        "schema: shardwise.plan\n"
        "band_s: [1.5, 2.0]\n"
        "job:\n"
        "  dtype: bf16\n"
        "  is_on: true\n"
        '  "off": null\n'
        "stages:\n"
        "- layers: 20\n"
        "  chunks: [10, 10]\n"
        "- layers: 19\n"
        "lines:\n"
        f"- {'x' * 60}\n"
        f"- {'y' * 60}\n"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1, 2}, object()])
def test_values_without_a_yaml_text_are_refused(value: object) -> None:
    with pytest.raises(InternalError, match="a file cannot hold"):
        dumps_yaml({"a": [value]})
    with pytest.raises(InternalError, match="a file cannot hold"):
        dumps({"a": [value]}, file="a.json")
