"""When two numbers agree, and how a difference is reported."""

from __future__ import annotations

from shardwise_verify.checks import number_check, parts_check, same
from shardwise_verify.stages import ranges


def test_numbers_agree_to_1e_9_of_the_larger() -> None:
    assert same(1.0, 1.0 + 0.9e-9)
    assert not same(1.0, 1.0 + 1.1e-9)
    assert same(0.0, 0.0)
    assert not same(0.0, 1e-30)
    assert same(0.0, 0.9e-12, scale=1.0)
    assert not same(0.0, 1.1e-12, scale=1.0)
    assert not same(float("inf"), 1.0)


def test_a_wrong_number_is_reported_with_the_right_one() -> None:
    check = number_check("step time", 2.0, 3.0)
    assert (check.ok, check.found, check.expected) == (False, "2.0", "3.0")


def test_parts_are_compared_one_by_one_and_summed() -> None:
    right = {"a": 1.0, "b": 3.0}
    assert parts_check("parts", right, right, 4.0).ok
    # Two errors that cancel leave the sum right.
    assert not parts_check("parts", {"a": 2.0, "b": 2.0}, right, 4.0).ok
    assert parts_check("parts", {"a": 1.0}, right, 4.0).found.startswith("b missing")
    assert parts_check("parts", {**right, "c": 0.0}, right, 4.0).expected.startswith("c no such part")
    assert parts_check("parts", right, right, 5.0).found.startswith("sum 4.0")


def test_ranks_as_ranges() -> None:
    assert ranges([0, 1, 2, 8, 9, 16]) == "0-2,8-9,16"
