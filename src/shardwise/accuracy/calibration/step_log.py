"""The log of `train --log` read back: what steps took, by the step time that their plan predicted."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping, printable, short_repr

_SECONDS = {"low": 1e-9, "high": 1e9}


def logged_times(text: str, *, file: str) -> Mapping[float, float]:
    """The median of the measured seconds of a step for each predicted time in `text`, the content of `file`;
    the first quarter of the steps, which warms up, does not count.

    A last line that a run was ended in is left out. ConfigError names the first line that is wrong.
    """
    lines = text.split("\n")
    whole, torn = lines[:-1], lines[-1]
    numbered = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if torn.strip().endswith("}"):
        numbered.append((len(lines), torn))
    records = [_record(line, number, file) for number, line in numbered]
    if not records:
        raise ConfigError("has no steps", file=printable(file), allowed="a log that train --log wrote")
    found: dict[float, list[float]] = {}
    for predicted_s, seconds in records[len(records) // 4 :]:
        found.setdefault(predicted_s, []).append(seconds)
    return {predicted_s: median(times) for predicted_s, times in found.items()}


def _record(line: str, number: int, file: str) -> tuple[float, float]:
    """Predicted and measured seconds of one line."""
    try:
        mapping = parse_mapping(line if line.lstrip().startswith("{") else "", file="line.json")
    except ConfigError as error:
        raise ConfigError(
            f"is not a JSON object: {error.message}", file=printable(file), key=f"line {number}",
            found=short_repr(line.strip()[:60]), allowed="a step a line",
        ) from None  # fmt: skip
    fields = Fields(mapping, file=file, key=f"line {number}")
    fields.integer("step", low=1)
    return fields.number("predicted_s", **_SECONDS), fields.number("step_time_s", **_SECONDS)
