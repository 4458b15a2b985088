"""Left-out sources: their measured times do not affect their predictions, warm and cold; and the bands from
them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from benchmarks.accuracy import left_out, nested_spreads
from tests.sampling import sample_of
from tests.unit.accuracy.runs import Floats, measured_runs, some
from tests.unit.accuracy.tables import rows_of

from shardwise.accuracy.case import cases_of
from shardwise.accuracy.cross_validation import (
    CENTRAL,
    Spread,
    _quantile,
    bands_of,
    is_warm,
    linear_errors,
    sources_of,
    spread_of,
)
from shardwise.accuracy.fit import Fit, MeasuredRun, Numbers, linearised, source_weights


@cache
def fit() -> Fit:
    """A fit with few rounds: runs of four sources, two of them with one software on one device."""
    numbers = Numbers.shipped()
    cases = [*some(8, "vtrain-mn"), *some(8, "vtrain-sn"), *some(6, "dlperf-gpt"), *some(6, "korthi")]
    runs = measured_runs(cases, numbers)
    return Fit(numbers=numbers, runs=runs, linear=linearised(runs, numbers))


def with_times(of: Fit, source: str, factor: float) -> Fit:
    """The same with the measured times of one source multiplied by a factor."""
    runs = tuple(
        replace(run, measured_s=run.measured_s * factor) if run.case.row.group == source else run
        for run in of.runs
    )
    return replace(of, runs=runs)


def logs(runs: Sequence[MeasuredRun]) -> Floats:
    return np.log([run.measured_s for run in runs])


@pytest.mark.slow
@pytest.mark.parametrize("source", sample_of(["vtrain-sn", "dlperf-gpt"], ["dlperf-gpt"]))
def test_the_prediction_of_a_source_does_not_depend_on_its_measurements(source: str) -> None:
    plain, changed = fit(), with_times(fit(), source, 3.0)
    one, other = left_out(plain, source), left_out(changed, source)
    assert one.source == source
    assert one.rows.tolist() == np.flatnonzero(sources_of(plain.runs) == source).tolist()
    measured = logs(plain.runs)[one.rows]
    assert other.log_error + math.log(3.0) == pytest.approx(one.log_error, abs=1e-12)
    # Every row is predicted again, not with the numbers of the whole fit.
    predicted = one.log_error + measured
    assert np.abs(predicted - plain.linear.log_s[one.rows]).max() > 1e-3
    # The times of another source do affect it.
    shifted = left_out(with_times(plain, "vtrain-mn", 1.3), source)
    assert np.abs(shifted.log_error - one.log_error).max() > 1e-3


def test_linear_errors_without_sources() -> None:
    plain = fit()
    names = sources_of(plain.runs)
    out = {"dlperf-gpt", "korthi"}
    without = linear_errors(plain, out)
    for source in out:
        changed = linear_errors(with_times(plain, source, 3.0), out)
        own = names == source
        assert changed[own] + math.log(3.0) == pytest.approx(without[own], abs=1e-12)
        assert changed[~own] == pytest.approx(without[~own], abs=1e-12)
    other_errors = linear_errors(with_times(plain, "vtrain-mn", 1.3), out)
    assert np.abs(other_errors - without)[names == "vtrain-sn"].max() > 1e-3
    # With nothing left out, runs are explained better than by the short fit.
    weights, begun = source_weights(plain.runs), plain.linear.log_s - logs(plain.runs)
    assert weights @ np.abs(linear_errors(plain, ())) < weights @ np.abs(begun)


def test_a_source_is_warm_where_others_have_its_device_and_its_software() -> None:
    kinds: tuple[tuple[str, dict[str, str]], ...] = (
        ("a", {}),
        ("b", {}),
        ("b", {"gpu": "V100-SXM2-16GB"}),
        ("c", {"gpu": "V100-SXM2-16GB", "framework": "OneFlow"}),
        ("d", {"framework": "OneFlow"}),
        ("e", {"gpu": "A100-40GB"}),
    )
    rows = rows_of(*({"id": f"{name}-{n:03}", **change} for n, (name, change) in enumerate(kinds)))
    runs = [MeasuredRun(case=case, strategy=0, measured_s=1.0) for case in cases_of(rows)[0]]
    assert len(runs) == len(kinds)

    def warm(*excluded: str) -> str:
        return "".join("x" if one else "-" for one in is_warm(runs, excluded))

    assert warm() == "xxxxxx"
    # Device and software may come from different sources: OneFlow from d, V100 from b.
    assert warm("c") == "xxxxxx"
    # Without b and c no source has a V100.
    assert warm("b", "c") == "xx--xx"
    # Without c and d no source has OneFlow.
    assert warm("c", "d") == "xxx--x"
    # A100s of both memories are one kind: e's keeps the others warm.
    assert warm("a", "b", "d") == "xxxxxx"
    # Without a, b and e no source has Megatron-LM; d still has an A100.
    assert warm("a", "b", "e") == "---xx-"
    assert warm("a", "b", "c", "d", "e") == "------"


def test_quantiles_by_hand() -> None:
    values, equal = np.array([5.0, 1.0, 3.0, 2.0, 4.0]), np.ones(5)
    # Each value adds one fifth.
    assert [_quantile(values, equal, share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)] == [1, 2, 3, 4, 5]
    # The value 5 has half of the weight: every quantile beyond the median is 5.
    assert _quantile(values, np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 0.45) == 4.0
    assert _quantile(values, np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 0.55) == 5.0
    # Only relative weights count.
    assert _quantile(values, 7.0 * equal, 0.5) == 3.0


def test_sources_have_the_same_weight_at_any_size() -> None:
    # 98 good runs of one source, and two of another that are 0.5 off: half of all sources are like the
    # second.
    large, small = np.linspace(-0.01, 0.01, 98), np.array([0.5, 0.5])
    spread = spread_of({"large": large, "small": small})
    assert spread.middle == pytest.approx(0.01)
    assert spread.half == pytest.approx(0.49)
    # With equal weights for all runs, the small source would not count.
    concatenated = spread_of({"one": np.concatenate([large, small])})
    assert concatenated.half < 0.01
    # The same errors twice change nothing.
    repeated = spread_of({"large": np.repeat(large, 3), "small": small})
    assert repeated.middle == pytest.approx(spread.middle) and repeated.half == pytest.approx(spread.half)


def test_a_spread_covers_the_central_share() -> None:
    # 1 to 10 hundredths: the median is 0.05; distances 0 1 1 2 2 3 3 4 4 5, of which eight are at most 0.04.
    spread = spread_of({"one": np.arange(1, 11) / 100})
    assert CENTRAL == 0.8 and spread.middle == pytest.approx(0.05)
    assert spread.half == pytest.approx(0.04)
    rng = np.random.default_rng(4)
    errors = {str(n): rng.normal(rng.normal(0.0, 0.1), 0.05, 20 + 40 * n) for n in range(30)}
    spread = spread_of(errors)
    inside = [np.mean(np.abs(part - spread.middle) <= spread.half) for part in errors.values()]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.005)
    # Unseen sources of the same kind are covered equally; bands from errors within sources would not cover
    # them.
    unseen = [rng.normal(rng.normal(0.0, 0.1), 0.05, 50) for _ in range(400)]
    assert 0.7 < np.mean([np.mean(np.abs(part - spread.middle) <= spread.half) for part in unseen]) < 0.9
    within = spread_of({name: part - np.median(part) for name, part in errors.items()})
    assert np.mean([np.mean(np.abs(part - within.middle) <= within.half) for part in unseen]) < 0.6


def test_nested_bands_know_nothing_of_the_source() -> None:
    plain = fit()
    spreads = nested_spreads(plain, "korthi")
    assert nested_spreads(with_times(plain, "korthi", 3.0), "korthi") == spreads
    # The two with one software on one device are warm through each other; V100 is cold.
    assert set(spreads) == {True, False}
    changed = nested_spreads(with_times(plain, "vtrain-sn", 1.3), "korthi")
    assert changed != spreads
    # The cold spread is that of the only cold source, with both left out.
    errors = linear_errors(plain, {"korthi", "dlperf-gpt"})[sources_of(plain.runs) == "dlperf-gpt"]
    assert spreads[False] == spread_of({"dlperf-gpt": errors})
    assert spreads[False].half > 0 and isinstance(spreads[True], Spread)


def test_nested_bands_where_all_are_cold() -> None:
    assert set(nested_spreads(fit(), "vtrain-mn")) == {False}


def test_of_many_sources_several_are_left_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sources in two parts: the first with the third, the second with the fourth."""
    plain, left = fit(), []
    monkeypatch.setattr("shardwise.accuracy.cross_validation.MAX_FOLDS", 2)

    def noted(of: Fit, excluded: Collection[str]) -> Floats:
        left.append(list(excluded))
        return linear_errors(of, excluded)

    monkeypatch.setattr("shardwise.accuracy.cross_validation.linear_errors", noted)
    bands = bands_of(plain)
    first, second, third, fourth = dict.fromkeys(sources_of(plain.runs).tolist())
    assert left == [[first, third], [second, fourth]]
    assert all(low < high for low, high in bands.values())
