"""The processes that `calibrate` measures on: those that a launcher started, or its own.

Steps of small plans on every rank at a time: what software costs, and how fast machines are by now.

Kernels and steps of small plans, piece by piece on every rank at a time, and what all pieces tell.

Collectives between the ranks of a cluster, piece by piece, and what all pieces tell of its links.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import fmean, median
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


TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

RankTask = Callable[..., Any]
"""Called as `task(report, *arguments)` in a process group, as a team's is; returns what JSON holds."""


class Ranks(Protocol):
    """As many processes as a cluster has devices. `rank` is that of this process, `speeds` how fast the
    device of each is beside one of speed 1."""

    @property
    def rank(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float]: ...

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        """What `task` returns on every rank, each in a group of its own; all begin at once."""

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        """What `task` returns on every rank, all in one group."""

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of this process, and of each that a launcher started beside it."""


def is_launched() -> bool:
    """Whether a launcher (or `emulate`) started this process, as one of several."""
    return TORCHRUN_VARIABLE in os.environ


def cluster_here(device: str) -> str:
    """A cluster of all processes that were started, on hosts of as many as this one's; or of one for each
    core."""
    if not is_launched():
        return f"1x{os.cpu_count() or 1}x{device}"
    ranks, local = _started("WORLD_SIZE"), _started_here()
    if ranks % local:
        raise ConfigError(
            "is needed where hosts have unequal numbers of processes", key="--cluster",
            found=f"{local} of {ranks} processes on this host", allowed="the cluster that was started",
        )  # fmt: skip
    return f"{ranks // local}x{local}x{device}"


def threads_here(processes: int) -> int:
    """How many threads each of so many processes trains with; where a launcher started this one, its own."""
    from shardwise.measure import threads_in_use
    from shardwise.runtime import threads_per_process

    return threads_in_use() if is_launched() else threads_per_process(processes)


def _started(variable: str) -> int:
    """A number that launchers set; ConfigError where it is not there."""
    text = os.environ.get(variable, "")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "is not set as torchrun sets it", key=variable, found=repr(text), allowed="a number from 1 on"
        )
    return int(text)


def _started_here() -> int:
    """Processes of this host; all of them where the launcher does not say."""
    return _started("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE")


def _check_hosts(cluster: Cluster, local: Sequence[int]) -> None:
    """ConfigError where ranks, each on a host with so many, are not placed as the devices of `cluster`."""
    hosts: list[int] = []
    while sum(hosts) < len(local):
        hosts.append(local[sum(hosts)])
    nodes = [node.devices for node in cluster.nodes]
    if nodes != hosts:
        raise ConfigError(
            "has other nodes than processes were started on", key="--cluster",
            found=f"nodes of {', '.join(map(str, nodes))} devices",
            allowed=f"nodes of {', '.join(map(str, hosts))}",
        )  # fmt: skip


@contextlib.contextmanager
def ranks_of(cluster: Cluster) -> Iterator[Ranks]:
    """Those that torchrun (or `emulate`) started, of which this process is one; else processes of this
    machine, which end with this. ConfigError where other numbers were started than there are
    devices, or on other hosts; RankLost where a rank of a launcher is gone."""
    if not is_launched():
        with contextlib.ExitStack() as teams:
            yield _OwnProcesses(teams=teams, speeds=(1.0,) * cluster.devices)
        return
    from shardwise.measure import launched_group
    from shardwise.runtime import WorkerPool, all_gather_json, peer_failures

    if _started("WORLD_SIZE") != cluster.devices:
        raise ConfigError(
            "has another number of devices than processes were started", key="--cluster",
            found=str(cluster.devices), allowed=os.environ["WORLD_SIZE"],
        )  # fmt: skip
    speeds = [node.speed for node in cluster.nodes for _ in range(node.devices)]
    with peer_failures(), launched_group() as rank, WorkerPool(1) as own_pool:
        _check_hosts(cluster, all_gather_json(_started_here()))
        yield _LaunchedProcesses(own_pool=own_pool, rank=rank, speeds=speeds)


class _OwnProcesses:
    """Processes that live until `teams` ends: one group of them all, and one of each alone."""

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
    """This process among those of a launcher, and one that it started, which is in no group with others."""

    own_pool: WorkerPool
    rank: int
    speeds: Sequence[float]

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(self.own_pool.run(1, task, *arguments)[0])

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(task(None, *arguments))

    def gathered(self, value: Any) -> list[Any]:
        """When all have: so none begins what follows before the others."""
        from shardwise.runtime import all_gather_json

        return all_gather_json(value)


STEPS = 3
"""Of a plan at a time, the first to warm up."""


class StepMeasurement:
    """Seconds of steps of `plans`, of one device each, which all `ranks` begin together: as in training they
    do alike things at like times, for which two that share a core wait for each other. ConfigError where no
    rank's device has speed 1."""

    def __init__(self, ranks: Ranks, plans: Sequence[Plan], *, threads: int) -> None:
        self.plans = plans
        self._ranks, self._threads = ranks, threads
        self._seconds: list[list[list[float]]] = [[[] for _ in plans] for _ in ranks.speeds]
        self._nominal_ranks = [rank for rank, speed in enumerate(ranks.speeds) if speed == 1.0]
        if not self._nominal_ranks:
            raise ConfigError(
                "has no device of speed 1, which a calibration is of", key="--cluster",
                found=f"speeds up to {max(ranks.speeds):g}", allowed="a node whose speed is 1",
            )  # fmt: skip

    def measure(self, number: int) -> None:
        """Some steps of one of the plans; every rank calls this."""
        found = self._ranks.run_separately(_steps_s, self.plans[number], self._threads)
        for own, seconds in zip(self._seconds, found, strict=True):
            own[number] += seconds

    def medians(self, rank: int) -> list[float]:
        """Of one rank, a step of each plan."""
        return [median(of) for of in self._seconds[rank]]

    def slowest(self) -> list[float]:
        """A step of each plan, the median of what the slowest rank took each time, of those whose device has
        speed 1: now it is one, now another, and ranks that train together wait for it."""
        of_nominal = (
            [self._seconds[rank][number] for rank in self._nominal_ranks] for number in range(len(self.plans))
        )
        return [median(map(max, zip(*of_ranks, strict=True))) for of_ranks in of_nominal]

    def median_rank(self) -> int:
        """The rank in the middle, of those whose device has speed 1."""
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


ONE_DEVICE = "1x1xcpu"
"""What the small plans are for: each rank's own device."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A measured `device` and its software. `measured` says how much was, and how well curves explain it;
    `steps_s` are the seconds of a step of each small plan."""

    device: Device
    profile: Profile
    measured: Mapping[str, object]
    steps_s: tuple[float, ...]


class KernelMeasurement:
    """What ranks take for kernels and for steps of small plans, measured on all of them at a time, as they
    share caches and cores when they train.

    A round is each of `measurements` once: a machine that others use too is faster and slower from second to
    second and from minute to minute, so rounds are many and pieces short, and may have other work between
    them."""

    def __init__(self, ranks: Ranks, *, threads: int) -> None:
        profile = accuracy.eager_profile()
        plans = accuracy.calibration_plans(load_cluster(ONE_DEVICE), profile)
        self.steps = StepMeasurement(ranks, plans, threads=threads)
        self._ranks, self._threads, self._profile = ranks, threads, profile
        self._kernels: list[list[KernelTimes]] = []

    @property
    def measurements(self) -> int:
        """A piece for each small plan, and one for all kernels."""
        return len(self.steps.plans) + 1

    def measure(self, measurement: int) -> None:
        """Measure the piece of this number; every rank calls this."""
        if measurement < len(self.steps.plans):
            self.steps.measure(measurement)
            return
        from shardwise.measure import KernelTimes

        found = self._ranks.run_in_group(_kernel_times, self._threads)
        self._kernels.append([KernelTimes.of_values(each) for each in found])

    def found(self, device: Device) -> MeasuredMachine:
        """`device` with what all rounds so far tell of it, by those ranks whose device has speed 1: medians
        of kernels of the one in the middle, and of steps of the slowest each time."""
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
        errors = [
            abs(accuracy.predicted_step_s(step.plan, device, profile) / step.seconds - 1.0) for step in taken
        ]
        measured = {
            "matmuls": {
                "times": len(times.matmuls),
                "mean_error": accuracy.mean_error(curves.matmul_s, times.matmuls),
            },
            "steps": {
                "times": len(taken),
                "mean_error": fmean(errors),
                "worst_error": max(errors),
                "seconds": sum(seconds),
            },
        }
        return MeasuredMachine(device, profile, measured, tuple(seconds))


def _kernel_times(report: object, threads: int) -> dict[str, object]:
    from shardwise.measure import group_timer, kernel_times, use_threads

    use_threads(threads)
    return asdict(kernel_times(group_timer(batches=2)))


REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS = 5, 40, 9
"""Of each collective and size, of waits for each other, and of sums beside computation in a calibration."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """`curves` of the tiers, the share of sums of gradients that passes beside computation (`hidden`), and
    how well curves explain what was `measured`."""

    curves: Sequence[TierCurve]
    hidden: float
    measured: Mapping[str, object]

    def of_device(self, device: Device) -> Device:
        """`device` with these links."""
        return accuracy.with_links(device, self.curves)

    def of_software(self, profile: Profile) -> Profile:
        """`profile` with what passes beside computation here."""
        return replace(profile, data_overlap=self.hidden)


class LinkMeasurement:
    """What collectives take between the ranks of `cluster`.

    A round is each of `measurements` once: one for each of the groups, and one for what passes beside
    computation between the ranks that are furthest apart. A calibration of so many `rounds` has about as many
    repeats as one that measures all of a piece at once: so many of each in a round, rounded up."""

    def __init__(self, ranks: Ranks, cluster: Cluster, *, threads: int, rounds: int = 1) -> None:
        self._ranks, self._cluster, self._threads = ranks, cluster, threads
        self._repeats = [ceil(each / rounds) for each in (REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS)]
        self._groups = groups_of(cluster)
        self._samples: list[list[LinkSample]] = [[] for _ in self._groups]
        self._lockstep_s: list[list[float]] = [[] for _ in self._groups]
        self._overlap: list[OverlapSample] = []

    @property
    def measurements(self) -> int:
        return len(self._groups) + 1

    def measure(self, measurement: int) -> None:
        """Measure the piece of this number; every rank calls this."""
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
        """The curve of each tier, by medians over the rounds so far."""
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
    """Tier, and disjoint groups of as many ranks each that cross it and no tier beyond: pairs, and the
    largest."""
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
