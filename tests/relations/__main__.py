"""Runs many questions through the relations: `python -m tests.relations --plans 10000 --seed 0`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tests.relations.commands import Commands
from tests.relations.questions import question
from tests.relations.registry import RELATIONS

SHOWN = 3
"""Failures of a relation that are printed, those with the shortest commands first."""

WIDTH = 200
"""Characters of a failure that are printed while the run continues."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.relations")
    parser.add_argument("--plans", type=int, default=10_000, help="number of commands to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first question")
    parser.add_argument(
        "--relation", action="append", choices=tuple(RELATIONS), help="run this relation only"
    )
    parser.add_argument("--shown", type=int, default=SHOWN, help="failures of each relation to print")
    with TemporaryDirectory(prefix="relations-") as folder:
        return _run(parser.parse_args(), Commands(Path(folder)))


def _run(options: argparse.Namespace, shardwise: Commands) -> int:
    chosen = [RELATIONS[name] for name in options.relation or RELATIONS]
    seed, started_s = options.seed, perf_counter()
    passed: Counter[str] = Counter()
    failures: dict[str, list[str]] = {}
    while shardwise.runs < options.plans:
        one = question(seed)
        for each in chosen:
            if each.applies(one):
                try:
                    each.check(one, shardwise)
                    passed[each.name] += 1
                except Exception as error:  # noqa: BLE001 - counted and printed, and the next one is asked
                    text = f"seed {seed}: {_error_text(error, one)}"
                    failures.setdefault(each.name, []).append(text)
                    print(f"{each.name}: {text[:WIDTH]}", file=sys.stderr, flush=True)
        shardwise.drop_answers()
        seed += 1
        if seed % 20 == 0:
            count = sum(map(len, failures.values()))
            print(f"{shardwise.runs} plans, seed {seed}, {count} failures", file=sys.stderr, flush=True)
    for each in chosen:
        failed = failures.get(each.name, [])
        print(f"{each.group} {each.name}: held {passed[each.name]}, failed {len(failed)}")
        for text in sorted(failed, key=len)[: options.shown]:
            print(f"  {text}")
    taken_s = perf_counter() - started_s
    print(f"{shardwise.runs} plans of {seed - options.seed} questions in {taken_s:.0f} s")
    return 1 if failures else 0


def _error_text(error: Exception, one: object) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno}) of {one}"


if __name__ == "__main__":
    sys.exit(main())
