"""The cost of one pipeline stage: formulas on columns of any shape.

Stages of uniform strategies (columns over places and rows) and of uneven plans (columns over shapes and
kinds, `cost.single_stage`) use the same ones. docs/concepts/cost-model.md, sections 10 and 12 to 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cluster import Efficiency
from shardwise.cost.stages import Sums
from shardwise.equations import memory, pipeline
from shardwise.strategy import Profile

# Recomputation


def recompute_s(stage: Sums, is_selective: Any, share: Any) -> Any:
    """Seconds that a backward pass recomputes; `share` of the layers' work is recomputed in full."""
    return np.where(is_selective, stage.selective_s, share * stage.full_s)


def saved_bytes(stage: Sums, is_selective: Any, share: Any) -> Any:
    """Saved activations of one micro-batch; `share` of the layers save their inputs only."""
    partly = memory.saved_activation_bytes(stage.saved_bytes, stage.input_bytes, share)
    return np.where(is_selective, stage.selective_bytes, partly)


# Times


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one micro-batch on a stage: forward, gradient of the inputs, gradient of the weights."""

    forward_s: Any
    input_s: Any
    weight_s: Any

    @property
    def backward_s(self) -> Any:
        """A whole backward pass."""
        return self.input_s + self.weight_s


def phases_of(
    stage: Sums, host_action_s: Any, recompute_s: Any, added_s: tuple[Any, Any] = (0.0, 0.0)
) -> Phases:
    """The phases with the host's seconds per action and with recomputation.

    `added_s` is exposed in (forward, backward): sends that block, copies to the host and back.
    """
    return Phases(
        stage.forward_s + (host_action_s + added_s[0]),
        stage.input_s + (host_action_s + added_s[1]) + recompute_s,
        stage.weight_s,
    )


def with_sends(forward_s: Any, backward_s: Any, hops_s: Any, overlap: float) -> tuple[Any, Any, Any]:
    """(Forwards, backwards, sends) of the stages of a pipeline, first stage first, where the share `overlap`
    of each send overlaps with the next action of its sender.

    The sender's action takes longer by the rest. `hops_s` are the sends between neighbours: one less.
    """
    blocked_s = [(1.0 - overlap) * hop_s for hop_s in hops_s]
    return (
        [own_s + sent_s for own_s, sent_s in zip(forward_s, [*blocked_s, 0.0], strict=True)],
        [own_s + sent_s for own_s, sent_s in zip(backward_s, [0.0, *blocked_s], strict=True)],
        [overlap * hop_s for hop_s in hops_s],
    )


@dataclass(frozen=True, slots=True)
class StageEnds:
    """Gathering before a stage's first forward and reduction after its last backward, before any overlap.

    `forward_s` and `backward_s` are the seconds of these actions in which no other collective uses the same
    links. The share `overlap` of both collectives overlaps with them, in one bucket per layer.
    """

    gathering_s: Any
    reduction_s: Any
    forward_s: Any
    backward_s: Any
    layers: Any
    overlap: Any

    @property
    def exposed_s(self) -> tuple[Any, Any]:
        """(Exposed gathering, exposed reduction)."""
        buckets = np.maximum(self.layers, 1)
        return (
            pipeline.gathering_before_forward_s(self.gathering_s, self.forward_s, buckets, self.overlap),
            pipeline.reduction_after_backward_s(self.reduction_s, self.backward_s, buckets, self.overlap),
        )


# Memory


def peak_activation_bytes(in_flight: Any, recomputed: Any, waiting: Any = 0.0) -> Any:
    """Activations at the peak: those in flight, one layer's recomputed tensors, and those that wait for a
    weight gradient.

    A layer's recomputed tensors are freed before those of the next layer, but for the ones that wait.
    """
    return in_flight + recomputed + waiting


def allocated_bytes(
    parameters: Any,
    gradients: Any,
    optimizer: Any,
    gathered: Any,
    activations: Any,
    temporaries: Any,
    buffers: Any,
) -> Any:
    """Bytes in tensors: the sum of these parts of a rank's memory."""
    return (parameters + gradients + optimizer + gathered) + (activations + (temporaries + buffers))


BOUNDARY_BUFFERS = 4.0
"""Number of receive and send buffers of a pipeline stage: one each, in both directions."""


def boundary_buffers(profile: Profile, microbatches: Any, tp: Any) -> Any:
    """Number of these buffers; where the software keeps those of all micro-batches of a step, of the whole
    message on every tensor rank."""
    if not profile.buffers_all_microbatches:
        return BOUNDARY_BUFFERS
    return np.maximum(2.0 * microbatches * tp, BOUNDARY_BUFFERS)


def boundary_bytes(is_piped: Any, hop_bytes: Any, buffers: Any = BOUNDARY_BUFFERS) -> Any:
    """Buffers for sends between stages; 0 where a stage has no neighbours."""
    return np.where(is_piped, buffers, 0.0) * hop_bytes


def communicators(*sizes: Any) -> Any:
    """Communicators that a rank opens: one for the world, one per axis with more than one rank."""
    return sum((1.0 * (size > 1) for size in sizes), start=1.0)


def outside_tensors(efficiency: Efficiency, allocated: Any, opened: Any) -> tuple[Any, Any, Any]:
    """Bytes on a device outside of tensors: fragmentation, `opened` communicators, the driver's context."""
    fragmentation = memory.reserved_bytes(allocated, efficiency.fragmentation_ratio) - allocated
    return fragmentation, opened * efficiency.communicator_bytes, efficiency.context_bytes


def device_bytes(efficiency: Efficiency, allocated: Any, opened: Any) -> Any:
    """All bytes on a device with `allocated` bytes in tensors."""
    fragmentation, of_communicators, context = outside_tensors(efficiency, allocated, opened)
    return allocated + fragmentation + (of_communicators + context)


def allocated_within(efficiency: Efficiency, nbytes: Any, opened: Any) -> Any:
    """Bytes in tensors that make up `nbytes` on a device: the inverse of `device_bytes`."""
    fixed = opened * efficiency.communicator_bytes + efficiency.context_bytes
    return (nbytes - fixed) / (1.0 + efficiency.fragmentation_ratio)
