"""Bands of peak memory from sources that are left out, and the fit of what is outside of tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log, sqrt

import pytest
from benchmarks.memory import (
    DATA,
    KNOWN,
    LEAST_SOURCES,
    PAGE,
    bands,
    covered,
    errors_of,
    fitted,
    left_out,
    rewritten,
    source_table,
    summary,
    written,
)
from benchmarks.memory_rows import (
    ALLOCATED,
    DEVICE,
    OWN,
    PeakRow,
    outcome_rows,
    peak_rows,
    records,
    skipped_peaks,
)

from shardwise.accuracy import SHIPPED, read_rows
from shardwise.strategy.peak_errors import ALL_SOFTWARE

ROW = PeakRow(
    source="a", name="a run", software="megatron-2024", device="H100-SXM", kind=DEVICE, measured=50e9,
    allocated=40e9, opened=3.0, ratio=0.04, communicator=1e8, context=7e8,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[PeakRow]:
    return peak_rows()


def rows_of(ratios: dict[str, list[float]], software: str = "megatron-2024") -> list[PeakRow]:
    """Rows of sources with these logarithms of measured over predicted peaks."""
    return [
        replace(ROW, kind=ALLOCATED, source=source, software=software, measured=40e9 * exp(value))
        for source, values in ratios.items()
        for value in values
    ]


def test_a_device_counts_what_is_outside_of_tensors() -> None:
    # 40 * 1.04 + 3 * 0.1 + 0.7 = 42.6 GB
    assert ROW.predicted == pytest.approx(42.6e9)
    assert replace(ROW, kind="reserved").predicted == pytest.approx(41.6e9)
    assert replace(ROW, kind="allocated").predicted == 40e9
    assert ROW.log_ratio == pytest.approx(log(50 / 42.6))


def test_the_errors_of_sources_by_hand() -> None:
    """Two sources: one with means 0.1 and values 0.1 off, one with a single value of -0.1."""
    found = errors_of("megatron", {"a": [0.0, 0.2], "b": [-0.1]})
    # Means 0.1 and -0.1: bias 0, variance 0.02 between them, times 1 + 1/2; within 0.01 and 0, 0.005 in mean.
    assert found.bias == pytest.approx(0.0)
    assert found.spread == pytest.approx(sqrt(0.02 * 1.5 + 0.005))
    assert (found.kind, found.sources, found.rows) == ("megatron", 2, 3)
    # A source counts once, however many rows it has.
    again = errors_of("megatron", {"a": [0.0, 0.2] * 50, "b": [-0.1]})
    assert again.bias == pytest.approx(found.bias) and again.spread == pytest.approx(found.spread)


def test_kinds_with_few_sources_share_the_errors_of_all() -> None:
    of_megatron = rows_of({f"m{place}": [0.01 * place] for place in range(LEAST_SOURCES)})
    of_deepspeed = rows_of({f"d{place}": [0.2] for place in range(LEAST_SOURCES - 1)}, "deepspeed")
    known = [replace(row, is_informed=True) for row in rows_of({"k": [5.0]}, "fsdp2")]
    of_driver = [replace(row, kind=DEVICE) for row in rows_of({"s": [5.0]}, "fsdp2")]
    found = bands([*of_megatron, *of_deepspeed, *known, *of_driver])
    assert list(found) == [ALL_SOFTWARE, "megatron"]
    assert found["megatron"].bias == pytest.approx(0.015)
    # Rows that formulas knew are no source, nor are those of the driver: they would make the mean 1.2.
    assert found[ALL_SOFTWARE].bias == pytest.approx((0.0 + 0.01 + 0.02 + 0.03 + 3 * 0.2) / 7)


def test_a_band_covers_a_source_that_it_does_not_know() -> None:
    """Nine like sources and one far off: each of the nine is in the band of the others, the tenth is not."""
    rows = rows_of({**{f"s{place}": [0.01 * place] for place in range(9)}, "far": [3.0]})
    inside, below = covered(rows)
    assert inside == pytest.approx(0.9) and below == pytest.approx(0.9)


def test_numbers_that_rows_determine_are_found_again() -> None:
    """Rows made with a ratio of 0.1: many sources move it there, one hardly, none not."""
    made = [
        replace(row, source=f"s{place}", kind="reserved", measured=44e9)
        for place, row in enumerate([ROW] * 400)
    ]
    assert fitted(made).ratio == pytest.approx(0.1, abs=0.01)
    assert KNOWN.ratio < fitted(made[:1]).ratio < 0.05
    assert fitted([replace(ROW, kind="allocated")]) == KNOWN


def test_a_row_is_predicted_without_its_group() -> None:
    rows = [replace(ROW, source="a", measured=80e9), replace(ROW, source="b", measured=42.6e9)]
    first, second = left_out(rows, lambda row: row.source)
    # Source b agrees with the known numbers, so that without a they stay; without b, source a raises them.
    assert first.predicted == pytest.approx(ROW.predicted, rel=1e-6)
    assert second.predicted > ROW.predicted * 1.005


def test_a_summary_by_hand() -> None:
    found = summary(rows_of({"a": [log(1 / 0.8), log(1 / 1.1)]}))
    # Predicted over measured: 0.8 and 1.1, so errors of -20 and +10 %.
    assert found.error == pytest.approx(0.15) and found.bias == pytest.approx(-0.05)
    assert found.too_small == 0.5


def test_every_row_with_a_peak_is_used(rows: list[PeakRow]) -> None:
    measured, _ = read_rows(str(SHIPPED))
    names = {row.id for row in measured if row.peak_mem_gib is not None}
    names |= {one["name"] for one in records() if one["peak_gib"] is not None and not one["unsaid"]}
    assert skipped_peaks() == {}
    assert {row.name for row in rows if row.source != OWN} == names
    assert all(one["source"] for one in records())


def test_the_shipped_errors_are_those_of_the_rows(rows: list[PeakRow]) -> None:
    """Loosely, since the cost model changes: `python -m benchmarks.memory --write` makes them anew."""
    shipped = json.loads(DATA.read_text("utf-8"))
    made = bands(left_out(rows, lambda row: row.source))
    assert list(shipped["kinds"]) == list(made)
    for kind, errors in made.items():
        assert shipped["kinds"][kind]["sources"] == errors.sources
        assert shipped["kinds"][kind]["bias"] == pytest.approx(errors.bias, abs=0.05)
        assert shipped["kinds"][kind]["spread"] == pytest.approx(errors.spread, abs=0.05)
    assert json.loads(written(made, shipped["software"])).keys() == shipped.keys()


def test_tables_replace_those_of_the_page() -> None:
    page = "text\n<!-- benchmarks.memory: bands -->\n\n| a |\n|---|\n| old |\n\nmore text\n"
    found = rewritten(page, {"bands": "| a |\n|---|\n| new |\n| two |"})
    assert found == page.replace("| old |", "| new |\n| two |")
    assert rewritten(found, {"bands": "| a |\n|---|\n| old |"}) == page
    with pytest.raises(ValueError, match="outcomes"):
        rewritten(page, {"outcomes": ""})
    whole = PAGE.read_text("utf-8")
    names = ("counted", "left out", "bands", "sources", "outcomes")
    changed = rewritten(whole, {name: f"| the table {name} |" for name in names})
    assert [changed.count(f"| the table {name} |") for name in names] == [1, 1, 1, 1, 1]


def test_what_is_known_of_fitting_is_judged() -> None:
    found = list(outcome_rows())
    assert {row.fits for row in found} == {True, False}
    assert sum(row.is_right for row in found) >= 0.7 * len(found)
    one = next(row for row in found if row.group == "qwen3-14b-report")
    assert one.says_fits and one.is_right and not replace(one, fits=False).is_right
    assert not replace(one, likely=0.4).says_fits and not replace(one, illegal="a rule").says_fits
    # Out of memory in 30 to 60 % of runs.
    some = next(row for row in found if row.name == "Llama 3.1 70B fp8, pp 4, vpp 5")
    assert some.failed == (0.3, 0.6) and some.is_right
    assert not replace(some, likely=0.8).is_right and not replace(some, likely=0.3).is_right


def test_sources_of_each_kind_of_software() -> None:
    rows = [*rows_of({"a": [0.1, 0.2], "b": [0.0]}), replace(ROW, source="c", software="deepspeed")]
    assert source_table(rows).split("\n")[2:] == [
        "| deepspeed | 1 | 1 | 0 | 0 | that of all software |",
        "| megatron | 2 | 3 | 2 | 3 | that of all software |",
    ]
