"""`StepParts`: computation, communication, overlap and idle time of a step, whose combination is the step
time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MECHANISMS = (
    "gradient_reduction", "parameter_gathering", "tensor", "context", "expert", "redistribution", "pipeline",
    "offload", "tied_weights", "gradient_norm",
)  # fmt: skip
"""What a rank communicates for. Gradients are reduced and parameters gathered among replicas; tensor, context
and expert parallelism communicate inside of layers; redistribution changes placements of tensors of operator
graphs; a pipeline sends activations and their gradients between
stages; offload copies tensors to the host and back; tied weights and replicated norms have one gradient on
several ranks; the gradient norm is one number of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTime:
    """Seconds of one step in which a rank communicates for one mechanism, and those of them in which it
    computes, waits for its host, or communicates for a mechanism that is counted first."""

    total_s: float
    hidden_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds by which the communication alone keeps the rank busy."""
        return self.total_s - self.hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of one step on its critical rank: the stage that works longest, of the slowest pipeline.

    `rank` is the first global rank of that stage, `pipeline` and `stage` are its numbers. `computation_s` has
    the kernels of the passes, recomputation and the optimizer, `slowdown_s` of them because communication
    runs at the same time. Idle time is the `bubble_s`, in which the rank waits for other ranks and neither
    computes nor communicates, and `host_s`, in which it waits for its host. `communication` has a
    `CommunicationTime` for each of `MECHANISMS`.

    step time = computation + communication - overlap + idle.
    """

    pipeline: int
    stage: int
    rank: int
    computation_s: float
    slowdown_s: float
    bubble_s: float
    host_s: float
    communication: Mapping[str, CommunicationTime]

    @property
    def communication_s(self) -> float:
        """Seconds of all mechanisms, hidden ones included."""
        return sum(one.total_s for one in self.communication.values())

    @property
    def overlap_s(self) -> float:
        """Hidden seconds of all mechanisms."""
        return sum(one.hidden_s for one in self.communication.values())

    @property
    def idle_s(self) -> float:
        """Seconds in which the rank waits for other ranks or for its host."""
        return self.bubble_s + self.host_s

    @property
    def step_time_s(self) -> float:
        """Computation + communication - overlap + idle."""
        return self.computation_s + self.communication_s - self.overlap_s + self.idle_s

    def to_dict(self) -> dict[str, object]:
        """The parts as plain values, in seconds."""
        return {
            "pipeline": self.pipeline,
            "stage": self.stage,
            "rank": self.rank,
            "computation_s": self.computation_s,
            "communication_s": self.communication_s,
            "overlap_s": self.overlap_s,
            "idle_s": self.idle_s,
            "slowdown_s": self.slowdown_s,
            "bubble_s": self.bubble_s,
            "host_s": self.host_s,
            "communication": {
                name: {"total_s": one.total_s, "hidden_s": one.hidden_s, "exposed_s": one.exposed_s}
                for name, one in self.communication.items()
            },
        }
