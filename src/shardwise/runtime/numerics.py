"""What modules compute with beside sizes: activations, epsilons, positions, scales, routing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.model import GroupedQueryAttentionShape, LatentAttentionShape
from shardwise.runtime.rope import Rope, Scaling

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How a gated MLP puts its two halves together: activated(gate) * (up + `shift`).

    With a `limit` both are cut there first (the gate only above); SiLU is x * sigmoid(`gain` * x).
    """

    activation: Activation
    gain: float = 1.0
    shift: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are found, and what weighs them.

    `score` of an expert is its probability among all (`softmax`) or its own (`sigmoid`). A group of experts
    counts as much as its `best_of_group` highest together. What a token takes is `renormalised` to sum 1 or
    not, and multiplied by `scale`. With `correction` a vector that no gradient changes is added to the scores
    where experts are chosen, not where they are weighed (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    best_of_group: int = 1
    correction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """All that modules compute with and that no size tells.

    `rope_share` of each head turns. Layers with a window turn by `window_theta` and without scaling, where
    that is given. Scores are divided by the square root of `score_divisor` (None: of the elements of a key),
    multiplied by `score_factor` and kept below `score_cap`, logits below `logit_cap`, smoothly. `alibi` says
    what a head's slope is multiplied by where positions are slopes (Press et al. 2021, arXiv 2108.12409).
    Learned positions begin at row `first_position` of their table; token embeddings `are_scaled` by the
    square root of the hidden size. `latent_epsilon` is that of the norms of latents.
    """

    activation: Activation
    epsilon: float = 1e-6
    latent_epsilon: float = 1e-6
    rope_share: float = 1.0
    theta: float = 10_000.0
    scaling: Scaling | None = None
    window_theta: float | None = None
    interleaved: bool = False
    rope_attention_factor: float = 1.0
    alibi: float | None = None
    score_divisor: float | None = None
    score_factor: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    first_position: int = 0
    are_scaled: bool = False
    expert_gate: Gate | None = None
    routing: Routing = field(default_factory=Routing)

    @property
    def gate(self) -> Gate:
        """Of the MLPs that every token takes."""
        return Gate(activation=self.activation)

    def rope(self, shape: GroupedQueryAttentionShape | LatentAttentionShape) -> Rope | None:
        """How queries and keys of attention of this shape turn; None where they do not."""
        if isinstance(shape, LatentAttentionShape):
            dims = shape.rope_dim
        elif shape.rotary:
            dims = int(shape.head_dim * self.rope_share)
        else:
            return None
        rope = Rope(
            dims=dims,
            theta=self.theta,
            scaling=self.scaling,
            interleaved=self.interleaved,
            length=self.rope_attention_factor,
        )
        if (
            self.window_theta is not None
            and isinstance(shape, GroupedQueryAttentionShape)
            and shape.window is not None
        ):
            return replace(rope, theta=self.window_theta, scaling=None, length=1.0)
        return rope

    def score_scale(self, elements: int) -> float:
        """What products of queries and keys of so many `elements` are multiplied by."""
        return (self.score_divisor or elements) ** -0.5 * self.score_factor
