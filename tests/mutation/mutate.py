"""Mutation testing of packages: finds small changes of the source that the fast tests do not notice.

    .venv/bin/python tests/mutation/mutate.py --packages equations cost --sample 200 --seed 1
    .venv/bin/python tests/mutation/mutate.py --packages equations cost --all --jobs 2

Tests are collected once. For each mutant a forked child replaces the code of the changed function and runs
the tests until one fails (killed), all pass (survived) or time runs out (killed). Tests that killed a mutant
of the same module go first. `equivalent.txt` lists mutants that behave like the original, each with the
reason. Exit code: 0 if the share of killed mutants reaches `--floor`, 1 if not, 2 if the tests fail unmutated
or `equivalent.txt` is out of date.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
sys.path[:0] = [str(ROOT), str(SOURCE)]  # Python adds the script's folder only

from tests.mutation.mutants import Mutant, mutants_of  # noqa: E402

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
MEMORY_BYTES = 8 << 30


@dataclass
class Verdict:
    """The result for one mutant: killed by a test or by the time limit, or survived."""

    mutant: Mutant
    killer: str | None
    seconds: float


@dataclass
class Child:
    """A running mutant: its process, the pipe on which it names its killer, and its deadline."""

    mutant: Mutant | None
    pid: int
    pipe: int
    started: float
    deadline: float
    output: bytes = b""


@dataclass
class Campaign:
    """A pytest plugin that runs the collected tests once per mutant instead of once."""

    mutants: list[Mutant]
    jobs: int
    slack: float
    verdicts: list[Verdict] = field(default_factory=list)
    problem: str | None = None
    killers: dict[str, list[str]] = field(default_factory=dict)

    def pytest_configure(self) -> None:
        """Uses the same examples for every mutant, stores none, and does not shrink counterexamples."""
        from hypothesis import Phase, settings  # after pytest has installed its import hook

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or not session.items:
            self.problem = "no tests were collected, or some could not be"
            return True
        self.functions = functions_by_location()
        seconds = self._baseline(session)
        if not seconds:
            return True
        limit = 5.0 + self.slack * seconds
        print(
            f"{len(session.items)} tests, {seconds:.1f} s unmutated; {len(self.mutants)} mutants", flush=True
        )
        waiting, running = list(reversed(self.mutants)), list[Child]()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                running.append(self._start(session, waiting.pop(), limit))
            running = [child for child in running if not self._is_done(child)]
        return True

    def _baseline(self, session: pytest.Session) -> float:
        """Seconds of all tests unmutated, which are then sorted by duration; 0 if one fails."""
        child = self._start(session, None, 600.0)
        while not _is_over(child):
            pass
        try:
            durations: dict[str, float] = json.loads(child.output)
        except ValueError:
            self.problem = f"a test fails without any mutation: {child.output.decode()}"
            return 0.0
        session.items.sort(key=lambda item: durations[item.nodeid])
        return sum(durations.values())

    def _start(self, session: pytest.Session, mutant: Mutant | None, limit: float) -> Child:
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._run(session, mutant, writer)
        os.close(writer)
        now = time.monotonic()
        return Child(mutant, pid, reader, now, now + limit)

    def _run(self, session: pytest.Session, mutant: Mutant | None, writer: int) -> None:
        """In the child: mutates, runs tests until one fails, writes its name, exits without cleaning up."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        status = 1
        try:
            if mutant is not None:
                install(mutant, self.functions)
            os.write(writer, self._first_failure(session, mutant).encode())
            status = 0
        finally:
            os._exit(status)

    def _first_failure(self, session: pytest.Session, mutant: Mutant | None) -> str:
        """Name of the first test that fails, or nothing; unmutated, the seconds of each test as JSON."""
        failures: list[str] = []
        durations: dict[str, float] = {}

        class Listener:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                durations[report.nodeid] = durations.get(report.nodeid, 0.0) + report.duration
                if report.failed:
                    failures.append(report.nodeid)

        session.config.pluginmanager.register(Listener())
        first = self.killers.get(mutant.module, []) if mutant is not None else []
        rank = {name: place for place, name in enumerate(first)}
        items = sorted(session.items, key=lambda item: rank.get(item.nodeid, len(rank)))
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if failures:
                return failures[0]
        return "" if mutant is not None else json.dumps(durations)

    def _is_done(self, child: Child) -> bool:
        if not _is_over(child):
            return False
        mutant = child.mutant
        if mutant is not None:
            killer = child.output.decode() or None
            self.verdicts.append(Verdict(mutant, killer, time.monotonic() - child.started))
            if killer:
                known = self.killers.setdefault(mutant.module, [])
                self.killers[mutant.module] = [killer, *(name for name in known if name != killer)]
            print("." if killer else "S", end="", flush=True)
        return True


def _is_over(child: Child) -> bool:
    """Waits a moment for the child to end; kills it after its deadline."""
    ready, _, _ = select.select([child.pipe], [], [], 0.01)
    text = os.read(child.pipe, 65536) if ready else None
    if text:
        child.output += text
        return False
    if text is None and time.monotonic() < child.deadline:
        return False
    if text is None:
        child.output = b"out of time"
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    if status and not child.output:
        child.output = b"crash"
    os.close(child.pipe)
    return True


CodeLocation = tuple[str, int, str]


def location_of(code: CodeType) -> CodeLocation:
    return os.path.realpath(code.co_filename), code.co_firstlineno, code.co_name


def functions_by_location() -> dict[CodeLocation, list[FunctionType]]:
    """Every live function of the package by its location in the source, also decorated and nested ones."""
    found: dict[CodeLocation, list[FunctionType]] = {}
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and str(SOURCE) in thing.__code__.co_filename:
            found.setdefault(location_of(thing.__code__), []).append(thing)
    return found


def install(mutant: Mutant, functions: dict[CodeLocation, list[FunctionType]]) -> None:
    """Replaces the code of the live functions of the mutant's module, and clears caches."""
    mutant.apply()
    module = compile(ast.fix_missing_locations(mutant.tree), str(mutant.path), "exec", dont_inherit=True)
    for code in _codes(module):
        for function in functions.get(location_of(code), []):
            function.__code__ = code
    for thing in gc.get_objects():
        if isinstance(thing, functools._lru_cache_wrapper):
            thing.cache_clear()


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def sources(package: str) -> list[tuple[str, Path]]:
    """(module, file) of a package or of a base module."""
    folder = SOURCE / "shardwise" / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return [
        (".".join(file.relative_to(SOURCE).with_suffix("").parts), file)
        for file in files
        if file.name != "__init__.py"
    ]


def tests_of(package: str) -> list[str]:
    """The fast tests of a package: its folder under tests/unit, and test files named after it."""
    folder = ROOT / "tests" / "unit" / package
    named = [
        *(ROOT / "tests" / "unit").glob(f"test_{package}*.py"),
        *(ROOT / "tests").glob(f"*/test_{package}_*.py"),
    ]
    return sorted({str(path) for path in [*([folder] if folder.is_dir() else []), *named]})


def equivalents() -> dict[str, str]:
    """Key of each equivalent mutant, with the reason why no test can detect it."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    entries = [line.rpartition(" # ") for line in lines if line.strip() and not line.startswith("#")]
    return {key.strip(): reason.strip() for key, _, reason in entries}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Finds small changes of the source that no test notices.")
    parser.add_argument(
        "--packages",
        "--rooms",
        dest="packages",
        nargs="+",
        required=True,
        help="packages or base modules to mutate",
    )
    parser.add_argument("--tests", nargs="+", help="tests to run (default: the packages' own)")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants, at random")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--floor", type=float, default=0.9, help="share that must be killed")
    parser.add_argument(
        "--slack", type=float, default=3.0, help="time allowed, in multiples of the unmutated run"
    )
    parser.add_argument("--json", type=Path, help="write the verdicts here too")
    return parser.parse_args()


def chosen_mutants(options: argparse.Namespace) -> tuple[list[Mutant], list[str]]:
    """The mutants to run, and listed equivalents of these packages that match no mutant."""
    everything = [
        m
        for package in options.packages
        for module, path in sources(package)
        for m in mutants_of(module, path)
    ]
    listed = equivalents()
    modules = {mutant.module for mutant in everything}
    keys = {mutant.key for mutant in everything}
    stale = [key for key in listed if key.split(":")[0] in modules and key not in keys]
    real = [mutant for mutant in everything if mutant.key not in listed]
    print(f"{len(everything)} mutants, {len(everything) - len(real)} of them listed as equivalent")
    if not options.all and options.sample < len(real):
        real = sorted(
            random.Random(options.seed).sample(real, options.sample), key=lambda m: (m.module, m.line)
        )
    return real, stale


def report(verdicts: list[Verdict]) -> float:
    """Prints survivors and the share killed per module; returns the share of all."""
    total, killed = Counter[str](), Counter[str]()
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.mutant.module, verdict.mutant.line)):
        mutant = verdict.mutant
        total[mutant.module] += 1
        killed[mutant.module] += verdict.killer is not None
        if verdict.killer is None:
            print(f"survived {mutant.path.relative_to(ROOT)}:{mutant.line} in {mutant.function}")
            print(f"  - {mutant.before}\n  + {mutant.after}")
    for module in sorted(total):
        print(f"{killed[module]:5d} of {total[module]:5d} killed  {module}")
    share = killed.total() / max(1, total.total())
    print(f"{killed.total()} of {total.total()} killed: {share:.1%}")
    return share


def main() -> int:
    options = parsed()
    mutants, stale = chosen_mutants(options)
    if stale:
        print("equivalent.txt lists mutants that no longer exist:", *stale, sep="\n  ")
        return 2
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(threads, "1")  # before numpy is loaded: forking is safe with one thread only
    campaign = Campaign(mutants, options.jobs, options.slack)
    tests = options.tests or [path for package in options.packages for path in tests_of(package)]
    arguments = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    pytest.main([*arguments, *tests], plugins=[campaign])
    print()
    if campaign.problem:
        print(campaign.problem)
        return 2
    share = report(campaign.verdicts)
    if options.json:
        rows = [{"mutant": v.mutant.key, "killer": v.killer, "seconds": v.seconds} for v in campaign.verdicts]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if share >= options.floor else 1


if __name__ == "__main__":
    sys.exit(main())
