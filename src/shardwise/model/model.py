"""The records of a model: a decoder stack as typed operators, independent of any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.operators import Operator, Weight

DROPOUT = "dropout"
"""Last part of the names of dropout operators."""

MTP_PREFIX = "mtp."
"""Prefix of the names of operators of multi-token-prediction modules, which are part of `Model.head`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routing of a mixture-of-experts layer.

    The experts of a token are in `groups_per_token` of `groups` groups (DeepSeek's node-limited routing);
    both are 1 where routing is unrestricted. `capacity_factor` None means dropless.
    """

    experts: int
    top_k: int
    groups: int = 1
    groups_per_token: int = 1
    capacity_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kind of decoder layer.

    `tensor_syncs` is the number of reductions over tensor-parallel ranks in the forward pass, outside the
    experts. It is 2 in a sequential layer. It is 1 where attention and MLP run in parallel, and where the MLP
    has only routed experts, which reduce over etp.
    """

    name: str
    operators: tuple[Operator, ...]
    experts: Experts | None = None
    tensor_syncs: int = 2

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for operator in self.operators for weight in operator.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of rank `r` on the modules with these names. `dropout` is that of their inputs, which no
    estimate counts."""

    r: int
    target_modules: tuple[str, ...]
    dropout: float = 0.0

    @property
    def config(self) -> dict[str, object]:
        """The adapters under PEFT's keys."""
        found: dict[str, object] = {"r": self.r, "target_modules": list(self.target_modules)}
        return found | ({"lora_dropout": self.dropout} if self.dropout else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A causal language model: embedding, a stack of layers by kind, head.

    `heads` and `kv_heads` divide those of every layer. `pattern[i]` is the index into `kinds` of decoder
    layer i. `head` has the final norm, the output projection and the loss, then the operators of
    `head_layers` multi-token-prediction modules (their names start with `MTP_PREFIX`) with the routing of
    `head_experts`. With `tied_embeddings` the embedding's weight is also the output projection's. It counts
    once; where both are on different stages, each stage has a copy and the gradients are all-reduced.
    `labels` is the number of outputs of a classifier or reward model. With `lora` the weights are frozen and
    the kinds have the operators of its adapters (`shardwise.model.lora`).
    A model with a vision tower has `patches` per sequence, which the tower works on, and `image_tokens` of
    the sequence; the operators of the tower and of its projector are the first of `embedding`. `frozen` are
    the parts whose weights are not trained (`shardwise.model.freezing`).
    `notes` say what is not counted and which keys of the config were ignored. `config` is the config as read:
    `model_from_config(config)` builds an equal model.
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
    labels: int | None = None
    lora: Lora | None = None
    patches: int = 0
    image_tokens: int = 0
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def layers(self) -> int:
        """Number of decoder layers, without embedding and head."""
        return len(self.pattern)

    @property
    def has_dropout(self) -> bool:
        """Whether some layer has dropout; its attention then drops scores too."""
        return any(is_dropout(operator) for kind in self.kinds for operator in kind.operators)

    def without_dropout(self) -> Model:
        """The model without dropout, for software that does not apply it."""
        return replace(
            self,
            kinds=tuple(replace(kind, operators=_without_dropout(kind.operators)) for kind in self.kinds),
            embedding=_without_dropout(self.embedding),
            head=_without_dropout(self.head),
        )

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some weights are not trained."""
        return self.lora is not None or bool(self.frozen)

    @property
    def embedding_copies(self) -> int:
        """Copies of the embedding's weights that the head's rank has where the embedding is on another: one
        for the tied output projection, one for the tokens of multi-token prediction (Megatron-LM)."""
        return self.tied_embeddings + (self.head_layers > 0)

    @property
    def special_parts(self) -> tuple[str, ...]:
        """Parts that not all software for the family supports, by their names in capability files."""
        parts = {
            "multi-token prediction": self.head_layers > 0,
            "head of labels": self.labels is not None,
            "LoRA": self.lora is not None,
            "vision towers": self.patches > 0,
            "frozen parts": bool(self.frozen),
            "expert capacity": any(kind.experts and kind.experts.capacity_factor for kind in self.kinds),
        }
        return tuple(name for name, is_there in parts.items() if is_there)

    @property
    def experts(self) -> Experts | None:
        """Routing of the first mixture-of-experts layer; None for a dense model."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)


def is_dropout(operator: Operator) -> bool:
    """Whether an operator is dropout, by its name."""
    return operator.name.rpartition(".")[2] == DROPOUT


def _without_dropout(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The operators that are not dropout."""
    return tuple(operator for operator in operators if not is_dropout(operator))
