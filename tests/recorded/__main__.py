"""Asks all of the net and records the answers anew: `python -m tests.recorded --record`."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

from tests.recorded.comparing import differences
from tests.recorded.files import CANDIDATES, KINDS, PLANS, file_of, read_lines, rounded, write_lines
from tests.recorded.product import answer_to, plan_said, with_price

SHOWN = 50
"""Differences of a file that are printed, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded")
    parser.add_argument("--record", action="store_true", help="write what is found, in place of what was")
    is_recording = parser.parse_args().record
    started_s, changed = perf_counter(), 0
    for kind in KINDS:
        found = {one["name"]: rounded(answer_to(one)) for one in read_lines(file_of("questions", kind))}
        changed += _kept(is_recording, "answers", kind, found)
    for kind in CANDIDATES:
        changed += _kept(is_recording, "candidates", kind, priced(kind))
    plans = {path.name: rounded(plan_said(path.name)) for path in sorted(PLANS.iterdir())}
    changed += _kept(is_recording, "answers", "plans", plans)
    word = "recorded" if is_recording else "found"
    sys.stdout.write(f"{changed} differences {word} in {perf_counter() - started_s:.0f} s\n")
    return 0 if is_recording else int(changed > 0)


def priced(kind: str) -> list[Any]:
    """All candidates of a kind with what they cost now."""
    cases: dict[str, Any] = read_lines(file_of("cases", kind))
    return [
        rounded(with_price(kind, cases[one["case"]], one)) for one in read_lines(file_of("candidates", kind))
    ]


def _kept(is_recording: bool, folder: str, name: str, found: Any) -> int:
    """Prints what is not as recorded, writes it where that is asked for, and returns how many differences
    there are."""
    path = file_of(folder, name)
    recorded = read_lines(path) if path.exists() else type(found)()
    changed = list(differences(found, recorded))
    for line in changed[:SHOWN]:
        sys.stdout.write(f"{folder}/{name}: {line}\n")
    if is_recording:
        write_lines(path, found)
    return len(changed)


if __name__ == "__main__":
    sys.exit(main())
