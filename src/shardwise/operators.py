"""Typed operators: the vocabulary of models, operator graphs and the cost model.

A transformer layer is a tuple of operators; so is an operator graph. Operators with weights say whether these
are `trained`; frozen ones have gradients of their inputs alone. An operator has widths, each with the `Role`
*by which* it may be sharded; it knows no strategy. The cost model maps a role to a parallel degree
(`heads`, `ffn`, `vocab` to tp, `expert_ffn` to etp), so one sum over operators estimates every layout.

Widths count elements per row. A row is a token, a token routed to an expert, or a patch of an image; `Rows`
says which rows an operator processes. The equal layers of a vision tower are one list of operators that
`repeats`: `weights` and `saved` are those of all repetitions. An operator with `forward_only` has nothing
trained before it, and so no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Literal

Role = Literal["whole", "heads", "kv_heads", "ffn", "vocab", "expert_ffn"]
"""How a width may be sharded: not at all; over tp (heads, ffn, vocab, and kv_heads up to their number); or
over etp."""

Rows = Literal["tokens", "sequence", "routed", "head", "patches", "images"]
"""Rows that an operator processes, per rank and micro-batch.

`tokens`: micro_batch * seq / cp. `sequence`: the same, divided by tp under sequence parallelism (norms,
residuals). `routed`: tokens * top_k, spread over the experts of a rank. `head`: like tokens, in the
language-model head. `patches` and `images`: micro_batch * the patches of a sequence's images, and their
tokens in the language model; every rank of tp and cp has all of them.
"""

Dtype = Literal["compute", "operand", "fp32", "mask"]
"""Storage of a saved activation: the compute dtype; the dtype of matmul operands (for tensors that only
the weight gradient of a matmul reads); 4 bytes; or 1 byte."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A size in elements and the role by which it may be sharded."""

    size: int
    role: Role = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight tensor: its extents and its number of experts (experts are sharded over ep)."""

    name: str
    shape: tuple[Extent, ...]
    experts: int = 0
    """Number of experts that each have one such tensor; 0 for a tensor outside the experts."""

    @property
    def parameters(self) -> int:
        """Elements over all ranks and experts."""
        return prod(extent.size for extent in self.shape) * max(self.experts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A saved activation, per row: `width` elements of `dtype` on `rows`.

    `selective` marks tensors that selective recomputation recomputes instead of saving (attention internals,
    norm outputs, activation functions). A tensor that several operators read is listed once, at the first of
    them.
    """

    name: str
    width: Extent
    rows: Rows = "tokens"
    dtype: Dtype = "compute"
    selective: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """[rows, k] x [k, n]: 2*rows*k*n FLOP forward; in the backward pass as many for the input gradient and,
    where it is `trained`, as many for the weight gradient."""

    name: str
    rows: Rows = "tokens"
    k: Extent
    n: Extent
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    trained: bool = True
    repeats: int = 1
    forward_only: bool = False
    kind: Literal["matmul"] = field(default="matmul", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmul:
    """The same matmul for each expert of a rank, on the tokens routed to it."""

    name: str
    experts: int
    k: Extent
    n: Extent
    rows: Rows = "routed"
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    trained: bool = True
    kind: Literal["grouped_matmul"] = field(default="grouped_matmul", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled dot-product attention: scores over `qk_dim`, values of `v_dim`, per head.

    `window` is the number of keys that each query attends to (None: all). `causal` halves the work of full
    attention. Within a `block` of rows (the patches of an image) each query attends to all keys of its block.
    """

    name: str
    heads: Extent
    kv_heads: Extent
    qk_dim: int
    v_dim: int
    window: int | None = None
    causal: bool = True
    block: int | None = None
    rows: Rows = "tokens"
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    trained: bool = True
    repeats: int = 1
    forward_only: bool = False
    kind: Literal["attention"] = field(default="attention", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A recurrence over the sequence, computed in chunks: state-space layers, linear attention.

    `key_heads` are the heads of its keys, of Mamba the groups of B and C; a single one is not sharded. `flop`
    is the work of the forward pass per row, over all `heads`; 0 where only traffic limits it. `forward`
    and `backward` are the elements that its kernels read and write per row, `exchanged` those of its inputs
    and its output, which context parallelism redistributes from tokens to heads and back.
    """

    name: str
    heads: Extent
    key_heads: Extent
    flop: int
    forward: tuple[Extent, ...]
    backward: tuple[Extent, ...]
    exchanged: tuple[Extent, ...]
    rows: Rows = "tokens"
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    trained: bool = True
    kind: Literal["scan"] = field(default="scan", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """Memory-bound work: elements read and written per row, forward and backward (norms, activations,
    residuals, rotary).

    `eager` are elements of the compute dtype per row that modules of Transformers save in addition, where
    they compute in fp32 or in several steps.
    """

    name: str
    rows: Rows = "tokens"
    forward: tuple[Extent, ...]
    backward: tuple[Extent, ...]
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    eager: tuple[Extent, ...] = ()
    selective: bool = False
    """Recomputed under selective recomputation."""
    trained: bool = True
    repeats: int = 1
    forward_only: bool = False
    kind: Literal["pointwise"] = field(default="pointwise", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A table lookup per row (embedding): reads and writes `width` elements; the backward pass scatters
    the gradient."""

    name: str
    width: Extent
    rows: Rows = "tokens"
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    trained: bool = True
    repeats: int = 1
    forward_only: bool = False
    kind: Literal["lookup"] = field(default="lookup", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Softmax cross entropy over `classes` per row, in fp32 (reads and writes the logits, then their
    gradient)."""

    name: str
    classes: Extent
    rows: Rows = "head"
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    kind: Literal["loss"] = field(default="loss", init=False)


Operator = Matmul | GroupedMatmul | Attention | Scan | Pointwise | Lookup | Loss


def repeats_of(operator: Operator) -> int:
    """How often an operator runs in a pass; others than those of towers once."""
    return operator.repeats if isinstance(operator, Matmul | Attention | Pointwise | Lookup) else 1


def is_forward_only(operator: Operator) -> bool:
    """Whether an operator has no backward pass, because nothing before it is trained."""
    return isinstance(operator, Matmul | Attention | Pointwise | Lookup) and operator.forward_only


def is_trained(operator: Operator) -> bool:
    """Whether the weights of an operator are trained; a loss has none."""
    return not isinstance(operator, Loss) and operator.trained


def has_trained_weights(operators: Iterable[Operator]) -> bool:
    """Whether some of the operators have weights that are trained."""
    return any(operator.weights and is_trained(operator) for operator in operators)
