"""The record of a fit: digits, bands and counts; and the shipped numbers are those of a fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.accuracy.runs import measured_runs, numbers_by_hand, published, some, validated
from tests.unit.accuracy.tables import rows_of

from shardwise.accuracy import SHIPPED, fit_document, fit_rows, read_rows
from shardwise.accuracy.cross_validation import (
    DIGITS,
    LEAST_RUNS,
    FitResult,
    Spread,
    bands_of,
    factors,
    is_warm,
    linear_errors,
    rounded,
    sources_of,
    spread_of,
)
from shardwise.accuracy.fit import Fit, Numbers, initial_value, linearised, predicted_log_s
from shardwise.errors import ConfigError
from shardwise.numbers import numbers_of
from shardwise.strategy import PROFILES

PACKAGE = SHIPPED.parents[2]
DATA = {
    "devices": PACKAGE / "cluster" / "data" / "efficiency.json",
    "software": PACKAGE / "strategy" / "data" / "profiles.json",
}


def data(section: str) -> Any:
    return json.loads(DATA[section].read_text("utf-8"))


def shipped_records() -> list[dict[str, Any]]:
    return [number for section in DATA for number in data(section)["numbers"]]


def plain_rows(count: int, **change: str) -> list[dict[str, str]]:
    """Changes that make plain rows with different measurements."""
    return [{"step_time_s": f"{2.0 + 0.1 * number}", **change} for number in range(count)]


def test_factors_by_hand() -> None:
    # Predictions are 0.1 too high in the median, and most are within 0.2 of that: measured over predicted is
    # exp(-0.3) to exp(0.1).
    assert factors(Spread(0.1, 0.2)) == (0.741, 1.11)
    assert factors(Spread(0.0, 0.0)) == (1.0, 1.0)
    low, high = factors(Spread(-0.2, 0.3))
    assert low == pytest.approx(math.exp(-0.1), rel=1e-2) and high == pytest.approx(math.exp(0.5), rel=1e-2)


def test_runs_on_unequal_devices_are_not_fitted() -> None:
    unequal = {"gpu": "V100(12)+T4(4)", "gpus_per_node": "4", "micro_batch": "1", "recompute": "none"}
    small = {"hidden": "1024", "heads": "16", "ffn": "4096", "step_time_s": "2.5"}
    with pytest.raises(ConfigError, match="too few runs to fit"):
        fit_rows(rows_of(*[{**unequal, **small}] * (LEAST_RUNS + 1)))


def test_files_hold_four_digits() -> None:
    numbers = numbers_by_hand(ampere__matmul_of_peak_fraction=0.123456, all__launch_s=7.96555e-06)
    assert DIGITS == 4
    assert list(rounded(numbers).fitted().values()) == [0.1235, 7.966e-06]
    assert rounded(rounded(numbers)) == rounded(numbers) != numbers
    # Assumed numbers stay as they were written.
    shipped = Numbers.shipped()
    changed = rounded(
        shipped.with_values({name: value * 1.0123456 for name, value in shipped.fitted().items()})
    )
    for before, after in zip(shipped.all, changed.all, strict=True):
        assert (before.value == after.value) != before.is_fitted, before.name


def test_fewer_than_one_number_for_ten_rows() -> None:
    """Every number of both lists counts that rows may decide, assumed ones too, and each end of the bands;
    but not sizes in the code of the software, what others measured, and halves of other numbers."""
    bands = data("software")["bands"]
    numbers = len(shipped_records()) + sum(len(band) for band in bands.values())
    assert numbers == len(Numbers.shipped().all) + 4
    of_code = [one for one in shipped_records() if ".py" in one["source"]]
    measured = [one for one in shipped_records() if "measure" in one["source"].partition(":")[0]]
    halves = [
        one for one in shipped_records() if one["source"].startswith("assumed: half of FlashAttention-2")
    ]
    for one in halves:
        field = one["field"].replace("efficient", "flash-2")
        assert 2 * one["value"] in [
            pytest.approx(other["value"], abs=3e-4) for other in shipped_records() if other["field"] == field
        ]
    overall = validated().overall
    assert overall.time is not None
    assert numbers - len(of_code) - len(measured) - len(halves) < overall.time.n / 10
    # The two files have no other number: the rest are words, booleans and lists of them.
    assert set(data("devices")) == {"numbers"}
    assert set(data("software")) == {"software", "bands", "numbers"}
    for number in shipped_records():
        assert set(number) == {"of", "field", "value", "source"}
        assert isinstance(number["value"], int | float)
    for software in data("software")["software"].values():
        for value in software.values():
            parts = value if isinstance(value, list) else [value]
            assert all(isinstance(part, str | bool) or part in (0, 1, 2, 3) for part in parts)


def test_every_number_has_a_source() -> None:
    for number in shipped_records():
        source = number["source"]
        # Fitted, from a document, or an assumption with its reason.
        assert source == "fitted" or len(source) > len("assumed: ") + 5, number
        assert not source.startswith("assumed:") or source.removeprefix("assumed:").strip(), number
        assert not source.startswith("fitted") or source == "fitted", number
    assert numbers_of(shipped_records()) == Numbers.shipped().all
    for profile in PROFILES.values():
        assert all(profile.provenance.values())


def test_fitted_numbers_have_the_digits_of_a_fit() -> None:
    shipped = Numbers.shipped()
    assert rounded(shipped) == shipped
    for band in data("software")["bands"].values():
        assert [float(f"{end:.3g}") for end in band] == band
        assert band[0] < 1 < band[1]
    # No number still has the initial value of a fit.
    fitted = [number for number in shipped_records() if number["source"] == "fitted"]
    assert len(fitted) == len(shipped.fitted())
    started = [number for number in fitted if number["value"] == initial_value(number["field"])]
    assert len(started) < len(fitted) / 10


def test_a_number_is_for_more_than_one_model_or_row() -> None:
    """Fitted numbers are for an architecture, a kind of software, or all; never for a model or a source."""
    models = {row.model_name for row in read_rows(str(SHIPPED))[0]}
    architectures = {
        record["architecture"]
        for record in json.loads((PACKAGE / "cluster" / "data" / "devices.json").read_text("utf-8"))[
            "devices"
        ].values()
    }
    for section, known in (("devices", architectures), ("software", set(PROFILES))):
        for number in data(section)["numbers"]:
            if number["source"] == "fitted":
                assert set(number["of"]) <= known | {"*"}, number
                assert not set(number["of"]) & models


def short_fit() -> Fit:
    numbers = Numbers.shipped()
    cases = [*some(6, "vtrain-mn"), *some(6, "vtrain-sn"), *some(5, "dlperf-gpt"), *some(5, "korthi")]
    runs = measured_runs(cases, numbers)
    return Fit(numbers=numbers, runs=runs, linear=linearised(runs, numbers))


@pytest.mark.usefixtures("fitted_a100")
def test_bands_are_of_sources_left_out_one_by_one() -> None:
    fit = short_fit()
    names = sources_of(fit.runs)
    warm: dict[str, Any] = {}
    cold: dict[str, Any] = {}
    for source in ("vtrain-mn", "vtrain-sn", "dlperf-gpt", "korthi"):
        errors = linear_errors(fit, {source})[names == source]
        (cold, warm)[bool(is_warm(fit.runs, {source})[names == source].all())][source] = errors
    assert set(warm) == {"vtrain-mn", "vtrain-sn"} and set(cold) == {"dlperf-gpt", "korthi"}
    bands = bands_of(fit)
    assert bands == {"warm": factors(spread_of(warm)), "cold": factors(spread_of(cold))}
    inside = linear_errors(fit, {"korthi"})[names == "korthi"]
    assert bands["cold"][0] < np.exp(-np.median(inside)) < bands["cold"][1]


def test_one_source_alone_has_the_band_of_a_cold_one() -> None:
    numbers = Numbers.shipped()
    runs = measured_runs(published("korthi"), numbers)
    bands = bands_of(Fit(numbers=numbers, runs=runs, linear=linearised(runs, numbers)))
    assert bands["warm"] == bands["cold"]
    assert 0 < bands["warm"][0] < bands["warm"][1]


def test_the_document_counts_and_compares() -> None:
    fit = short_fit()
    document: Any = fit_document(FitResult(fit=fit, faults=()))
    assert (document["schema"], document["version"]) == ("shardwise.fit", 1)
    assert document["runs"] == len(fit.runs) == 22
    assert document["free_numbers"] == len(shipped_records()) + 4
    assert document["fitted_numbers"] == sum(r["source"] == "fitted" for r in shipped_records())
    errors: dict[str, list[float]] = {}
    for run, log_s in zip(fit.runs, fit.linear.log_s, strict=True):
        errors.setdefault(run.case.row.group, []).append(math.exp(log_s) / run.measured_s - 1)
    assert list(document["sources"]) == list(errors)
    for source, own in errors.items():
        assert document["sources"][source] == {
            "runs": len(own),
            "mape": pytest.approx(sum(map(abs, own)) / len(own)),
            "bias": pytest.approx(sum(own) / len(own)),
        }
    assert numbers_of([*document["devices"], *document["software"]]) == fit.numbers.all
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_rows_that_cannot_be_fitted_are_listed() -> None:
    rows = rows_of(
        *plain_rows(LEAST_RUNS),
        {"gpu": "Quantum9"},
        {"step_time_s": "", "peak_mem_gib": "10"},
        {"step_time_s": ""},
    )
    found = fit_rows(rows, rounds=1, steps=1)
    assert len(found.fit.runs) == LEAST_RUNS
    texts = {fault.line: fault.text for fault in found.faults}
    assert set(texts) == {22, 23, 24}
    assert texts[22] == "line 22: gpu: is not a known device; found 'Quantum9'"
    assert texts[23] == "line 23: gives no step time"
    assert all(text.count("line ") == 1 for text in texts.values())
    # Numbers are written with the digits that are counted.
    assert rounded(found.fit.numbers) == found.fit.numbers != Numbers.shipped()


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        fit_rows(rows_of(*plain_rows(LEAST_RUNS - 1), {"gpu": "Quantum9"}))
    assert caught.value.message == "has too few runs to fit"
    assert caught.value.found == f"{LEAST_RUNS - 1} with a measured time that can be predicted"
    assert caught.value.allowed == f"{LEAST_RUNS} or more"


@pytest.mark.slow
def test_a_fit_from_scratch_gives_the_shipped_numbers(full: bool) -> None:
    """`--full`: a fit of all published rows gives the numbers and bands of both files within 2 %. Otherwise a
    fit from scratch of two sources, with times that the shipped numbers predict, gives the same
    predictions within 1 % in the mean.
    """
    shipped = Numbers.shipped()
    rows = read_rows(str(SHIPPED))[0]
    if full:
        document: Any = fit_document(fit_rows(rows))
        for record, number in zip((*document["devices"], *document["software"]), shipped.all, strict=True):
            assert record["value"] == pytest.approx(number.value, rel=0.02), number.name
        for name, band in data("software")["bands"].items():
            assert document["bands"][name] == pytest.approx(band, rel=0.02)
        return
    predicted_by_id = {one.row.id: one.predicted_s for one in validated().judged}
    made = [
        replace(row, step_time_s=predicted_by_id[row.id]) for row in rows if row.group in ("korthi", "tpu")
    ]
    found = fit_rows(made, rounds=1)
    assert len(found.fit.runs) == len(made) == 23 and found.faults == ()
    refitted = np.exp(predicted_log_s(found.fit.runs, found.fit.numbers))
    errors = np.abs(refitted / np.array([row.step_time_s for row in made]) - 1)
    assert errors.mean() < 0.01 and errors.max() < 0.05
    short_fit = np.exp(predicted_log_s(found.fit.runs, shipped.from_scratch()))
    assert np.abs(short_fit / refitted - 1).mean() > 0.05
