"""Rounds of a calibration between steps of plans (`benchmarks.emulated`): how many, and when."""

ROUNDS = 5
"""Of all pieces of a calibration, spread over the turns of an epoch."""

STEPS_A_ROUND = 2
"""How often a round has the steps of small plans: they follow the pace of the machine, which changes within
minutes, and kernels and links less so."""


def measurements_after(place: int, places: int, measurements: int) -> range:
    """The pieces, of all those of `ROUNDS`, that follow one of so many `places`: at even distances."""
    total = ROUNDS * measurements
    return range(place * total // places, (place + 1) * total // places)
