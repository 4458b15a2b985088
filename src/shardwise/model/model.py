"""What is trained: a decoder stack as typed operators, independent of any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.operators import Operator, Weight

DROPOUT = "dropout"
"""What the names of operators that drop activations end with."""

MTP_PREFIX = "mtp."
"""Operators of multi-token-prediction modules have names that start with this, and lie in `Model.head`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routing of a mixture-of-experts layer.

    `groups` and `groups_per_token` limit a token's experts to so many groups (DeepSeek's node-limited
    routing); equal to 1 where routing is free. `capacity_factor` None means dropless.
    """

    experts: int
    top_k: int
    groups: int = 1
    groups_per_token: int = 1
    capacity_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kind of decoder layer.

    `tensor_syncs` counts the places in the forward pass where tensor parallelism joins its partial results
    outside the experts (2 in a sequential layer, 1 where attention and MLP run in parallel or where the MLP
    is a routed one without shared experts, since experts sync over etp).
    """

    name: str
    operators: tuple[Operator, ...]
    experts: Experts | None = None
    tensor_syncs: int = 2

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for operator in self.operators for weight in operator.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A causal language model: embedding, a stack of layers by kind, head.

    `pattern[i]` is the index into `kinds` of decoder layer i. `head` holds the final norm, the output
    projection, the loss, and after them the operators of `head_layers` multi-token-prediction modules (their
    names start with `MTP_PREFIX`), which route like `head_experts`. With `tied_embeddings` the output
    projection's weight is the embedding's: counted once, kept twice when the ends lie on different stages,
    and synchronised. `config` is the source, as read: `model_from_config(config)` builds an equal model.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    kinds: tuple[Layer, ...]
    pattern: tuple[int, ...]
    embedding: tuple[Operator, ...]
    head: tuple[Operator, ...]
    head_experts: Experts | None = None
    head_layers: int = 0
    head_tensor_syncs: int = 0
    tied_embeddings: bool = False
    max_seq_len: int | None = None
    config: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> int:
        """Number of decoder layers, embedding and head apart."""
        return len(self.pattern)

    def without_dropout(self) -> Model:
        """The model as software trains it that drops nothing, whatever the config says."""
        return replace(
            self,
            kinds=tuple(replace(kind, operators=_without_dropout(kind.operators)) for kind in self.kinds),
            embedding=_without_dropout(self.embedding),
            head=_without_dropout(self.head),
        )

    @property
    def special_parts(self) -> tuple[str, ...]:
        """What not all software that trains models of the family has, by the words of capability files."""
        parts = {
            "multi-token prediction": self.head_layers > 0,
            "expert capacity": any(kind.experts and kind.experts.capacity_factor for kind in self.kinds),
        }
        return tuple(name for name, is_there in parts.items() if is_there)

    @property
    def experts(self) -> Experts | None:
        """Routing of the first mixture-of-experts layer, or None for a dense model."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)


def _without_dropout(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Those that drop nothing."""
    return tuple(operator for operator in operators if operator.name.rpartition(".")[2] != DROPOUT)
