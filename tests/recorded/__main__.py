"""Answers all recorded questions again: `python -m tests.recorded` prints the differences, `--record` accepts
them.

    python -m tests.recorded --only "uniform: a node"

answers one question, by its name in the tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from tests.recorded.comparing import differences, settled
from tests.recorded.files import CANDIDATES, KINDS, PLANS, file_of, read_lines, rounded, write_lines
from tests.recorded.product import answer_to, plan_content, with_price

SHOWN = 50
"""Most differences of a file that are printed."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded")
    parser.add_argument("--record", action="store_true", help="replace the recorded answers")
    parser.add_argument("--only", action="append", help="answer this question only; repeatable")
    given = parser.parse_args(words)
    if given.record and given.only:
        parser.error("--record writes all answers; --only asks some")
    started_s = perf_counter()
    changed = _some(given.only) if given.only else _all(is_recording=given.record)
    word = "recorded" if given.record else "found"
    sys.stdout.write(f"{changed} differences {word} in {perf_counter() - started_s:.0f} s\n")
    return 0 if given.record else int(changed > 0)


def questions() -> dict[str, dict[str, Any]]:
    """All questions by kind and name."""
    return {f"{kind}: {one['name']}": one for kind in KINDS for one in read_lines(file_of("questions", kind))}


def answers() -> dict[str, Any]:
    """The recorded answers, by the same names."""
    return {
        f"{kind}: {name}": answer
        for kind in KINDS
        for name, answer in read_lines(file_of("answers", kind)).items()
    }


def _some(names: Sequence[str]) -> int:
    """The number of differences in the answers to these questions."""
    asked, recorded = questions(), answers()
    return sum(
        _printed(name, settled(rounded(answer_to(asked[name])), recorded[name]), recorded[name])
        for name in names
    )


def _all(*, is_recording: bool) -> int:
    """The number of all differences."""
    changed, recorded = 0, answers()
    for kind in KINDS:
        found = {one["name"]: rounded(answer_to(one)) for one in read_lines(file_of("questions", kind))}
        if not is_recording:
            found = {
                name: settled(answer, recorded.get(f"{kind}: {name}", {})) for name, answer in found.items()
            }
        changed += _compared("answers", kind, found, is_recording=is_recording)
    for kind in CANDIDATES:
        changed += _compared("candidates", kind, _priced(kind), is_recording=is_recording)
    said = {path.name: rounded(plan_content(path.name)) for path in sorted(PLANS.iterdir())}
    return changed + _compared("answers", "plans", said, is_recording=is_recording)


def _priced(kind: str) -> list[Any]:
    """All candidates of a kind with their present estimates."""
    cases: dict[str, Any] = read_lines(file_of("cases", kind))
    return [
        rounded(with_price(kind, cases[one["case"]], one)) for one in read_lines(file_of("candidates", kind))
    ]


def _compared(folder: str, name: str, found: Any, *, is_recording: bool) -> int:
    """The number of differences in a file, which is written again when recording."""
    path = file_of(folder, name)
    recorded = read_lines(path) if path.exists() else type(found)()
    changed = _printed(f"{folder}/{name}", found, recorded)
    if is_recording:
        write_lines(path, found)
    return changed


def _printed(name: str, found: Any, recorded: Any) -> int:
    """The number of differences, some of which are printed."""
    changed = list(differences(found, recorded))
    for line in changed[:SHOWN]:
        sys.stdout.write(f"{name}: {line}\n")
    return len(changed)


if __name__ == "__main__":
    sys.exit(main())
