"""How far a measured time may lie from a predicted one."""

from __future__ import annotations

from shardwise.accuracy.case import Case
from shardwise.search import band_of as band_of_software

Band = tuple[float, float]
"""Factors of the predicted step time, low and high."""


def band_of(case: Case) -> Band:
    """The central 80 % prediction interval of the case's step time, multiplicative."""
    return band_of_software(case.problem.profile, case.problem.efficiency)
