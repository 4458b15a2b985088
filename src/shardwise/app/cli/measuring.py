"""Measurements of `calibrate` on CPU ranks.

`ranks_of` gives the processes: those of a launcher, or own ones. Three measurements run on all ranks at once,
in rounds: `StepMeasurement` (steps of small plans), `KernelMeasurement` (kernels and these steps; fits device
and software) and `LinkMeasurement` (collectives; fits the links).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from shardwise import accuracy
from shardwise.accuracy import Collective, LinkSample, MeasuredStep, OverlapSample, TierCurve
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import Profile

if TYPE_CHECKING:
    from shardwise.measure import KernelTimes
    from shardwise.runtime import WorkerPool


# Ranks

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

RankTask = Callable[..., Any]
"""Called as `task(report, *arguments)` in a process group, like the tasks of a WorkerPool; returns JSON
values."""


class Ranks(Protocol):
    """One process per device of a cluster. `rank` is that of this process; `speeds` are the speeds of all
    devices."""

    @property
    def rank(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float]: ...

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        """Results of `task` by rank, each run in a group of its own; all start at once."""

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        """Results of `task` by rank, all run in one group."""

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of every launched process, by rank; own processes have only one."""


def is_launched() -> bool:
    """Whether a launcher (or `emulate`) started this process, as one of several."""
    return TORCHRUN_VARIABLE in os.environ


def cluster_here(device: str) -> str:
    """A shorthand for the launched processes, on hosts with as many as this one; or for one device per core.
    ConfigError where hosts have unequal numbers."""
    if not is_launched():
        return f"1x{os.cpu_count() or 1}x{device}"
    ranks, local = _started("WORLD_SIZE"), _started_here()
    if ranks % local:
        raise ConfigError(
            "is required where hosts have unequal numbers of processes", key="--cluster",
            found=f"{local} of {ranks} processes on this host",
            allowed="the cluster of the launched processes",
        )  # fmt: skip
    return f"{ranks // local}x{local}x{device}"


def threads_here(processes: int) -> int:
    """Threads of each of `processes` training processes; of a launched process its own number."""
    from shardwise.measure import threads_in_use
    from shardwise.runtime import threads_per_process

    return threads_in_use() if is_launched() else threads_per_process(processes)


def _started(variable: str) -> int:
    """A number in an environment variable of the launcher; ConfigError where it is missing."""
    text = os.environ.get(variable, "")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "is not set as torchrun sets it", key=variable, found=repr(text), allowed="1 or more"
        )
    return int(text)


def _started_here() -> int:
    """Processes of this host; all processes where the launcher does not set LOCAL_WORLD_SIZE."""
    return _started("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE")


def _check_hosts(cluster: Cluster, local: Sequence[int]) -> None:
    """ConfigError where the hosts of ranks (`local` has the number of ranks on the host of each) differ from
    the nodes of `cluster`."""
    hosts: list[int] = []
    while sum(hosts) < len(local):
        hosts.append(local[sum(hosts)])
    nodes = [node.devices for node in cluster.nodes]
    if nodes != hosts:
        raise ConfigError(
            "has other nodes than the launched processes", key="--cluster",
            found=f"nodes of {', '.join(map(str, nodes))} devices",
            allowed=f"nodes of {', '.join(map(str, hosts))}",
        )  # fmt: skip


@contextlib.contextmanager
def ranks_of(cluster: Cluster) -> Iterator[Ranks]:
    """The ranks of torchrun (or `emulate`), of which this process is one; else processes of this machine,
    which end with the context. ConfigError where the launched processes do not match the devices and nodes of
    `cluster`; RankLost where a launched rank ends."""
    if not is_launched():
        with contextlib.ExitStack() as teams:
            yield _OwnProcesses(teams=teams, speeds=(1.0,) * cluster.devices)
        return
    from shardwise.measure import launched_group
    from shardwise.runtime import WorkerPool, all_gather_json, peer_failures

    if _started("WORLD_SIZE") != cluster.devices:
        raise ConfigError(
            "has another number of devices than there are launched processes", key="--cluster",
            found=str(cluster.devices), allowed=os.environ["WORLD_SIZE"],
        )  # fmt: skip
    speeds = [node.speed for node in cluster.nodes for _ in range(node.devices)]
    with peer_failures(), launched_group() as rank, WorkerPool(1) as own_pool:
        _check_hosts(cluster, all_gather_json(_started_here()))
        yield _LaunchedProcesses(own_pool=own_pool, rank=rank, speeds=speeds)


class _OwnProcesses:
    """Processes of this machine: a pool of all, and a pool of one process per device. They end with
    `teams`."""

    rank = 0

    def __init__(self, *, teams: contextlib.ExitStack, speeds: Sequence[float]) -> None:
        from shardwise.runtime import WorkerPool

        self.speeds = speeds
        self._single_pools = [teams.enter_context(WorkerPool(1)) for _ in speeds]
        self._all = teams.enter_context(WorkerPool(len(speeds)))

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        with ThreadPoolExecutor(len(self._single_pools)) as pool:
            started = [pool.submit(team.run, 1, task, *arguments) for team in self._single_pools]
            return [each.result()[0] for each in started]

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        return self._all.run(len(self.speeds), task, *arguments)

    def gathered(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedProcesses:
    """This launched process, and a process of its own for tasks that run separately."""

    own_pool: WorkerPool
    rank: int
    speeds: Sequence[float]

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(self.own_pool.run(1, task, *arguments)[0])

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(task(None, *arguments))

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks; acts as a barrier."""
        from shardwise.runtime import all_gather_json

        return all_gather_json(value)


# Steps

STEPS = 3
"""Steps of a plan per measurement; the first is a warm-up."""


class StepMeasurement:
    """Step times of `plans` for one device, which all `ranks` start together: as in training, ranks that
    share a core then compete for it. ConfigError where no rank's device has speed 1."""

    def __init__(self, ranks: Ranks, plans: Sequence[Plan], *, threads: int) -> None:
        self.plans = plans
        self._ranks, self._threads = ranks, threads
        self._seconds: list[list[list[float]]] = [[[] for _ in plans] for _ in ranks.speeds]
        self._nominal_ranks = [rank for rank, speed in enumerate(ranks.speeds) if speed == 1.0]
        if not self._nominal_ranks:
            raise ConfigError(
                "has no device of speed 1, which a calibration needs", key="--cluster",
                found=f"speeds up to {max(ranks.speeds):g}", allowed="a node whose speed is 1",
            )  # fmt: skip

    def measure(self, number: int) -> None:
        """Measure steps of plan `number`; every rank calls this."""
        found = self._ranks.run_separately(_steps_s, self.plans[number], self._threads)
        for own, seconds in zip(self._seconds, found, strict=True):
            own[number] += seconds

    def medians(self, rank: int) -> list[float]:
        """The median step time of each plan on one rank, in seconds."""
        return [median(of) for of in self._seconds[rank]]

    def slowest(self) -> list[float]:
        """Per plan, the median over measurements of the slowest rank's step time, among ranks of speed 1:
        ranks that train together wait for the slowest."""
        of_nominal = (
            [self._seconds[rank][number] for rank in self._nominal_ranks] for number in range(len(self.plans))
        )
        return [median(map(max, zip(*of_ranks, strict=True))) for of_ranks in of_nominal]

    def median_rank(self) -> int:
        """The rank with the median total step time, among ranks of speed 1."""
        return sorted(self._nominal_ranks, key=lambda rank: sum(self.medians(rank)))[
            len(self._nominal_ranks) // 2
        ]


def _steps_s(report: object, plan: Plan, threads: int) -> list[float]:
    from shardwise.measure import use_threads
    from shardwise.runtime import StepRecord, TrainOptions, train

    use_threads(threads)
    records: list[StepRecord] = []
    train(records.append, plan, TrainOptions(steps=STEPS))
    return [record.step_time_s for record in records[1:]]


# Kernels and software

ONE_DEVICE = "1x1xcpu"
"""The cluster of the small plans: the device of one rank."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A fitted `device` and software `profile`. `measured` has counts and errors of the fit; `steps_s` are
    the step times of the small plans."""

    device: Device
    profile: Profile
    measured: Mapping[str, object]
    steps_s: tuple[float, ...]


class KernelMeasurement:
    """Times of kernels and of steps of small plans, measured on all ranks at once, since ranks share caches
    and cores in training.

    A round is each of `measurements` once. The speed of a shared machine varies within seconds and minutes,
    so there are many rounds of short measurements, with other work between them if need be.
    """

    def __init__(self, ranks: Ranks, *, threads: int) -> None:
        profile = accuracy.eager_profile()
        plans = accuracy.calibration_plans(load_cluster(ONE_DEVICE), profile)
        self.steps = StepMeasurement(ranks, plans, threads=threads)
        self._ranks, self._threads, self._profile = ranks, threads, profile
        self._kernels: list[list[KernelTimes]] = []

    @property
    def measurements(self) -> int:
        """Measurements per round: one per small plan, and one of all kernels."""
        return len(self.steps.plans) + 1

    def measure(self, measurement: int) -> None:
        """Run measurement number `measurement`; every rank calls this."""
        if measurement < len(self.steps.plans):
            self.steps.measure(measurement)
            return
        from shardwise.measure import KernelTimes

        found = self._ranks.run_in_group(_kernel_times, self._threads)
        self._kernels.append([KernelTimes.of_values(each) for each in found])

    def found(self, device: Device) -> MeasuredMachine:
        """`device` and software fitted to all rounds so far, on ranks of speed 1: kernel times are medians on
        the median rank, step times medians of the slowest rank."""
        from shardwise.measure import KernelTimes

        median_rank = self.steps.median_rank()
        times = KernelTimes.typical([of[median_rank] for of in self._kernels])
        seconds = self.steps.slowest()
        curves = accuracy.kernel_curves(times.matmuls, times.passes)
        attention = accuracy.attention_curve(
            times.attentions, launch_s=curves.launch_s, flop_per_s=curves.flop_per_s
        )
        device = accuracy.with_kernels(device, curves, attention, bf16_ratio=times.bf16_ratio)
        taken = [
            MeasuredStep(plan=plan, seconds=each)
            for plan, each in zip(self.steps.plans, seconds, strict=True)
        ]
        device, profile = accuracy.software_costs(taken, device, self._profile)
        measured = {
            "matmuls": accuracy.matmul_errors(curves, times.matmuls),
            "steps": accuracy.step_errors(taken, device, profile),
        }
        return MeasuredMachine(device, profile, measured, tuple(seconds))


def _kernel_times(report: object, threads: int) -> dict[str, object]:
    from shardwise.measure import group_timer, kernel_times, use_threads

    use_threads(threads)
    return asdict(kernel_times(group_timer(batches=2)))


# Links

REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS = 5, 40, 9
"""Repeats in a calibration: of each collective and size, of the lockstep time, and of a collective during
computation."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """`curves` of the tiers, the share of gradient reduction that computation overlaps (`hidden`), and the
    errors of the fit (`measured`)."""

    curves: Sequence[TierCurve]
    hidden: float
    measured: Mapping[str, object]

    def of_device(self, device: Device) -> Device:
        """`device` with these links."""
        return accuracy.with_links(device, self.curves)

    def of_software(self, profile: Profile) -> Profile:
        """`profile` with the overlapped share of gradient reduction."""
        return replace(profile, data_overlap=self.hidden)


class LinkMeasurement:
    """Times of collectives between the ranks of `cluster`.

    A round is each of `measurements` once: one per group, and one of collectives during computation on the
    outermost tier. The repeats of a calibration are split over its `rounds`, rounded up.
    """

    def __init__(self, ranks: Ranks, cluster: Cluster, *, threads: int, rounds: int = 1) -> None:
        self._ranks, self._cluster, self._threads = ranks, cluster, threads
        self._repeats = [ceil(each / rounds) for each in (REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS)]
        self._groups = groups_of(cluster)
        self._samples: list[list[LinkSample]] = [[] for _ in self._groups]
        self._lockstep_s: list[list[float]] = [[] for _ in self._groups]
        self._overlap: list[OverlapSample] = []

    @property
    def measurements(self) -> int:
        """Measurements per round."""
        return len(self._groups) + 1

    def measure(self, measurement: int) -> None:
        """Run measurement number `measurement`; every rank calls this."""
        repeats, lockstep_repeats, overlap_repeats = self._repeats
        if measurement == len(self._groups):
            _, members = self._groups[-1]
            measured_values = self._ranks.run_in_group(_overlap, members, self._threads, overlap_repeats)[0]
            self._overlap += [OverlapSample(**each) for each in measured_values]
            return
        _, members = self._groups[measurement]
        measured_values = self._ranks.run_in_group(
            _link_times, members, self._threads, repeats, lockstep_repeats
        )[0]
        self._samples[measurement] += [LinkSample(**each) for each in measured_values["samples"]]
        self._lockstep_s[measurement].append(measured_values["lockstep_s"])

    def found(self) -> LinkResult:
        """The curve of each tier, fitted to medians over the rounds so far."""
        curves, measured = [], {}
        for place, tier in enumerate(self._cluster.tiers):
            here = [number for number, (at, _) in enumerate(self._groups) if at == place]
            of = [sample for number in here for sample in median_samples(self._samples[number])]
            if of:
                unsharded = accuracy.link_curve([each for each in of if each.kind in accuracy.UNSHARDED])
                without_exchanges = accuracy.with_bidirectional(unsharded, of)
                curve = replace(without_exchanges, lockstep_s=median(self._lockstep_s[here[0]]))
                curves.append(TierCurve(tier=tier, curve=curve))
                measured[f"links of {tier.name}"] = dict(curve.errors(of))
        return LinkResult(curves, accuracy.hidden_share(self._overlap), measured)


def median_samples(samples: Sequence[LinkSample]) -> list[LinkSample]:
    """The median of each collective and size."""
    of: dict[tuple[Collective, int, float], list[LinkSample]] = {}
    for sample in samples:
        of.setdefault((sample.kind, sample.ranks, sample.nbytes), []).append(sample)
    return [replace(each[0], seconds=median(one.seconds for one in each)) for each in of.values()]


def groups_of(cluster: Cluster) -> list[tuple[int, list[list[int]]]]:
    """Per tier, disjoint groups of ranks that communicate over it and no outer tier: pairs, and the largest
    groups. The tier is its index."""
    groups: list[tuple[int, list[list[int]]]] = []
    inner = 1
    for place, tier in enumerate(cluster.tiers):
        width = tier.span // inner
        for size in sorted({2, width}):
            if width >= size > 1:
                starts = range(0, cluster.devices - tier.span + 1, tier.span)
                members = [
                    [start + offset + inner * (first + step) for step in range(size)]
                    for start in starts
                    for offset in range(inner)
                    for first in range(0, width - size + 1, size)
                ]
                groups.append((place, members))
        inner = tier.span
    return groups


def _link_times(
    report: object, members: Sequence[Sequence[int]], threads: int, repeats: int, lockstep_repeats: int
) -> dict[str, Any]:
    from shardwise.measure import link_times, lockstep_s, use_threads

    use_threads(threads)
    samples = link_times(members, repeats=repeats)
    return {
        "samples": [asdict(each) for each in samples],
        "lockstep_s": lockstep_s(members, repeats=lockstep_repeats),
    }


def _overlap(
    report: object, members: Sequence[Sequence[int]], threads: int, repeats: int
) -> list[dict[str, Any]]:
    from shardwise.measure import overlap_times, use_threads

    use_threads(threads)
    return [asdict(each) for each in overlap_times(members, repeats=repeats)]
