"""The strict reader: valid values, refused ones, and the messages of errors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, nearest, parse_mapping, read_mapping, record_of
from shardwise.inputs.messages import MAX_DEPTH


def refusal(text: str, file: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_mapping(text, file=file)
    assert "\n" not in str(caught.value)
    return caught.value


def test_yaml_scalars_are_read_as_in_json() -> None:
    text = "a: 1e9\nb: no\nc: 017\nd: 12:30:00\ne: 1_000\nf: true\ng: null\nh: -1.5\ni:\nj: '1'\nk: .5"
    text += "\nl: 0x10\nm: ~\nn: 0"
    assert parse_mapping(text) == {
        "a": 1e9, "b": "no", "c": "017", "d": "12:30:00", "e": "1_000", "f": True, "g": None, "h": -1.5,
        "i": None, "j": "1", "k": ".5", "l": "0x10", "m": "~", "n": 0,
    }  # fmt: skip


def test_json_and_yaml_give_the_same() -> None:
    text = '{"a": [1, 2.5, {"b": null}], "c": "x", "d": 1e3, "e": {}}'
    assert parse_mapping(text, file="x.json") == parse_mapping(text, file="x.yaml") == parse_mapping(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x 1", "anchor"), ("a: &x {b: 1}", "anchor"), ("a: *x", "alias"), ("a: !!int 1", "tag"),
        ("a: !x 1", "tag"), ("!!map {a: 1}", "tag"), ("a: 1\na: 2", "a: is given twice"),
        ("b: {c: [0, {d: 1, d: 2}]}", "b.c[1].d: is given twice"),
        ('{"b": {"c": [0, {"d": 1, "d": 2}]}}', "b.c[1].d: is given twice"),
        ("1: a", "key that is not text"), ("true: a", "key that is not text"), ("? [a]\n: b", "not text"),
        ("a: .nan", "not finite"), ("a: -.INF", "not finite"), ("a: 1e999", "not finite"),
        ('{"a": NaN}', "not finite"), ('{"a": -Infinity}', "not finite"), ('{"a": 1e999}', "not finite"),
        ('{"a": ' + "9" * 5000 + "}", "not finite"), ("a: " + "9" * 5000, "not finite"),
        ("", "is empty"), ("# only words", "not a mapping"), ("- a", "not a mapping"),
        ("[1]", "not a mapping"), ("a: 1\n---\nb: 2", "more than one document"),
        ("a: [1", "not valid YAML"), ('{"a": ', "not valid JSON"),
        ('{"a": 1,}', "not valid JSON"), ("a: b: c", "not valid YAML"), ("a\0b: 1", "not text"),
        ('{"a": "\\u0000"}', "not text"), ('{"a": "\\ud800"}', "not text"), ('{"\\ud800": 1}', "not text"),
        ("a: \ud800", "not text"), ('a: "\\0"', "not text"),
        ("a: " + "[" * 50_000, "nested too deeply"), ('{"a": ' + "[" * 50_000, "nested too deeply"),
        ("a: [" + "1," * 100_001 + "]", "too many values"), ('{"a": [' + "1," * 100_001 + "1]}", "too many"),
        ("a: " + "x" * (1 << 20), "too large"),
    ],
)  # fmt: skip
def test_malformed_text_is_refused_with_its_reason(text: str, says: str) -> None:
    assert says in str(refusal(text))


def test_a_billion_laughs_is_refused_at_its_first_anchor() -> None:
    text = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(40))
    assert refusal(text).key == "a"


def test_depth_is_counted_exactly() -> None:
    for opening, closing in (("[", "]"), ('{"k": ', "}")):
        for head in ("a: ", '{"a": '):
            tail = "}" if head.startswith("{") else ""
            inner = MAX_DEPTH - 1
            parse_mapping(head + opening * inner + "1" + closing * inner + tail)
            deeper = head + opening * (inner + 1) + "1" + closing * (inner + 1) + tail
            assert "deeply" in str(refusal(deeper))


def test_marks_inside_json_strings_do_not_count() -> None:
    assert parse_mapping('{"a": "' + "[" * 100 + '\\"{' + '"}') == {"a": "[" * 100 + '"{'}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"a: \xff")
    (tmp_path / "utf16").write_bytes("a: 1".encode("utf-16"))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 << 20)
    for name, says in {
        "pipe": "a pipe", ".": "a directory", "absent": "no such file", "bytes": "not UTF-8",
        "utf16": "not UTF-8", "large": "too large", "n\0ul": "null", "x" * 5000: "too long",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            read_mapping(str(tmp_path / name))
        assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="a device"):
        read_mapping("/dev/zero")


def test_a_file_is_named_in_its_errors_and_read_by_suffix(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("a: 1")
    with pytest.raises(ConfigError) as caught:
        read_mapping(str(path))
    assert caught.value.file == str(path) and "JSON" in caught.value.message
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_mapping(str(path)) == {"a": 1}


# --- fields ----------------------------------------------------------------------------------------------


def wrong(read: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read()
    assert isinstance(caught.value, ConfigError)
    return caught.value


def test_fields_read_values_of_their_kind() -> None:
    fields = Fields(parse_mapping("a: 3\nb: 1e6\nc: 2.5\nd: x\ne: true\nf: 200Gb/s\ng: 5\nh: null"))
    assert fields.integer("a") == 3
    assert fields.integer("b") == 1_000_000 and isinstance(fields.integer("b"), int)
    assert fields.number("c") == 2.5
    assert fields.text("d") == "x"
    assert fields.choice("d", ["x", "y"]) == "x"
    assert fields.boolean("e") is True
    assert fields.quantity("f", unit="B/s", low=0, high=1e12) == 25e9
    assert fields.quantity("g", unit="B/s", low=0, high=1e12) == 5.0
    assert not fields.has("h") and fields.integer("h", default=7) == 7
    fields.finish()


@pytest.mark.parametrize("value", ["true", "2.5", "'3'", "[3]", "0", "11", "-1", "1e300"])
def test_integers_are_whole_and_in_range(value: str) -> None:
    text = f"a: {{b: [{{n: {value}}}]}}"
    node = Fields(parse_mapping(text), file="f.yaml").mapping("a").mappings("b")[0]
    error = wrong(lambda: node.integer("n", low=1, high=10))
    assert (error.file, error.key) == ("f.yaml", "a.b[0].n")
    assert error.allowed == "a whole number from 1 to 10" and error.found is not None


def test_wrong_kinds_are_refused_by_every_reader() -> None:
    fields = Fields(parse_mapping("m: {a: 1}\nl: [1]\ns: text\nb: true\nn: 1"), file="f")
    for read in (
        lambda: fields.number("b"), lambda: fields.number("s"),
        lambda: fields.text("n"), lambda: fields.text("m"),
        lambda: fields.boolean("n"), lambda: fields.boolean("s"), lambda: fields.mapping("l"),
        lambda: fields.sequence("m"), lambda: fields.sequence("s"), lambda: fields.mappings("l"),
        lambda: fields.choice("s", ["a"]), lambda: fields.choice("n", ["1"]),
        lambda: fields.quantity("s", unit="B", low=0, high=1),
        lambda: fields.quantity("b", unit="B", low=0, high=1), lambda: fields.sequence("l", low=2),
        lambda: fields.integer("missing"), lambda: fields.text("missing"),
    ):  # fmt: skip
        error = wrong(read)
        assert error.file == "f" and error.key and error.allowed


@pytest.mark.parametrize("name", ["", "\n", "a\x1b[31m", "x" * 201])
def test_names_that_the_user_chose_are_short_texts(name: str) -> None:
    fields = Fields({name: {}}, file="f", key="classes")
    for read in (lambda: list(fields.items()), fields.chosen_names):
        error = wrong(read)
        assert (error.file, error.key) == (
            "f",
            "classes",
        ) and error.message == "has a name that is not a short text"
        assert str(error).isprintable() and len(str(error)) < 300
    assert Fields({"a b": {}}).chosen_names() == ("a b",)


def test_unknown_keys_are_refused_with_a_suggestion() -> None:
    fields = Fields(parse_mapping("layers: 2\nhiden: 3"), file="m.yaml")
    fields.integer("layers")
    fields.has("hidden")
    assert fields.unread == ("hiden",)
    error = wrong(fields.finish)
    assert str(error) == "m.yaml: hiden: is not a known key (did you mean hidden?); allowed: layers, hidden"
    nameless = wrong(Fields(parse_mapping('"": 3'), file="m.yaml", key="nodes[0]").finish)
    assert str(nameless).startswith("m.yaml: nodes[0].'': is not a known key")


def test_a_missing_key_names_the_unread_one_that_is_almost_it() -> None:
    fields = Fields(parse_mapping("layerz: 2\nkv_heads: 3"), file="m.yaml")
    assert str(wrong(lambda: fields.integer("layers", low=1, high=9))) == (
        "m.yaml: layers: is missing; found layerz; allowed: a whole number from 1 to 9"
    )
    # Another key that only looks similar is not taken for it.
    assert wrong(lambda: fields.integer("heads")).found is None
    fields.has("layerz")
    assert wrong(lambda: fields.integer("layers")).found is None


def test_numbers_and_lists_say_what_is_wrong_with_them() -> None:
    fields = Fields(parse_mapping("n: 0\ns: a\nl: []\nm: {a: 1}"))
    for read, message in (
        (lambda: fields.integer("n", low=1), "is not a whole number in range"),
        (lambda: fields.number("n", low=1), "is not a number in range"),
        (lambda: fields.quantity("n", unit="B", low=1, high=2), "is not a number in range"),
        (lambda: fields.sequence("l", low=1), "has the wrong length"),
        (lambda: fields.sequence("m"), "is not a list"),
    ):
        assert wrong(read).message == message


def test_odd_keys_stay_on_one_line() -> None:
    error = wrong(Fields({"a\nb": 1}, file="x\ny").finish)
    assert "\n" not in str(error)


def test_nearest() -> None:
    assert nearest("H10O-sxm", ["H100-SXM", "A100-80G"]) == "H100-SXM"
    assert nearest("zzz", ["H100-SXM", "A100-80G"]) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    count: object
    name: object = "default"


def test_a_record_has_the_values_of_the_names_of_its_fields() -> None:
    values = {"name": "given", "count": 3, "other": None}
    assert record_of(Arguments, values) == Arguments(count=3, name="given")
    with pytest.raises(KeyError, match="name"):  # no default stands in for a forgotten parameter
        record_of(Arguments, {"count": 3})
