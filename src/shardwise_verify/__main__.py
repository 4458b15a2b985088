"""`python -m shardwise_verify PLAN [--json]`: the verdict on a plan file of version 2.

Exit codes: 0 all checks hold or are open, 2 bad input, 4 a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from shardwise_verify.proof import PROOF_BUDGET_S
from shardwise_verify.reading import InputError
from shardwise_verify.report import answer_of, lines_of
from shardwise_verify.verdict import check_file

REFUSED, DISAGREES = 2, 4


def main(arguments: list[str] | None = None) -> int:
    """Print the verdict; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise_verify", description="Check a plan file.")
    parser.add_argument("plan", help="a plan file of version 2")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--proof-budget", type=float, default=PROOF_BUDGET_S, metavar="SECONDS",
        help="time limit of the proof of optimality; it is open where it takes longer",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        verdict = check_file(options.plan, proof_budget_s=options.proof_budget)
    except InputError as error:
        sys.stderr.write(f"shardwise_verify: {error}\n")
        return REFUSED
    if options.json:
        sys.stdout.write(f"{json.dumps(answer_of(verdict), indent=2)}\n")
    else:
        sys.stdout.writelines(f"{word:<5}  {name:<34}  {text}\n" for word, name, text in lines_of(verdict))
    return 0 if verdict.ok else DISAGREES


if __name__ == "__main__":
    sys.exit(main())
