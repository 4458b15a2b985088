"""`python -m tests.fuzz --seconds 60 [--reader NAME ...] [--seed N]`: exit 1 where a fault was found."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.fuzz.readers import readers
from tests.fuzz.runner import Counts, run, save

FAULTS = Path(".cache/fuzz")


def main() -> int:
    """Runs all readers in turn until the time is over."""
    known = readers()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one in each run")
    parser.add_argument("--reader", choices=known, action="append", help="default: all; may be repeated")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else time.time_ns() % 10**9
    print(f"seed {seed}")
    chosen = [known[name] for name in given.reader or known]
    found: dict[str, dict[str, Path]] = {reader.name: {} for reader in chosen}
    counts = {reader.name: Counts() for reader in chosen}
    slowest = dict.fromkeys(found, 0.0)
    with TemporaryDirectory() as folder:
        runs = {
            reader.name: run(reader, Path(folder), Random(f"{seed} {reader.name}"), counts[reader.name])
            for reader in chosen
        }
        end = time.monotonic() + given.seconds
        while time.monotonic() < end:
            for name, one in runs.items():
                turn = time.monotonic() + 0.5
                while time.monotonic() < min(turn, end):
                    start = time.thread_time()
                    fault = next(one)
                    if (took := time.thread_time() - start) > slowest[name]:
                        slowest[name] = took
                    last = fault.reason.strip().splitlines()[-1] if fault else ""
                    if fault and last[:60] not in found[name]:
                        found[name][last[:60]] = save(fault, FAULTS)
                        print(f"{name}: {last[:300]}\n  {found[name][last[:60]]}", flush=True)
    for name, count in counts.items():
        figures = f"{count.read:9} read {count.refused:9} refused {len(found[name]):4} faults"
        print(f"{name:20}{figures}, slowest {slowest[name]:.2f} s")
    print(f"{sum(count.read + count.refused for count in counts.values())} inputs")
    return int(any(found.values()))


sys.exit(main())
