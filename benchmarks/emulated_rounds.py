"""Number and times of the calibration rounds between steps of plans (`benchmarks.emulated`)."""

ROUNDS = 5
"""Calibration rounds per epoch, spread evenly between the steps of the plans."""

STEPS_A_ROUND = 2
"""How often a round measures the steps of small plans. They depend more than kernels and links on the speed
of the machine, which changes within minutes."""


def measurements_after(place: int, places: int, measurements: int) -> range:
    """Indices of the measurements, of all those of ROUNDS, that follow position `place` of `places`; evenly
    spread."""
    total = ROUNDS * measurements
    return range(place * total // places, (place + 1) * total // places)
