"""Numbers that apply to several things: the one that counts, and their form in files."""

from __future__ import annotations

import re

import pytest

from shardwise.errors import InternalError
from shardwise.numbers import Number, most_specific, nested, numbers_of, numbers_record


def number(value: float, *of: str, field: str = "memory.fraction", source: str = "fitted") -> Number:
    return Number(of=of, field=field, value=value, source=source)


def values(numbers: list[Number], *names: str) -> dict[str, float]:
    return {field: found.value for field, found in most_specific(numbers, names).items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), 1.0),
        (("volta",), 1.0),
        (("ampere",), 2.0),
        (("ampere", "A100"), 3.0),
        (("hopper", "A100"), 3.0),
        (("ampere", "A30"), 2.0),
    ],
)
def test_the_most_specific_number_is_used(names: tuple[str, ...], expected: float) -> None:
    numbers = [number(3.0, "A100", "L4"), number(1.0, "*"), number(2.0, "ampere", "ada")]
    assert values(numbers, *names) == {"memory.fraction": expected}
    assert values(numbers[::-1], *names) == {"memory.fraction": expected}


def test_fields_are_chosen_one_by_one() -> None:
    numbers = [number(1.0, "*"), number(2.0, "*", field="launch_s"), number(3.0, "ampere", field="launch_s")]
    assert values(numbers, "ampere") == {"memory.fraction": 1.0, "launch_s": 3.0}
    assert values(numbers, "volta") == {"memory.fraction": 1.0, "launch_s": 2.0}
    assert values([number(1.0, "ada")], "volta") == {}


def test_a_number_that_names_both_is_the_more_specific() -> None:
    # A number named with the device precedes one for its architecture alone.
    assert values([number(1.0, "ampere", "A100"), number(2.0, "ampere")], "ampere", "A100") == {
        "memory.fraction": 1.0
    }


@pytest.mark.parametrize("of", ["*", "ampere", "A100"])
def test_two_numbers_for_the_same_are_refused(of: str) -> None:
    numbers = [number(1.0, of), number(2.0, of, "else")]
    message = f"two numbers for memory.fraction of {of}"
    with pytest.raises(InternalError, match=re.escape(message)):
        most_specific(numbers, ["ampere", "A100"])


def test_two_general_numbers_conflict_only_without_a_specific_one() -> None:
    numbers = [number(1.0, "ada"), number(2.0, "ada"), number(3.0, "ampere")]
    assert values(numbers, "ampere") == {"memory.fraction": 3.0}
    with pytest.raises(InternalError, match="ada"):
        most_specific(numbers, ["ada"])


def test_records_are_read_back() -> None:
    numbers = (number(1.0, "*"), number(2.5, "a", "b", field="x.y.z", source="assumed: a guess"))
    assert numbers_of(numbers_record(numbers)) == numbers
    assert numbers_record(numbers)[1] == {
        "of": ["a", "b"],
        "field": "x.y.z",
        "value": 2.5,
        "source": "assumed: a guess",
    }


def test_numbers_of_files_are_floats_but_where_they_count_elements() -> None:
    # A plan that was read back is written with the same bytes: 64.0 each time.
    def value(field: str, given: float) -> object:
        (found,) = numbers_of([{"of": ["*"], "field": field, "value": given, "source": "a test"}])
        return found.value

    for field, given, expected in (
        ("matmul.k_half", 64, "64.0"),
        ("launch_s", 0, "0.0"),
        ("matmul.tile_m", 128, "128"),
        ("matmul.tile_n", 128.0, "128"),
        ("matmul.small_tile_fraction", 1, "1.0"),
    ):
        assert repr(value(field, given)) == expected


def test_names_and_sources() -> None:
    assert number(1.0, "ampere", "ada").name == "ampere,ada memory.fraction"
    assert number(1.0, "*", source="fitted to 12 runs").is_fitted
    assert not number(1.0, "*", source="assumed: like what was fitted").is_fitted


def test_dotted_paths_are_nested() -> None:
    assert nested({"a": 1, "b.c": 2, "b.d.e": 3}) == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
