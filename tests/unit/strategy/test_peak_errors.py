"""The distribution of measured over predicted peak memory: its band, its probability, and whose it is."""

from __future__ import annotations

from dataclasses import asdict
from math import exp, log

import pytest

from shardwise.inputs import Fields
from shardwise.strategy import PROFILES, kind_of_profile, peak_errors, profile_from_record
from shardwise.strategy.peak_errors import ALL_SOFTWARE, LIKELY, PeakErrors

ERRORS = PeakErrors(kind="megatron", bias=0.02, spread=0.1, sources=4, rows=50)


def test_the_band_by_hand() -> None:
    """The quantiles 0.1 and 0.9 of the standard normal distribution are -1.28155 and 1.28155."""
    low, high = ERRORS.band_bytes(100.0)
    # 100 e^(0.02 - 0.128155) = 89.749, 100 e^(0.02 + 0.128155) = 115.969
    assert low == pytest.approx(89.749, abs=1e-3) and high == pytest.approx(115.969, abs=1e-3)


def test_the_probability_by_hand() -> None:
    # log(capacity / predicted) is bias + z spread; the normal distribution has 0.5 at z = 0, 0.841345 at 1,
    # 0.977250 at 2 and 0.022750 at -2.
    for quantile, share in ((0.0, 0.5), (1.0, 0.841345), (2.0, 0.977250), (-2.0, 0.022750)):
        capacity = 80.0 * exp(0.02 + 0.1 * quantile)
        assert ERRORS.fits_probability(80.0, capacity) == pytest.approx(share, abs=1e-6)
    exact = PeakErrors(kind="all", bias=0.0, spread=0.0, sources=1, rows=1)
    assert (exact.fits_probability(1.0, 1.0), exact.fits_probability(1.1, 1.0)) == (1.0, 0.0)
    assert (ERRORS.fits_probability(0.0, 1.0), ERRORS.fits_probability(1.0, 0.0)) == (1.0, 0.0)


def test_a_peak_is_likely_to_fit_where_its_band_ends_within_the_device() -> None:
    most = ERRORS.likely_bytes(80.0)
    assert ERRORS.band_bytes(most)[1] == pytest.approx(80.0)
    assert ERRORS.fits_probability(most, 80.0) == pytest.approx(LIKELY)
    assert log(80.0 / most) == pytest.approx(0.02 + 0.128155, abs=1e-6)


SHIPPED = {
    "software": {"root": "megatron", "other": "deepspeed"},
    "kinds": {
        "all": {"bias": 0.1, "spread": 0.2, "sources": 5, "rows": 50},
        "megatron": {"bias": 0.02, "spread": 0.1, "sources": 4, "rows": 40},
    },
}


def test_software_has_the_errors_of_its_kind_or_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_errors, "_data", lambda: SHIPPED)
    peak_errors._errors_of.cache_clear()
    found = peak_errors.peak_errors_of(["root", "child"])
    assert (found.kind, found.bias, found.is_shared) == ("megatron", 0.02, False)
    # The most specific name counts; deepspeed has no errors of its own, and a name of no kind neither.
    for lineage in (["root", "other"], ["nobody"], []):
        found = peak_errors.peak_errors_of(lineage)
        assert (found.kind, found.bias, found.is_shared) == (ALL_SOFTWARE, 0.1, True)
    assert peak_errors.kind_of_software(["root", "other", "child"]) == "deepspeed"
    peak_errors._errors_of.cache_clear()


def test_the_kinds_of_shipped_software() -> None:
    """They follow from what the software is like."""
    assert {name: kind_of_profile(name) for name in ("megatron-lm-0.19", "fsdp2-eager", "megatron-2021")} == {
        "megatron-lm-0.19": "megatron", "fsdp2-eager": "fsdp", "megatron-2021": "megatron",
    }  # fmt: skip
    # These are "like" fsdp2 and megatron-2021, and have kinds of their own.
    assert [kind_of_profile(name) for name in ("deepspeed-0.19", "oneflow")] == ["deepspeed", "oneflow"]
    for name, profile in PROFILES.items():
        errors = profile.peak_errors
        assert errors.kind in (kind_of_profile(name), ALL_SOFTWARE)
        assert errors.is_shared == (errors.kind == ALL_SOFTWARE)
        assert errors.rows >= errors.sources >= 2 and 0.0 < errors.spread < 0.5


def test_a_record_without_errors_has_those_of_its_software() -> None:
    """Files of before the errors were known."""
    record = asdict(PROFILES["megatron-2024"])
    del record["peak_errors"]
    assert profile_from_record(Fields(dict(record))) == PROFILES["megatron-2024"]
    other = profile_from_record(Fields({**record, "name": "some other"}))
    assert other.peak_errors == peak_errors.peak_errors_of(())
    changed = {**record, "peak_errors": {**asdict(ERRORS), "bias": 0.03}}
    assert profile_from_record(Fields(changed)).peak_errors.bias == 0.03
