"""`python -m tests.kill --times 2000 [--seconds N] [--command NAME ...] [--seed N]`: exit 1 where a fault was
found."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.kill.commands import commands, write_inputs
from tests.kill.runner import duration_s, kill


def main() -> int:
    """Ends commands in turn, as often as was asked for."""
    known = {command.name: command for command in commands()}
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier")
    parser.add_argument("--seed", type=int, default=None, help="default: another one in each run")
    parser.add_argument("--command", choices=known, action="append", help="default: all; may be repeated")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else time.time_ns() % 10**9
    print(f"seed {seed}")
    random, codes, faulty = Random(seed), Counter[int](), 0
    end = time.monotonic() + given.seconds
    chosen = [known[name] for name in given.command or known]
    with TemporaryDirectory() as scratch:
        inputs, folder = Path(scratch) / "inputs", Path(scratch) / "run"
        inputs.mkdir()
        write_inputs(inputs)
        lasts = {command.name: duration_s(command, inputs, folder) for command in chosen}
        print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in lasts.items()), flush=True)
        for time_ in range(given.times):
            if time.monotonic() > end:
                break
            command = chosen[time_ % len(chosen)]
            one = kill(command, inputs, folder, random, lasts[command.name])
            codes[one.code] += 1
            if one.faults:
                faulty += 1
                print(f"{time_}: {one}", flush=True)
    print(f"{codes.total()} kills, {faulty} with faults; exit codes {dict(codes)}")
    return int(faulty > 0)


sys.exit(main())
