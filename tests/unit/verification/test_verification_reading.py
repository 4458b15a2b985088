"""The checker's own reader: what JSON can say and no more, and records by the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise_verify import InputError, read_document, reading
from shardwise_verify.reading import Count, Positive, keys_left, parse_document, record
from shardwise_verify.schedules import table_in


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null, true, "x"]}', {"a": [1, 2.5, None, True, "x"]}),
        ("a: [1, 2.5, null, true, x]\n", {"a": [1, 2.5, None, True, "x"]}),
        # Plain YAML scalars mean what they mean in JSON: these are text, and 1e3 is a number.
        ("a: [no, 017, 1_000, 12:30, ~]", {"a": ["no", "017", "1_000", "12:30", "~"]}),
        ('a: [1e3, "1", -0.5]', {"a": [1000.0, "1", -0.5]}),
        ("{a: {b: }}", {"a": {"b": None}}),
    ],
)
def test_json_and_yaml(text: str, value: object) -> None:
    found = parse_document(text)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("a: 1\nb: {c: 1, c: 2}\n", "'c' is given twice"),
        ("a: &x 1\nb: *x\n", "anchor"),
        ("a: !!python/name:os.system x\n", "tag"),
        ("a: !!str 1\n", "tag"),
        ("<<: {a: 1}\n1: 2\n", "a key that is not text"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ('{"a": NaN}', "not finite"),
        ('{"a": 1e999}', "not finite"),
        ("a: 1e999\n", "not finite"),
        ('{"a": ' + "1" * 41 + "}", "41 digits"),
        ('{"a": ' * 70 + "1" + "}" * 70, "too large"),
        ('{"a": ' * 100_000, "is not valid"),
        ("a: " + "[" * 70 + "]" * 70, "64 levels"),
        ("- 1\n", "is not a mapping"),
        ('{"a": "\\ud800"}', "is not text"),
        ('{"a": 1', "is not valid"),
    ],
)
def test_more_than_json_can_say_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_document(text)


def test_files_that_are_too_large_or_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"a": [1, 2, 3]}')
    assert read_document(str(path)) == {"a": [1, 2, 3]}
    monkeypatch.setattr(reading, "MAX_BYTES", 15)
    with pytest.raises(InputError, match="is too large"):
        read_document(str(path))
    monkeypatch.setattr(reading, "MAX_BYTES", 16)
    monkeypatch.setattr(reading, "MAX_VALUES", 5)  # the mapping, its key, the list, and two of three numbers
    with pytest.raises(InputError, match="is too large"):
        read_document(str(path))
    for other in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(InputError, match=r"regular file|cannot be read"):
            read_document(str(other))


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A record in a record."""

    size: Count
    rate: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A record with items of every kind of type."""

    items: tuple[Inner, ...]
    pair: tuple[int, str]
    named: Mapping[str, float]
    maybe: Inner | None = None


WHOLE: dict[str, object] = {
    "items": [{"size": 1}, {"size": 2, "rate": 3}],
    "pair": [1, "x"],
    "named": {"a": 1},
}


def test_a_record_of_records() -> None:
    found = record(Outer, {**WHOLE, "maybe": None})
    assert found == Outer(items=(Inner(size=1), Inner(size=2, rate=3.0)), pair=(1, "x"), named={"a": 1.0})
    assert isinstance(found.items[1].rate, float)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"items": [{"size": 0}]}, "items[0].size"),
        ({"items": [{"size": True}]}, "items[0].size"),
        ({"items": [{"size": 1.0}]}, "items[0].size"),
        ({"items": [{}]}, "items[0].size"),
        ({"items": {"size": 1}}, "items"),
        ({"pair": [1]}, "pair"),
        ({"pair": [1, 2]}, "pair[1]"),
        ({"named": {"a": "1"}}, "named.a"),
        ({"maybe": 1}, "maybe"),
    ],
)
def test_another_type_or_size_is_refused_at_its_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(InputError) as caught:
        record(Outer, {**WHOLE, **change})
    assert caught.value.key == key


def test_keys_that_no_record_has_are_listed() -> None:
    changes = {"items": [{"size": 1, "colour": 1}], "maybe": {"size": 1, "x": 2}, "named": {"b": 1}, "y": 0}
    document = {**WHOLE, **changes}
    record(Outer, document)
    assert list(keys_left(Outer, document)) == ["items.colour", "maybe.x", "y"]


def test_a_line_of_a_schedule() -> None:
    """Every repetition takes the next micro-batch."""
    (row, nothing) = table_in(["0F0*2 [0F2 0B0]*2 0B2", "-"])
    assert [f"{stage}{kind}{number}" for stage, kind, number in row] == [
        "0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2",
    ]  # fmt: skip
    assert nothing == ()


@pytest.mark.parametrize("line", ["", "0F", "0F0  0B0", "0X0", "0F0,0B0", "[0F0", "0F0*9999999", "0F0 "])
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(InputError):
        table_in([line])
