"""What a step of training says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Mean loss over the whole batch, and the norm of its gradient before clipping."""

    loss: float
    gradient_norm: float
