"""Rows judged together: groups, workloads, levels, and the limits that the published rows meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.accuracy.tables import file_of, rows_of, text_of

from shardwise.accuracy import SHIPPED, validate
from shardwise.accuracy.case import CaseBuilder
from shardwise.accuracy.rows import Fault, skipped_by_reason
from shardwise.accuracy.validate import JudgedRow, errors_of, judged, kendall_tau, workloads_of
from shardwise.cost import Problem
from shardwise.errors import ConfigError
from shardwise.search import StepFigures, step_figures_of
from shardwise.strategy import StrategyTable

FIVE = [{"step_time_s": str(time_s), "tp": tp, "dp": dp} for time_s, tp, dp in (
    (2.0, "1", "8"), (2.2, "2", "4"), (2.1, "4", "2"), (3.0, "8", "1"), (2.5, "1", "8"),
)]  # fmt: skip
"""Five plans of one workload; the first and the last are the same."""


def used(*changes: dict[str, str]) -> list[JudgedRow]:
    """The judged rows with these changes and predictions."""
    found, faults = judged(rows_of(*changes))
    assert faults == []
    return found


def test_a_judged_row_by_hand() -> None:
    (one,) = used({"step_time_s": "2.5", "peak_mem_gib": "10", "notes": "alloc"})
    assert one.error == pytest.approx(one.predicted_s / 2.5 - 1)
    assert one.memory_error == pytest.approx(one.predicted_bytes / (10 * 2**30) - 1)
    low, high = one.band
    assert 0.5 < low < 1 < high < 2
    (inside,) = used({"step_time_s": f"{one.predicted_s * high * 0.999}"})
    (outside,) = used({"step_time_s": f"{one.predicted_s * high * 1.001}"})
    (below,) = used({"step_time_s": f"{one.predicted_s * low * 0.999}"})
    assert (inside.is_in_band, outside.is_in_band, below.is_in_band) == (True, False, False)


def test_memory_is_judged_as_time_is() -> None:
    (one,) = used({"peak_mem_gib": "10", "notes": "alloc"})
    low, high = one.memory_band_bytes
    assert low < one.predicted_bytes < high
    # Predicted over measured, less one: 1 / 0.95 is +5.3 %, 1 / 1.05 is -4.8 %, 1 / 1.25 is -20 %.
    measured = [f"{one.predicted_bytes * factor / 2**30}" for factor in (0.95, 1.05, 1.25)]
    errors = errors_of(
        [
            row.memory_error or 0.0
            for row in used(*({"peak_mem_gib": gib, "notes": "alloc"} for gib in measured))
        ]
    )
    assert errors is not None
    assert errors.too_small == pytest.approx(1 / 3) and errors.worst == pytest.approx(0.2)
    assert errors.bias == pytest.approx((1 / 0.95 + 1 / 1.05 + 1 / 1.25) / 3 - 1)
    ends = [f"{end * 1.001 / 2**30}" for end in (low, high)]
    judged_ends = used(*({"peak_mem_gib": gib, "notes": "alloc"} for gib in ends))
    assert [row.is_in_memory_band for row in judged_ends] == [True, False]


def test_memory_alone_has_no_time_to_compare() -> None:
    (one,) = used({"step_time_s": "", "peak_mem_gib": "10"})
    assert (one.error, one.is_in_band) == (None, None) and one.memory_error is not None


def test_a_workload_is_the_same_work_in_five_ways() -> None:
    measured, predicted = [2.0, 2.2, 2.1, 3.0, 2.5], [1.5, 1.4, 1.6, 1.8, 1.4]
    rows = [replace(one, predicted_s=seconds) for one, seconds in zip(used(*FIVE), predicted, strict=True)]
    (workload,) = workloads_of(rows)
    # The second and the last have the best prediction, the last is the slower of them: 2.5 compared with 2.0.
    assert workload.regret == pytest.approx(0.25)
    assert (workload.chosen, workload.best) == (rows[4].row.id, rows[0].row.id)
    assert workload.kendall_tau == kendall_tau(measured, predicted)
    assert (workload.devices, workload.model, len(workload.rows)) == (16, "GPT-1.7B", 5)


def test_the_same_plan_is_predicted_the_same() -> None:
    rows = used(*FIVE)
    assert rows[0].predicted_s == rows[4].predicted_s
    assert len({one.predicted_s for one in rows}) == 4


@pytest.mark.parametrize(
    "column", ["id", "source", "hidden", "gpu", "seq_len", "global_batch", "dtype", "framework"]
)
def test_another_source_model_device_or_job_is_another_workload(column: str) -> None:
    other = {"id": "yours-001", "source": "yours", "hidden": "2400", "gpu": "A100-SXM4-80GB",
             "seq_len": "1024", "global_batch": "128", "dtype": "bf16",
             "framework": "Megatron-LM 2"}  # fmt: skip
    assert workloads_of(used(*FIVE[:4], {**FIVE[4], column: other[column]})) == ()
    assert len(workloads_of(used(*FIVE))) == 1
    # Other names of the same sizes and format are the same workload.
    same = {"model_name": "GPT 1.7 B", "dtype": "float16"}
    assert len(workloads_of(used(*FIVE[:4], {**FIVE[4], **same}))) == 1


def test_four_plans_are_too_few() -> None:
    assert workloads_of(used(*FIVE[:4])) == ()


def test_groups_have_their_rows_and_the_skipped_ones(tmp_path: Path) -> None:
    text = text_of(
        {"id": "a-1", "peak_mem_gib": "10"}, {"id": "b-1", "gpu": "H100"}, {"id": "a-2", "gpu": "Quantum9"},
        {"id": "a-3", "layers": "many"}, {"id": "c-1", "model_name": "LLAMA (LoRA)"},
    )  # fmt: skip
    path = file_of(tmp_path, text)
    found = validate(path, by="source")
    summary = [
        (group.name, 0 if group.time is None else group.time.n, group.skipped) for group in found.groups
    ]
    assert summary == [("a", 1, 2), ("b", 1, 0), ("c", 0, 1)]
    assert found.overall.time is not None and found.overall.memory is not None
    assert (found.overall.time.n, found.overall.memory.n, found.overall.skipped) == (2, 1, 3)
    assert [fault.line for fault in found.faults] == [4, 5, 6]
    assert found.overall.kendall_tau is None and found.overall.regret is None
    assert [group.name for group in validate(path, by="gpu").groups] == [
        "A100-80G", "H100-SXM", "Quantum9", "not read",
    ]  # fmt: skip
    assert [group.name for group in validate(path, by="family").groups] == ["gpt", "not read", "llama"]
    assert [group.name for group in validate(path, by="row").groups] == ["a-1", "b-1", "a-2", "a-3", "c-1"]


def test_a_level_selects_its_rows(tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of({"level": "near"}, {}, {"level": "", "recompute": ""}))
    lines = {
        level: [one.row.line for one in validate(path, level=level).judged]
        for level in ("all", "complete", "near")
    }
    assert lines == {"all": [2, 3, 4], "complete": [3], "near": [2, 4]}


@pytest.mark.parametrize("wrong", [{"by": "colour"}, {"level": "some"}])
def test_unknown_words_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is not one of the choices; found"):
        validate(str(SHIPPED), by=wrong.get("by", "row"), level=wrong.get("level", "all"))


def test_a_file_without_a_usable_row_is_still_an_answer(tmp_path: Path) -> None:
    found = validate(file_of(tmp_path, text_of({"gpu": "Quantum9"})))
    assert found.judged == () and len(found.faults) == 1
    assert found.overall.time is None and found.overall.band_coverage is None


def test_reasons_are_gathered() -> None:
    faults = [
        Fault(line=line, id="x", reason=reason, found=f"{line}")
        for line, reason in ((2, "a"), (3, "b"), (5, "b"), (4, "c"))
    ]
    summary = [(one.reason, one.lines, one.found) for one in skipped_by_reason(faults)]
    assert summary == [("b", (3, 5), "3"), ("a", (2,), "2"), ("c", (4,), "4")]


@pytest.fixture(scope="module")
def published() -> list[JudgedRow]:
    return list(validate(str(SHIPPED)).judged)


@pytest.mark.slow
def test_all_published_rows_are_used_but_lora(published: list[JudgedRow]) -> None:
    found = validate(str(SHIPPED))
    reasons = {one.reason: len(one.lines) for one in skipped_by_reason(found.faults)}
    assert reasons == {
        "model_name: LoRA is not modelled (only a part of the weights is trained)": 11,
    }
    assert len(published) == 885 - 11
    assert len(found.groups) == 13 and len(found.workloads) == 8


def test_complete_rows_assume_nothing_about_the_strategy(published: list[JudgedRow]) -> None:
    choices = ("micro_batch:", "recompute:")
    for one in published:
        if one.row.is_complete:
            assert not [line for line in one.assumed if line.startswith(choices)], one.row.id


@pytest.mark.slow
def test_computed_times_agree_with_given_ones() -> None:
    """For rows with a time and a rate, the rate gives that time by the stated convention."""
    rows = [one.row for one in validate(str(SHIPPED), level="complete").judged]
    both = [row for row in rows if row.step_time_s and row.mfu_pct and row.group == "foundry"]
    assert len(both) > 100
    without = [replace(row, step_time_s=None, tokens_per_s_per_gpu=None) for row in both]
    ratios = [
        (one.measured_s or 0.0) / (row.step_time_s or 1.0)
        for row, one in zip(both, judged(without)[0], strict=True)
    ]
    assert min(ratios) > 0.96 and max(ratios) < 1.02


def test_rows_are_judged_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows and faults in the same order, and how far it is after each part."""
    rows = rows_of(*FIVE, {"gpu": "Quantum9"}, *({**one, "gpus": "16"} for one in FIVE), {"tp": "3"})
    whole = judged(rows)
    monkeypatch.setitem(judged.__globals__, "ROWS_AT_A_TIME", 4)
    seen: list[str] = []
    assert judged(rows, progress=seen.append) == whole
    assert seen == ["4 of 12 rows", "8 of 12 rows", "12 of 12 rows"]


def test_rows_that_differ_in_their_outcomes_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured again, in two parts: 6 rows of 2 configurations; a case keeps its own row."""
    tables: list[int] = []

    def counted(problems: Sequence[Problem], given: Sequence[StrategyTable]) -> list[StepFigures]:
        tables.append(len(given))
        return step_figures_of(problems, given)

    monkeypatch.setattr("shardwise.accuracy.predict.step_figures_of", counted)
    monkeypatch.setitem(judged.__globals__, "ROWS_AT_A_TIME", 4)
    again = [{"step_time_s": f"{time_s}", "global_batch": batch}
             for time_s in (2, 3, 4) for batch in ("64", "128")]  # fmt: skip
    found = used(*again)
    assert tables == [2, 0]
    assert [one.measured_s for one in found] == [2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert [one.row.line for one in found] == [2, 3, 4, 5, 6, 7]
    assert found[0].predicted_s == found[4].predicted_s != found[1].predicted_s


def test_a_builder_begins_anew_where_it_keeps_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.accuracy.case.MAX_SHARED", 8)
    builder = CaseBuilder()
    for row in rows_of(*({"global_batch": f"{16 * many}"} for many in range(1, 9))):
        builder.of(row)
        assert len(builder._made) <= 8 + 6  # at most six parts of a case: itself and what it consists of
