"""How long everything in a training step takes, for a batch of cases of one schedule table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import InternalError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of every piece of work; stages in rows of shape (batch, stages), hops of shape (batch, stages -
    1).

    Overlap is folded in already: these are the times that the actions take, and what is left of gathering and
    reduction beside them. The step they describe, read by both evaluators alike:

    - each rank runs its actions in table order on its compute stream;
    - F of stage s waits for F of stage s - 1 and `hop_forward_s[s - 1]` after it; B (or I) waits for the B
      (or I) of stage s + 1 and `hop_backward_s[s]` after it; W waits for its own I. A hop keeps neither rank
      busy;
    - gathers run from time 0 on the rank's communication stream, one after another in the order in which the
      rank's stages first run; a stage's first F waits for its gather;
    - reductions run on the same stream: a stage's starts when its last B or W has finished and the rank's
      earlier ones (in the order of those last actions) are done;
    - the step ends when everything has.
    """

    forward_s: Floats
    backward_s: Floats
    backward_input_s: Floats
    backward_weight_s: Floats
    gather_s: Floats
    reduce_s: Floats
    hop_forward_s: Floats
    hop_backward_s: Floats

    def __post_init__(self) -> None:
        batch, stages = self.forward_s.shape
        for field in fields(self):
            values: Floats = getattr(self, field.name)
            expected_shape = (batch, stages - 1 if field.name.startswith("hop") else stages)
            if values.shape != expected_shape:
                raise InternalError(f"durations: {field.name} has shape {values.shape}, not {expected_shape}")
            # Comparisons with NaN fail; `initial` stands for columns without values.
            if not (values.min(initial=0.0) >= 0.0 and values.max(initial=0.0) < np.inf):
                raise InternalError(f"durations: {field.name} is negative or not finite")

    @staticmethod
    def of(
        *,
        stages: int,
        batch: int = 1,
        forward_s: ArrayLike,
        backward_s: ArrayLike = 0.0,
        backward_input_s: ArrayLike = 0.0,
        backward_weight_s: ArrayLike = 0.0,
        gather_s: ArrayLike = 0.0,
        reduce_s: ArrayLike = 0.0,
        hop_forward_s: ArrayLike = 0.0,
        hop_backward_s: ArrayLike = 0.0,
    ) -> Durations:
        """Durations from anything that broadcasts to the shapes above: a number, one value per stage, or a
        batch.
        """

        def filled(values: ArrayLike, columns: int) -> Floats:
            return np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.float64), (batch, columns)))

        return Durations(
            forward_s=filled(forward_s, stages),
            backward_s=filled(backward_s, stages),
            backward_input_s=filled(backward_input_s, stages),
            backward_weight_s=filled(backward_weight_s, stages),
            gather_s=filled(gather_s, stages),
            reduce_s=filled(reduce_s, stages),
            hop_forward_s=filled(hop_forward_s, stages - 1),
            hop_backward_s=filled(hop_backward_s, stages - 1),
        )

    @staticmethod
    def joined(several: Sequence[Durations]) -> Durations:
        """The cases of all of these, which have as many stages, in their order."""
        if len(several) == 1:
            return several[0]
        return Durations(
            **{
                field.name: np.concatenate([getattr(one, field.name) for one in several])
                for field in fields(Durations)
            }
        )

    @property
    def batch(self) -> int:
        """How many cases there are."""
        return int(self.forward_s.shape[0])

    @property
    def stages(self) -> int:
        """How many pipeline stages each case has."""
        return int(self.forward_s.shape[1])

    def rows(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Durations:
        """The cases of the batch that `which` selects."""
        return Durations(**{field.name: getattr(self, field.name)[which] for field in fields(self)})
