"""What a step spends and holds, entry by entry."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from shardwise.cost.turns import StepCounts

When = Literal["forward", "backward", "step"]
"""In which pass of a micro-batch seconds are spent, or once in the step."""

Place = tuple[int, str] | None
"""A block of the graph, repetitions counted, and an operator of it; None: nobody's in particular."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds that an operator spends on something, in each pass of a micro-batch or once in the step."""

    place: Place
    what: str
    when: When
    seconds: float


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes that come when the operator of this `order` works: what is kept from then until the backward pass
    is back there (`recomputed`: made again in the `block`, a recomputed one), or what one needs while it
    works."""

    order: int
    block: int
    nbytes: float
    is_recomputed: bool = False


@dataclass(slots=True)
class StepLedger:
    """Seconds and bytes of a step in the making.

    `seconds` of the step by what they are spent on, `passes` by when, of one micro-batch; `spent` are the
    latter one by one, each by what is `at` work. `computed_s` are a micro-batch's backward computation,
    `busy_s` of which have communication of their own beside them. Gradients are summed for `summed_s`, of
    which `hideable_s` may run beside the rest. `resident` bytes by what they are; `recomputed_bytes` and
    `peak_bytes` are of the block at work, `most_bytes` the largest sum of both of any block.

    `order` numbers the operators that worked so far, `block` the blocks; `saved_tensors` and `needs` are
    bytes that come and go with them, for the most that is there at one moment."""

    counts: StepCounts
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    passes: defaultdict[When, float] = field(default_factory=lambda: defaultdict(float))
    at: Place = None
    spent: defaultdict[tuple[Place, str, When], float] = field(default_factory=lambda: defaultdict(float))
    resident: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    computed_s: float = 0.0
    busy_s: float = 0.0
    summed_s: float = 0.0
    hideable_s: float = 0.0
    recomputed_bytes: float = 0.0
    peak_bytes: float = 0.0
    most_bytes: float = 0.0
    order: int = 0
    block: int = 0
    saved_tensors: list[_Bytes] = field(default_factory=list)
    needs: list[_Bytes] = field(default_factory=list)

    def spend(self, what: str, seconds: float, when: When) -> None:
        """Seconds of their own: of each micro-batch, or of the step."""
        self.seconds[what] += seconds * (1 if when == "step" else self.counts.microbatches)
        self.passes[when] += seconds
        self.spent[self.at, what, when] += seconds

    def compute_backward(self, what: str, seconds: float) -> None:
        """Seconds of computation beside which gradients may be summed."""
        self.spend(what, seconds, "backward")
        self.computed_s += seconds

    def charges(self) -> tuple[Charge, ...]:
        """All that was spent so far but the sums of gradients, in the order in which it came."""
        return tuple(Charge(*key, seconds) for key, seconds in self.spent.items())

    def sum_gradient(self, seconds: float, overlap: float) -> None:
        """Seconds of a gradient's summation, of which so large a share can hide."""
        self.summed_s += seconds
        self.hideable_s += overlap * seconds

    def save(self, nbytes: float, since: int) -> None:
        """Bytes of activations that wait for the backward pass since the operator of that order."""
        self.resident["activations"] += nbytes * self.counts.in_flight
        self.saved_tensors.append(_Bytes(since, self.block, nbytes))

    def save_recomputed(self, nbytes: float, since: int) -> None:
        """The same of what a recomputation makes, for the block at work alone."""
        self.recomputed_bytes += nbytes
        self.saved_tensors.append(_Bytes(since, self.block, nbytes, is_recomputed=True))

    def need(self, nbytes: float) -> None:
        """Bytes that one moment of the block needs."""
        self.peak_bytes = max(self.peak_bytes, nbytes)
        self.need_now(nbytes)

    def need_now(self, nbytes: float) -> None:
        """Bytes that are counted at another moment, and needed at this one too."""
        self.needs.append(_Bytes(self.order, self.block, nbytes))

    def end_block(self) -> None:
        """The next block begins with nothing made again."""
        self.most_bytes = max(self.most_bytes, self.recomputed_bytes + self.peak_bytes)
        self.recomputed_bytes = self.peak_bytes = 0.0
        self.block += 1

    def at_once_bytes(self) -> float:
        """The most bytes of tensors that are there at one moment: while an operator works, in either pass, of
        this micro-batch what it and those before it keep, and all that is kept of the others."""
        saved, recomputed = (
            sorted(
                (each for each in self.saved_tensors if each.is_recomputed == is_recomputed),
                key=lambda each: each.order,
            )
            for is_recomputed in (False, True)
        )
        all_saved = sum(each.nbytes for each in saved)
        always = sum(self.resident.values()) - all_saved
        most, there, own = always + all_saved, 0.0, 0.0
        block = at = made = 0
        for need in sorted(self.needs, key=lambda each: each.order):
            while at < len(saved) and saved[at].order <= need.order:
                there += saved[at].nbytes
                at += 1
            if need.block != block:
                block, own = need.block, 0.0
            while made < len(recomputed) and recomputed[made].order <= need.order:
                own += recomputed[made].nbytes if recomputed[made].block == block else 0.0
                made += 1
            most = max(most, always + there + own + need.nbytes)
        return most

    def exposed_s(self) -> float:
        """As many of the gradients' seconds as do not hide beside the last micro-batch."""
        return self.summed_s - min(self.hideable_s, self.computed_s - self.busy_s)
