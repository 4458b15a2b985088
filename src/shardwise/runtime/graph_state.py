"""What a job under the plan of an operator graph saves and loads, by the names of the graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shardwise.runtime.graphs import GraphJob, Held
from shardwise.runtime.private import Boxes
from shardwise.runtime.state import first_states

Saved = dict[str, Tensor | Boxes]
"""Parameters as `model.NAME`, optimizer states as `optimizer.NAME.KIND`: boxes of the whole, but for the
number of steps, which is one number for each."""

STEP = "step"


def copied_of(job: GraphJob) -> Saved:
    """Copies of what this rank saves: over all ranks every element of each parameter and of its states is
    there once. Call it between steps."""
    saved: Saved = {}
    for held in job.store.values():
        for name, kind, own in _kept(job, held):
            if kind == STEP:
                saved[name] = own.to("cpu", copy=True)
            elif held.is_first_copy:
                saved[name] = _boxed(held, own.to("cpu", copy=True))
    return saved


def wanted_of(job: GraphJob) -> Saved:
    """All that this rank holds, copies too, in the job's own memory: what is put there the optimizer has."""
    return {
        name: own if kind == STEP else _boxed(held, own)
        for held in job.store.values()
        for name, kind, own in _kept(job, held)
    }


def _kept(job: GraphJob, held: Held) -> Iterator[tuple[str, str, Tensor]]:
    """What the optimizer updates of a parameter and keeps of it, each with its name and kind; states are made
    where there was no step yet."""
    yield f"model.{held.name}", "model", held.owned.detach()
    states = job.optimizer.state[held.owned]
    if not states:
        states.update(first_states(job.plan.job.optimizer, held.owned))
    for kind, own in states.items():
        yield f"optimizer.{held.name}.{kind}", kind, own


def _boxed(held: Held, own: Tensor) -> Boxes:
    return Boxes(held.stored.lie.shape, held.pieces(own))
