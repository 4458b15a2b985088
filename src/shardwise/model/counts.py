"""Counts the parameters of a model and the floating-point operations per token.

`parameters` and `active_parameters` count the model that Transformers builds, with its adapters;
`trained_parameters` those that are not frozen. Multi-token-prediction modules
are counted separately, by `mtp_parameters`. Tied weights count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.model.model import MTP_PREFIX, Experts, Model
from shardwise.operators import (
    Attention,
    Lookup,
    Matmul,
    Operator,
    Scan,
    is_forward_only,
    is_trained,
    repeats_of,
)
from shardwise.units import format_count


def parameters(model: Model) -> int:
    """Elements with all experts, without multi-token-prediction modules."""
    per_kind = [_elements(kind.operators) for kind in model.kinds]
    stack = sum(per_kind[kind] for kind in model.pattern)
    return _elements(model.embedding) + stack + _elements(_main_head(model))


def mtp_parameters(model: Model) -> int:
    """Elements of multi-token-prediction modules, without the shared embedding and output."""
    return _elements(_mtp_head(model))


def trained_parameters(model: Model) -> int:
    """Elements of `parameters` that are trained: all, or those of adapters and of a head of labels."""
    per_kind = [_elements(filter(is_trained, kind.operators)) for kind in model.kinds]
    ends = (*model.embedding, *_main_head(model))
    return sum(per_kind[kind] for kind in model.pattern) + _elements(filter(is_trained, ends))


def adapters_text(model: Model) -> str:
    """The adapters or the frozen parts of a model in words, with the number of trained parameters; empty
    where all weights are trained."""
    trained, total = format_count(trained_parameters(model)), format_count(parameters(model))
    if model.frozen:
        return f"{' and '.join(model.frozen)} frozen: {trained} trained of {total}"
    if model.lora is None:
        return ""
    names = " ".join(name.removesuffix("_proj") for name in model.lora.target_modules)
    return f"LoRA rank {model.lora.r} on {names}: {trained} trained of {total}"


def active_parameters(model: Model) -> int:
    """Elements that one token uses: `top_k` of the experts, with embeddings, without multi-token-prediction
    modules."""
    return _active(model.embedding, None) + _active_layers(model) + _active(_main_head(model), None)


def active_matmul_parameters(model: Model) -> int:
    """Elements with 2 flop of forward work per token: the N of the 6 N flop of a training step.

    These are the active parameters without the token and position tables, which are looked up. They include
    the output projection, even where it is tied, and multi-token-prediction modules with their output
    projections. Norms and biases count, as is usual for 6 N.
    """
    return _multiplied(model, lambda _: True)


def trained_matmul_parameters(model: Model) -> int:
    """Those of `active_matmul_parameters` that are trained; of the others a step has no weight gradients."""
    return _multiplied(model, is_trained)


def _multiplied(model: Model, counts: Callable[[Operator], bool]) -> int:
    """Elements that a token multiplies with, of the operators that count."""

    def active(operators: Iterable[Operator], experts: Experts | None) -> int:
        return _active(filter(counts, operators), experts)

    tables = [one for one in model.embedding if not isinstance(one, Lookup) and not _is_of_images(one)]
    head = active(_main_head(model), None) + active(_mtp_head(model), model.head_experts)
    per_kind = [active(kind.operators, kind.experts) for kind in model.kinds]
    without_weight = sum(
        operator.k.size * operator.n.size
        for operator in filter(counts, model.head)
        if isinstance(operator, Matmul) and all(len(weight.shape) == 1 for weight in operator.weights)
    )
    layers = sum(per_kind[kind] for kind in model.pattern)
    return active(tables, None) + layers + head + without_weight


def keys_per_query(seq_len: int, window: int | None, *, causal_half: bool) -> float:
    """Average number of keys that a query attends to in a sequence of `seq_len`.

    With `causal_half` a query at position x attends to the keys up to x, and the convention counts half of
    the full square: seq_len / 2. With a window w < seq_len it is w - w^2 / (2 seq_len). Without `causal_half`
    it is the full width.
    """
    width = seq_len if window is None else min(window, seq_len)
    return width - width * width / (2 * seq_len) if causal_half else float(width)


def attention_flop_per_token(model: Model, seq_len: int, *, causal_half: bool) -> float:
    """Forward flop of attention scores and values per token, over all layers and prediction modules, and of
    the scans of layers without attention.

    A query takes 2 * heads * (qk_dim + v_dim) flop per key that it attends to; windows limit the keys.
    """
    per_kind = [_attention_flop(kind.operators, seq_len, causal_half) for kind in model.kinds]
    stack = sum(per_kind[kind] for kind in model.pattern)
    return stack + _attention_flop(model.head, seq_len, causal_half)


def model_flop_per_token(model: Model, seq_len: int, *, causal_half: bool = True) -> float:
    """Flop per token of forward and backward pass without recomputation: the numerator of MFU.

    It is 6 per active matmul parameter (4 per frozen one) plus 3 times the forward attention; causal
    attention counts half, or in full where `causal_half` is False. A vision tower counts by `images_flop`.
    """
    attention = attention_flop_per_token(model, seq_len, causal_half=causal_half)
    of_text = 4 * active_matmul_parameters(model) + 2 * trained_matmul_parameters(model) + 3 * attention
    return of_text + images_flop(model) / seq_len


def images_flop(model: Model) -> float:
    """Flop of forward and backward pass of the vision tower and its projector for the images of a sequence.

    A product has 2 flop per weight and patch forward, as many for the gradient of its input, and for that of
    its weight where it is trained; what has no backward pass has the forward alone."""
    rows = {"patches": model.patches, "images": model.image_tokens}
    total = 0.0
    for operator in filter(_is_of_images, model.embedding):
        backward = not is_forward_only(operator)
        if isinstance(operator, Matmul):
            each = 2.0 * operator.k.size * operator.n.size * (1 + backward + (backward and operator.trained))
        elif isinstance(operator, Attention):
            dims = operator.qk_dim + operator.v_dim
            each = 2.0 * operator.heads.size * dims * (operator.block or 0) * (1 + 2 * backward)
        else:
            continue
        total += rows[operator.rows] * repeats_of(operator) * each
    return total


def _is_of_images(operator: Operator) -> bool:
    return operator.rows in ("patches", "images")


def _main_head(model: Model) -> tuple[Operator, ...]:
    return tuple(operator for operator in model.head if not operator.name.startswith(MTP_PREFIX))


def _mtp_head(model: Model) -> tuple[Operator, ...]:
    return tuple(operator for operator in model.head if operator.name.startswith(MTP_PREFIX))


def _elements(operators: Iterable[Operator]) -> int:
    return sum(weight.parameters for operator in operators for weight in operator.weights)


def _active(operators: Iterable[Operator], experts: Experts | None) -> int:
    total = 0
    for operator in operators:
        for weight in operator.weights:
            if weight.experts and experts is not None:
                total += weight.parameters // weight.experts * experts.top_k
            else:
                total += weight.parameters
    return total


def _active_layers(model: Model) -> int:
    per_kind = [_active(kind.operators, kind.experts) for kind in model.kinds]
    return sum(per_kind[kind] for kind in model.pattern)


def _attention_flop(operators: Iterable[Operator], seq_len: int, causal_half: bool) -> float:
    operators = tuple(operators)
    scans = sum(operator.flop for operator in operators if isinstance(operator, Scan))
    return scans + sum(
        2
        * operator.heads.size
        * (operator.qk_dim + operator.v_dim)
        * keys_per_query(seq_len, operator.window, causal_half=causal_half and operator.causal)
        for operator in operators
        if isinstance(operator, Attention)
    )
