"""Reads tables of nccl-tests (such as all_reduce_perf; rccl-tests has the same format) and calibrates links.

`nccl_tables` parses the text. A table has a line per size below a header that names its columns. The lines
before it name the collective, the ranks, their hosts and their devices. All other text is ignored.
`with_tables` fits the links of each tier of a cluster to the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from shardwise.accuracy.calibration.curves import Collective, LinkSample, link_curve
from shardwise.accuracy.calibration.device import TierCurve, with_link_fractions
from shardwise.cluster import Cluster, Device, Tier
from shardwise.errors import ConfigError
from shardwise.inputs import printable, short_repr

# Parsing
TESTS: Final[Mapping[str, Collective | None]] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "message", "broadcast": None, "reduce": None, "gather": None,
    "scatter": None, "hypercube": None, "alltoallv": None,
}  # fmt: skip
"""Tests by name with their collective; None where the cost model does not have it."""

_TYPE_BYTES: Final = {
    "int8": 1, "uint8": 1, "char": 1, "int32": 4, "uint32": 4, "int": 4, "int64": 8, "uint64": 8, "half": 2,
    "bfloat16": 2, "float": 4, "double": 8, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip

_LAUNCHER = re.compile(r"^\s*(?:\[\d+,\d+\]<\w+>:\s?|\d+:\s)?\s*")
"""Prefix that mpirun --tag-output and srun --label add to a line."""

_NAMES = "|".join(sorted(TESTS, key=len, reverse=True))
_TEST = re.compile(rf"(?<![a-z])({_NAMES})_perf")
_NAMED = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])")
_CONCLUDED = re.compile(r"# Collective test concluded")
_HEAD = re.compile(r"#\s*size\s+count\s+type\b")
_RANK = re.compile(r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[\S*\] (.*)")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")

_COLUMNS = ("size", "count", "type", "time", "algbw", "busbw")

_MOST_RANKS = 100_000
_RATIO_FROM = 1.0
"""Least rate in GB/s whose two printed decimals determine the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTable:
    """One table: `times` has pairs of `nbytes` (as in LinkSample) and seconds of the out-of-place collective.

    `hosts` has the number of ranks on each host, and `device` the device of the first rank; both are empty
    where the text does not state them. `ranks` is then None, unless the sizes determine it.
    """

    kind: Collective
    line: int
    hosts: tuple[int, ...]
    device: str
    ranks: int | None
    times: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class _Run:
    """The parts of a run's header that were read: the test, the host of each rank, and the device."""

    test: str | None
    hosts: dict[int, str]
    device: str = ""


def nccl_tables(text: str, *, file: str) -> list[NcclTable]:
    """The tables of `text`, the content of `file`, whose name may contain the name of the test.

    Tables of collectives that the cost model does not have are left out. Raises ConfigError at the first
    wrong line, and where no table is left.
    """
    named = _NAMED.search(PurePath(file).stem.replace("-", "_"))
    by_name = named.group(1) if named else None
    run = _Run(test=by_name, hosts={})
    tables: list[NcclTable] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = _plain(lines[number])
        number += 1
        if _HEAD.match(line):
            head = _Located(file, number)
            rows, number = _rows(lines, number)
            table = _table(head, run, line.lstrip("# ").split(), rows)
            if table is not None:
                tables.append(table)
            run = _Run(test=by_name, hosts=run.hosts, device=run.device)
        elif rank := _RANK.match(line):
            _add_rank(_Located(file, number), run, rank)
        elif _is_start(line):
            run.test = _TEST.findall(line)[-1]
    if not tables:
        known = ", ".join(f"{test}_perf" for test, kind in TESTS.items() if kind)
        raise ConfigError("has no table of measured collectives", file=printable(file), allowed=known)
    return tables


@dataclass(frozen=True, slots=True)
class _Located:
    """A line of the file, counted from 1, for error messages."""

    file: str
    line: int

    def error(self, message: str, *, found: str | None = None, allowed: str | None = None) -> ConfigError:
        return ConfigError(
            message, file=printable(self.file), key=f"line {self.line}", found=found, allowed=allowed
        )


def _plain(line: str) -> str:
    return _LAUNCHER.sub("", line, count=1).rstrip()


def _is_start(line: str) -> bool:
    """Whether a line names the test of the next table."""
    return _TEST.search(line) is not None and not _CONCLUDED.match(line)


def _rows(lines: Sequence[str], number: int) -> tuple[list[tuple[int, list[str]]], int]:
    """The rows after line `number`, each with its line number and its words, and the last line that was read.

    A table ends at the next header, test or list of ranks."""
    rows = []
    while number < len(lines):
        line = _plain(lines[number])
        if _HEAD.match(line) or _RANK.match(line) or _is_start(line):
            break
        number += 1
        if _ROW.match(line):
            rows.append((number, line.split()))
    return rows, number


def _add_rank(at: _Located, run: _Run, match: re.Match[str]) -> None:
    rank, group, host, device = int(match[1]), match[2], match[3], match[4].strip()
    if group not in (None, "0"):
        raise at.error("runs several groups at once", found=f"group {group}", allowed="one group")
    if rank == 0 and len(run.hosts) > 1:
        run.hosts, run.device = {}, ""  # another run
    if rank != len(run.hosts):
        raise at.error("is not the next rank", found=f"rank {rank}", allowed=f"rank {len(run.hosts)}")
    if rank >= _MOST_RANKS:
        raise at.error("has too many ranks", allowed=f"at most {_MOST_RANKS}")
    run.hosts[rank] = host
    run.device = run.device or device


def _table(
    at: _Located, run: _Run, columns: list[str], rows: Sequence[tuple[int, list[str]]]
) -> NcclTable | None:
    if "cputime" in columns:
        raise at.error("has CPU times", found="cputime", allowed="time: run without --report_cputime")
    if not set(_COLUMNS) <= set(columns):
        raise at.error(
            "has not all columns", found=short_repr(" ".join(columns)), allowed=", ".join(_COLUMNS)
        )
    if not rows:
        raise at.error("has the header of a table and no rows")
    read = [_Row.of(_Located(at.file, line), columns, words) for line, words in rows]
    nonempty_rows = [row for row in read if row.nbytes > 0.0]
    test = run.test or _test_of(at, nonempty_rows)
    kind = TESTS.get(test)
    if kind is None:
        return None
    ranks = len(run.hosts) or _ranks_of(kind, nonempty_rows)
    for row in nonempty_rows:
        row.check_ranks(kind, ranks)
    return NcclTable(
        kind=kind,
        line=rows[0][0],
        hosts=tuple(Counter(run.hosts.values()).values()),
        device=run.device,
        ranks=ranks,
        times=tuple((row.nbytes, row.seconds) for row in nonempty_rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of a table; rates are in GB/s as printed, with two decimals."""

    at: _Located
    nbytes: float
    count: float
    type_bytes: int | None
    reduces: bool
    root: str
    seconds: float
    algbw: float
    busbw: float

    @staticmethod
    def of(at: _Located, columns: Sequence[str], words: Sequence[str]) -> _Row:
        if len(words) != len(columns):
            raise at.error(
                "has another number of columns than the header", found=str(len(words)),
                allowed=str(len(columns)),
            )  # fmt: skip
        first = {name: word for name, word in reversed(list(zip(columns, words, strict=True)))}
        wrong = first.get("#wrong", first.get("error", "0"))
        if "#wrong" in first and wrong not in ("0", "N/A"):
            raise at.error("has wrong results", found=f"{short_repr(wrong)} of them", allowed="0")
        row = _Row(
            at=at,
            nbytes=_number(at, "size", first["size"]),
            count=_number(at, "count", first["count"]),
            type_bytes=_TYPE_BYTES.get(first["type"]),
            reduces=first.get("redop", "none") != "none",
            root=first.get("root", "-1"),
            seconds=_number(at, "time", first["time"]) * 1e-6,
            algbw=_number(at, "algbw", first["algbw"]),
            busbw=_number(at, "busbw", first["busbw"]),
        )
        if not 1e-8 <= row.seconds <= 1e4:
            raise at.error(
                "has a time out of range", found=short_repr(first["time"]), allowed="0.01 us to 1e10 us"
            )
        rate = row.nbytes / row.seconds / 1e9
        if abs(rate - row.algbw) > 0.011 + 0.02 * rate:
            raise at.error(
                "has a rate other than size / time", found=f"algbw {short_repr(first['algbw'])}",
                allowed=f"{rate:.2f}",
            )  # fmt: skip
        return row

    def check_ranks(self, kind: Collective, ranks: int | None) -> None:
        """Raises ConfigError where busbw / algbw does not fit the number of ranks."""
        if ranks is None or self.algbw < _RATIO_FROM:
            return
        ratio = bus_factor(kind, ranks)
        if abs(self.busbw / self.algbw - ratio) > 0.02 * max(ratio, 0.5):
            raise self.at.error(
                f"has another busbw than {kind} on {ranks} ranks", found=f"{self.busbw:.2f}",
                allowed=f"{self.algbw * ratio:.2f}",
            )  # fmt: skip


def _number(at: _Located, column: str, word: str) -> float:
    if not re.fullmatch(r"\d{1,18}(?:\.\d{1,9})?", word):
        raise at.error(f"has no number in the column {column}", found=short_repr(word))
    return float(word)


def bus_factor(kind: Collective, ranks: int) -> float:
    """busbw over algbw, as nccl-tests defines it (PERFORMANCE.md of nccl-tests)."""
    if kind == "message":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _test_of(at: _Located, rows: Sequence[_Row]) -> str:
    """The test, inferred from its rows where no line names it."""
    row = max(rows, key=lambda row: row.nbytes, default=None)
    if row is None or row.type_bytes is None:
        raise at.error("does not name its test", allowed="a line before it such as # all_reduce_perf")
    is_whole = row.count * row.type_bytes == row.nbytes
    if row.root not in ("-1", ""):
        return "reduce" if row.reduces else "broadcast"
    if is_whole:
        return "all_reduce" if row.reduces else "sendrecv"
    if row.reduces:
        return "reduce_scatter"
    raise at.error(
        "may be of all_gather_perf or of alltoall_perf", allowed="a line before it that names the test"
    )


def _ranks_of(kind: Collective, rows: Sequence[_Row]) -> int | None:
    """The number of ranks, for collectives whose `count` is one rank's part of the tensor of `size` bytes."""
    row = max(rows, key=lambda row: row.nbytes, default=None)
    if kind in ("all_reduce", "message") or row is None or row.type_bytes is None or row.count == 0.0:
        return None
    ranks = round(row.nbytes / (row.count * row.type_bytes))
    if ranks < 1:
        raise row.at.error(
            "has more elements than its size allows", found=f"{row.count:.0f}",
            allowed=f"at most {row.nbytes / row.type_bytes:.0f}",
        )  # fmt: skip
    return ranks


# Calibration
LEAST_BYTES: Final = 1 << 20
"""Smallest tensor that counts, in bytes (1 MiB).

NCCL uses other protocols for smaller tensors, and steps spend their time on larger ones."""


def with_tables(
    device: Device, cluster: Cluster, tables: Sequence[tuple[str, NcclTable]]
) -> tuple[Device, dict[str, object]]:
    """`device` with links fitted to `tables` on the tiers of `cluster`, and the remaining errors.

    Each table comes with the path of its file. The errors are a record for the calibration file."""
    samples: dict[int, list[LinkSample]] = {}
    for path, table in tables:
        at, of = table_samples(path, table, cluster)
        samples.setdefault(at, []).extend(of)
    for is_network in (False, True):
        crossed = [cluster.tiers[at].name for at in samples if cluster.tiers[at].is_network is is_network]
        if len(crossed) > 1:
            raise ConfigError(
                "were measured on several tiers", key="--from", found=", ".join(crossed),
                allowed="one within nodes and one between them",
            )  # fmt: skip
    curves: list[TierCurve] = []
    measured: dict[str, object] = {}
    for at, of in sorted(samples.items()):
        tier, curve = cluster.tiers[at], link_curve(of)
        curves.append(TierCurve(tier=tier, curve=curve, groups=tier.span // _inner_span(cluster, at)))
        measured[f"links of {tier.name}"] = {"times": len(of), **curve.errors(of)}
    return with_link_fractions(device, curves), measured


def _inner_span(cluster: Cluster, tier: int) -> int:
    return cluster.tiers[tier - 1].span if tier else 1


def table_samples(path: str, table: NcclTable, cluster: Cluster) -> tuple[int, list[LinkSample]]:
    """The index of the tier that the ranks of `table` cross, and the samples of the table."""

    def wrong(message: str, found: str, allowed: str) -> ConfigError:
        return ConfigError(
            message, file=printable(path), key=f"line {table.line}", found=found, allowed=allowed
        )

    per_node = cluster.nodes[0].devices
    hosts = table.hosts or _hosts_of(table.ranks or cluster.devices, per_node)
    ranks = sum(hosts)
    if len(hosts) > 1 and set(hosts) != {per_node}:
        found = " + ".join(map(str, hosts))
        raise wrong("does not use whole nodes", f"{short_repr(found)} ranks", f"{per_node} per node")
    if ranks > cluster.devices or ranks < 2:
        raise wrong("has another number of ranks", str(ranks), f"2 to {cluster.devices}, as --cluster has")
    at = next(index for index, tier in enumerate(cluster.tiers) if tier.span >= ranks)
    tier, inner = cluster.tiers[at], _inner_span(cluster, at)
    if ranks % inner:
        raise wrong(
            "does not fill whole groups of the tier below", f"{ranks} ranks", f"a multiple of {inner}"
        )
    sample = LinkSample(
        kind=table.kind, ranks=ranks, nbytes=0.0, seconds=0.0, inner=inner,
        share=_share(tier, 2 if table.kind == "message" else ranks // inner),
        alone=tier.flow_bytes_per_s / tier.bytes_per_s,
        reduces_in_switch=all(each.in_switch_reduction for each in cluster.tiers[: at + 1]),
    )  # fmt: skip
    return at, [
        replace(sample, nbytes=nbytes, seconds=seconds)
        for nbytes, seconds in table.times
        if nbytes >= LEAST_BYTES
    ]


def _hosts_of(ranks: int, per_node: int) -> tuple[int, ...]:
    """The number of ranks on each node where ranks fill nodes one by one."""
    whole, remainder = divmod(ranks, per_node)
    return (per_node,) * whole + ((remainder,) if remainder else ())


def _share(tier: Tier, members: int) -> float:
    shares = [share for size, share in tier.part_shares if size <= members]
    return shares[-1] if shares else 1.0
