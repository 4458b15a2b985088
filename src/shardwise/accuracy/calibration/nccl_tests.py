"""Reads tables of nccl-tests (such as all_reduce_perf; rccl-tests has the same format) and calibrates links.

`nccl_tables` parses the text, or the JSON of `-J`. A table has a line per size below a header that names its
columns. The lines before it name the collective, the ranks, their hosts and their devices. All other text is
ignored, as are labels of launchers and the marks of Markdown. `with_tables` fits the links of each tier of a
cluster to the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from shardwise.accuracy.calibration.curves import (
    Collective,
    LinkCurve,
    LinkSample,
    link_curve,
    rate_of_largest,
    shows_latency,
)
from shardwise.accuracy.calibration.device import TierCurve, with_link_fractions
from shardwise.cluster import Cluster, Device, Tier
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping, printable, short_repr
from shardwise.units import format_bytes

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

_LABEL = re.compile(
    r"""\s*(?:\[[^]\s]*\d+,\s*\d+\]<\w+>:          # mpirun --tag-output, prterun
      |\d+:\s                                  # srun --label
      |[\w.-]{1,100}:\s+(?=[#\d])               # pdsh
      |\[pod/[^]\s]+\]\s                       # kubectl logs --prefix
      |\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s   # kubectl logs --timestamps
      |>\s                                     # a quotation of Markdown
    )\s*""",
    re.VERBOSE,
)
_UNIT = re.compile(r"\([^()]*\)")

_NAMES = "|".join(sorted(TESTS, key=len, reverse=True))
_TEST = re.compile(rf"(?<![a-z])({_NAMES})_perf")
_NAMED = re.compile(rf"(?<![a-z])({_NAMES})(?![a-z])")
_CONCLUDED = re.compile(r"# Collective test concluded")
_HEAD = re.compile(r"\\?#?\s*size\s+count\s+type\b")
_TABLE = re.compile(r"\bsize[\s|]+(?:\(B\)[\s|]+)?count[\s|]+(?:\(elements\)[\s|]+)?type\b")
_JSON = re.compile(r'\s*\{.{0,10000}"nccl_version"\s*:', re.DOTALL)
_RANK = re.compile(r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[\S*\] (.*)")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")

_COLUMNS = ("size", "count", "type", "time", "algbw", "busbw")

_MOST_RANKS = 100_000
_RATIO_FROM = 1.0
"""Least rate in GB/s whose two printed decimals determine the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTable:
    """One table at `place` of a file: `times` has pairs of `nbytes` (as in LinkSample) and seconds of the
    out-of-place collective.

    `hosts` has the number of ranks on each host, and `device` the device of the first rank; both are empty
    where the text does not state them. `ranks` is then None, unless the sizes determine it. `hostnames` are
    the names of the hosts. `spread` is the largest 95th percentile over the median of the iterations, where
    they were timed one by one.
    """

    kind: Collective
    place: str
    hosts: tuple[int, ...]
    device: str
    ranks: int | None
    times: tuple[tuple[float, float], ...]
    hostnames: tuple[str, ...] = ()
    spread: float | None = None


@dataclass(slots=True)
class _Run:
    """The parts of a run's header that were read: the test, the host of each rank, and the device."""

    test: str | None
    hosts: dict[int, str]
    device: str = ""


def is_nccl_tests(text: str) -> bool:
    """Whether a text is output of nccl-tests: it has the header of a table, or is JSON of `-J`."""
    return _JSON.match(text) is not None or _TABLE.search(text) is not None


def nccl_tables(text: str, *, file: str) -> list[NcclTable]:
    """The tables of `text`, the content of `file`, whose name may contain the name of the test.

    Tables of collectives that the cost model does not have are left out. Raises ConfigError at the first
    wrong line, and where no table is left.
    """
    if _JSON.match(text):
        document = parse_mapping(text, file=file, max_bytes=1 << 26, max_nodes=5_000_000, is_json=True)
        return [_json_table(Fields(document, file=file))]
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
            head = _Located(file, f"line {number}")
            rows, number = _rows(lines, number)
            table = _table(head, run, line.lstrip("\\# ").split(), rows)
            if table is not None:
                tables.append(table)
            run = _Run(test=by_name, hosts=run.hosts, device=run.device)
        elif rank := _RANK.match(line):
            _add_rank(_Located(file, f"line {number}"), run, rank)
        elif _is_start(line):
            run.test = _TEST.findall(line)[-1]
    if not tables:
        raise ConfigError(
            "has no table of measured collectives", file=printable(file), allowed=_known_tests()
        )
    return tables


def _known_tests() -> str:
    return ", ".join(f"{test}_perf" for test, kind in TESTS.items() if kind)


@dataclass(frozen=True, slots=True)
class _Located:
    """A place in the file, for error messages: a line, counted from 1, or a key."""

    file: str
    place: str

    def error(self, message: str, *, found: str | None = None, allowed: str | None = None) -> ConfigError:
        return ConfigError(message, file=printable(self.file), key=self.place, found=found, allowed=allowed)


def _plain(line: str) -> str:
    """A line without labels of launchers; a row of a Markdown table without its bars and units."""
    for _ in range(3):
        line = _LABEL.sub("", line, count=1) if _LABEL.match(line) else line
    line = line.strip()
    if not line.startswith("|"):
        return line
    cells = [_UNIT.sub("", cell).strip(" `*") for cell in line.strip("|").split("|")]
    return " ".join(cells)


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
    _set_rank(at, run, int(match[1]), int(match[2] or 0), match[3], match[4].strip())


def _set_rank(at: _Located, run: _Run, rank: int, group: int, host: str, device: str) -> None:
    if group != 0:
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
    read = [_Row.of(_Located(at.file, f"line {line}"), columns, words) for line, words in rows]
    return _table_of(replace(at, place=f"line {rows[0][0]}"), at, run, read)


def _table_of(
    first: _Located, at: _Located, run: _Run, read: Sequence[_Row], spread: float | None = None
) -> NcclTable | None:
    """The table with these rows; None where the cost model does not have its collective."""
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
        place=first.place,
        hosts=tuple(Counter(run.hosts.values()).values()),
        hostnames=tuple(Counter(run.hosts.values())),
        device=run.device,
        ranks=ranks,
        times=tuple((row.nbytes, row.seconds) for row in nonempty_rows),
        spread=spread,
    )


def _json_table(fields: Fields) -> NcclTable:
    """The table of a run with `-J`: its arguments name the test, `config.devices` the ranks."""
    file = fields.file or ""
    fields.integer("version", low=1, high=1000)
    named = _TEST.findall(" ".join(map(str, fields.sequence("args", low=1)[:1])))
    run = _Run(test=named[-1] if named else None, hosts={})
    config = fields.mapping("config", default={})
    holder = config if config.has("devices") else fields
    for device in holder.mappings("devices", default=()):
        at = _Located(file, device.key)
        _set_rank(
            at, run, device.integer("rank"), device.integer("group", default=0), device.text("hostname"),
            device.text("device_info", default="unknown"),
        )  # fmt: skip
    rows, spreads = [], []
    for item in fields.mappings("results", low=1):
        if not item.has("out_of_place"):
            continue
        rows.append(_json_row(item, _Located(file, item.key)))
        if item.has("out_of_place_per_iter") and rows[-1].nbytes >= LEAST_BYTES:
            each = item.mapping("out_of_place_per_iter")
            median_us = each.number("p50_us", low=1e-3, high=1e10)
            spreads.append(each.number("p95_us", low=median_us, high=1e10) / median_us)
    at = _Located(file, "results")
    table = _table_of(at, at, run, rows, max(spreads, default=None)) if rows else None
    if table is None:
        raise at.error("has no measured collectives that the cost model has", allowed=_known_tests())
    return table


def _json_row(item: Fields, at: _Located) -> _Row:
    times = item.mapping("out_of_place")
    if times.has("cpu_time"):
        raise at.error("has CPU times", found="cpu_time", allowed="time: run without --report_cputime")
    wrong = times.number("nwrong", default=0.0)
    if wrong:
        raise at.error("has wrong results", found=f"{wrong:g} of them", allowed="0")
    return _Row(
        at=at,
        nbytes=float(item.integer("size")),
        count=float(item.integer("count")),
        type_bytes=_TYPE_BYTES.get(item.text("type")),
        reduces=item.text("redop", default="none") != "none",
        root=str(item.any("root", default="-1")).strip(),
        seconds=times.number("time", low=0.01, high=1e10) * 1e-6,
        algbw=times.number("alg_bw"),
        busbw=times.number("bus_bw"),
    ).checked()


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
        return row.checked()

    def checked(self) -> _Row:
        """This row. ConfigError where its algbw is not size / time."""
        rate = self.nbytes / self.seconds / 1e9
        if abs(rate - self.algbw) > 0.011 + 0.02 * rate:
            raise self.at.error(
                "has a rate other than size / time", found=f"algbw {self.algbw:g}", allowed=f"{rate:.2f}"
            )
        return self

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
        tier = cluster.tiers[at]
        curve, latency = _curve(of, device, tier)
        reached = curve.bytes_per_s / tier.bytes_per_s
        curves.append(TierCurve(tier=tier, curve=curve, groups=tier.span // _inner_span(cluster, at)))
        record: dict[str, object] = {"times": len(of), **curve.errors(of)}
        record["of_cards" if tier.is_network else "of_links"] = reached
        spreads = [table.spread for _, table in tables if table.spread and table_tier(table, cluster) == at]
        if spreads:
            record["p95_over_median"] = max(spreads)
        if latency:
            record["latency"] = latency
        if reached > MOST_REACHED:
            record["faster"] = f"than its {'cards' if tier.is_network else 'links'}, so taken as 100 %"
        measured[f"links of {tier.name}"] = record
    return with_link_fractions(device, curves), measured


MOST_REACHED: Final = 1.02
"""Most of the known bandwidth that a measurement may reach: times of 2 % less are scatter."""


def _curve(samples: Sequence[LinkSample], device: Device, tier: Tier) -> tuple[LinkCurve, str | None]:
    """The curve of a link, and why its latency is the known one where the samples do not show it."""
    network = tier.is_network
    of = device.efficiency.scale_out if network else device.efficiency.scale_up
    latency_s = device.scale_out_latency_s if network else device.scale_up_latency_s
    known = LinkCurve(latency_s=latency_s, startup_s=of.startup_s, bytes_per_s=tier.bytes_per_s)
    fitted = link_curve(samples)
    if shows_latency(samples, known):
        return fitted, None
    least = format_bytes(min(sample.nbytes for sample in samples))
    why = f"kept, since collectives of {least} and more do not show it"
    return replace(known, bytes_per_s=rate_of_largest(samples, known)), why


def _inner_span(cluster: Cluster, tier: int) -> int:
    return cluster.tiers[tier - 1].span if tier else 1


def table_samples(path: str, table: NcclTable, cluster: Cluster) -> tuple[int, list[LinkSample]]:
    """The index of the tier that the ranks of `table` cross, and the samples of the table."""

    def wrong(message: str, found: str, allowed: str) -> ConfigError:
        return ConfigError(message, file=printable(path), key=table.place, found=found, allowed=allowed)

    per_node = cluster.nodes[0].devices
    hosts = table.hosts or _hosts_of(table.ranks or cluster.devices, per_node)
    ranks = sum(hosts)
    if len(hosts) > 1 and set(hosts) != {per_node}:
        found = " + ".join(map(str, hosts))
        raise wrong("does not use whole nodes", f"{short_repr(found)} ranks", f"{per_node} per node")
    if ranks > cluster.devices or ranks < 2:
        raise wrong("has another number of ranks", str(ranks), f"2 to {cluster.devices}, as --cluster has")
    at = table_tier(table, cluster)
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
        has_two_trees=table.kind == "all_reduce" and len(hosts) == 2,
    )  # fmt: skip
    return at, [
        replace(sample, nbytes=nbytes, seconds=seconds)
        for nbytes, seconds in table.times
        if nbytes >= LEAST_BYTES
    ]


def table_tier(table: NcclTable, cluster: Cluster) -> int:
    """Index of the tier that the ranks of a table cross: the innermost one with all of them."""
    ranks = sum(table.hosts) or table.ranks or cluster.devices
    return next(index for index, tier in enumerate(cluster.tiers) if tier.span >= ranks)


def _hosts_of(ranks: int, per_node: int) -> tuple[int, ...]:
    """The number of ranks on each node where ranks fill nodes one by one."""
    whole, remainder = divmod(ranks, per_node)
    return (per_node,) * whole + ((remainder,) if remainder else ())


def _share(tier: Tier, members: int) -> float:
    shares = [share for size, share in tier.part_shares if size <= members]
    return shares[-1] if shares else 1.0
