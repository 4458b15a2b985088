"""Seconds of one typed operator on one rank per micro-batch, for columns of degrees.

`operator_times` is the entry; docs/concepts/cost-model.md, sections 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cluster import AttentionCurve
from shardwise.cost.problem import Machine, Problem
from shardwise.cost.recipe import FP32_BYTES, Recipe
from shardwise.equations import compute
from shardwise.model import Experts
from shardwise.operators import (
    Attention,
    Extent,
    GroupedMatmul,
    Lookup,
    Loss,
    Matmul,
    Operator,
    Pointwise,
    Scan,
    is_forward_only,
    repeats_of,
)
from shardwise.strategy import Profile

FUSED_BACKWARD_WORK = 2.5
"""Flop of fused attention's backward relative to its forward: five products against two.

(Dao 2023, section 3.1.)
"""

SCAN_FRACTION = 0.4
"""Assumed fraction of the peak that the products of a scan reach: no kernel was measured."""

SCAN_BACKWARD_WORK = 3.0
"""Flop of a scan's backward pass relative to its forward: two products for each, and the states again."""

LOSS_FORWARD_PASSES = 3.0
LOSS_BACKWARD_PASSES = 2.0
"""fp32 passes over the logits: forward, read and write for the maximum, the sum and the loss; backward, read
and write of the gradient.
"""


@dataclass(frozen=True, slots=True)
class OperatorSeconds:
    """Seconds of the forward, of the input gradient and of the weight gradient."""

    forward_s: Any
    input_s: Any
    weight_s: Any


def degree_of(problem: Problem, table: Any, extent: Extent) -> Any:
    """Number of ranks that share a width, by its role. Key-value heads are replicated where tp exceeds their
    number.
    """
    if extent.role == "whole":
        return 1
    if extent.role == "expert_ffn":
        return table.etp
    if extent.role == "kv_heads":
        return np.minimum(table.tp, problem.model.kv_heads)
    return table.tp


def width_of(problem: Problem, table: Any, extent: Extent) -> Any:
    """Elements of a width on one rank."""
    return extent.size / degree_of(problem, table, extent)


def rows_of(problem: Problem, table: Any, rows: str, experts: Experts | None) -> Any:
    """Rows on one rank per micro-batch: tokens, tokens over tp (sequence parallelism), routed tokens, or the
    patches and tokens of images, which every rank of tp and cp has.

    Routed rows: tokens * top_k * load / tp * etp. The load is the imbalance, or the capacity factor where
    experts have a capacity. One group of etp ranks works on the tokens of etp / tp of a tp group.
    """
    if rows in ("patches", "images"):
        model = problem.model
        return 1.0 * table.micro_batch_size * (model.patches if rows == "patches" else model.image_tokens)
    tokens = table.micro_batch_size * problem.job.seq_len / table.cp
    if rows == "sequence":
        return tokens / np.where(table.sequence_parallel == 1, table.tp, 1)
    if rows == "routed" and experts is not None:
        load = problem.job.expert_imbalance if experts.capacity_factor is None else experts.capacity_factor
        return tokens * experts.top_k * load * table.etp / table.tp
    return tokens


def element_bytes(problem: Problem, dtype: str) -> float:
    """Bytes of a saved element."""
    recipe = problem.recipe
    return {"compute": recipe.activation_bytes, "operand": recipe.operand_bytes, "fp32": 4.0, "mask": 1.0}[
        dtype
    ]


def operator_times(
    problem: Problem, table: Any, operator: Operator, experts: Experts | None
) -> OperatorSeconds:
    """Times of `operator`, of all its repetitions, for each row of `table`. Frozen weights have no weight
    gradient."""
    times, repeats = _times_of_one(problem, table, operator, experts), repeats_of(operator)
    backward = repeats * (1 - is_forward_only(operator))
    return OperatorSeconds(repeats * times.forward_s, backward * times.input_s, backward * times.weight_s)


def _times_of_one(
    problem: Problem, table: Any, operator: Operator, experts: Experts | None
) -> OperatorSeconds:
    rows = rows_of(problem, table, operator.rows, experts)
    if isinstance(operator, Matmul):
        return _matmul(problem, table, operator, rows)
    if isinstance(operator, GroupedMatmul):
        return _grouped(problem, table, operator, rows)
    if isinstance(operator, Attention):
        return _attention(problem, table, operator, rows)
    if isinstance(operator, Scan):
        return _scan(problem, table, operator, rows)
    if isinstance(operator, Pointwise):
        return _pointwise(problem, table, operator, rows)
    if isinstance(operator, Lookup):
        return _lookup(problem, table, operator, rows)
    return _loss(problem, table, operator, rows)


def moved_s(problem: Machine, moved_bytes: Any) -> Any:
    """Seconds of a memory-bound kernel with its launch."""
    efficiency = problem.efficiency
    curve = efficiency.memory
    return efficiency.launch_s + compute.memory_bound_s(
        moved_bytes, problem.memory_bytes_per_s, curve.fraction, curve.half_bytes
    )


def product_s(problem: Machine, m: Any, n: Any, k: Any, keys: Any = None, written: float = 1.0) -> Any:
    """Seconds of one plain matmul [m, k] x [k, n] with its launch.

    With `keys`, a batch of products with `keys` rows each, in the dtype of attention. It moves `written`
    times the bytes of an element for each of its outputs, while its tiles end.
    """
    efficiency = problem.efficiency
    curve = efficiency.matmul
    achieved = compute.matmul_efficiency(
        m, n, k,
        peak_fraction=curve.peak_fraction, tile_m=curve.tile_m, tile_n=curve.tile_n, units=curve.units,
        k_half=curve.k_half * written, small_tile_fraction=curve.small_tile_fraction,
    )  # fmt: skip
    moved_bytes = (
        m * k + k * n * (1.0 if keys is None else m / keys) + m * n * written
    ) * problem.recipe.activation_bytes
    return efficiency.launch_s + compute.roofline_s(
        compute.matmul_work(m, n, k),
        moved_bytes,
        (problem.matmul_flop_per_s if keys is None else problem.other_flop_per_s) * achieved,
        problem.stream_bytes_per_s,
    )


def matmul_times(
    machine: Machine, m: Any, n: Any, k: Any, *, batch: Any = None, parts: Any = 1.0, written: float = 1.0
) -> OperatorSeconds:
    """Times of the matmul [m, k] x [k, n] and of both its gradients.

    Of `batch` matmuls where that is given: they have the dtype of attention, and no casts. The sums of the
    right gradient are split into `parts` (split-k kernels); its product moves `written` times the bytes of
    an element per output.
    """
    if batch is not None:
        return OperatorSeconds(
            forward_s=product_s(machine, batch * m, n, k, m),
            input_s=product_s(machine, batch * m, k, n, m),
            weight_s=product_s(machine, batch * k * parts, n, m / parts, k * parts),
        )
    return OperatorSeconds(
        forward_s=product_s(machine, m, n, k) + cast_s(machine, m * k),
        input_s=product_s(machine, m, k, n) + cast_s(machine, m * n),
        weight_s=product_s(machine, k * parts, n, m / parts, written=written),
    )


def _matmul(problem: Problem, table: Any, operator: Matmul, rows: Any) -> OperatorSeconds:
    k, n = width_of(problem, table, operator.k), width_of(problem, table, operator.n)
    times = matmul_times(problem, rows, n, k, written=written_of(problem.profile, problem.recipe))
    if not operator.trained:
        return replace(times, weight_s=0.0 * times.weight_s)
    return replace(times, weight_s=times.weight_s + accumulate_s(problem, k * n))


def written_of(profile: Profile, recipe: Recipe) -> float:
    """What the product that computes a weight gradient moves per weight, relative to writing an element.

    It reads and writes the accumulated gradient where the software fuses the two: 4 for one in fp32 and
    elements of 16 bits.
    """
    if not profile.fuses_accumulation:
        return 1.0
    return 2.0 * recipe.gradient_bytes / recipe.activation_bytes


def accumulate_s(problem: Problem, weights: Any) -> Any:
    """Seconds of adding the gradients of `weights` to those of other micro-batches, and of their copies; 0
    where the product that computes them adds them. Software that reduces by block has such copies in
    `cost.sharding.copies_s`."""
    profile = problem.profile
    if profile.reduces_by_block or not np.any(profile.accumulated_bytes):
        return 0.0 * weights
    return moved_s(problem, profile.accumulated_bytes * weights)


def cast_s(problem: Machine, elements: Any) -> Any:
    """Seconds of casting a matmul's input to the dtype of the matmul; 0 where it has that dtype."""
    cast_bytes = problem.recipe.cast_bytes
    return moved_s(problem, elements * cast_bytes) if cast_bytes else 0.0 * elements


def _grouped(problem: Problem, table: Any, operator: GroupedMatmul, rows: Any) -> OperatorSeconds:
    """All experts of a rank in one kernel per phase; the weights of every expert are read once."""
    efficiency = problem.efficiency
    k, n = width_of(problem, table, operator.k), width_of(problem, table, operator.n)
    local, written = operator.experts / table.ep, written_of(problem.profile, problem.recipe)
    forward_s, input_s, weight_s = (
        efficiency.launch_s
        + compute.roofline_s(
            compute.matmul_work(rows, n, k),
            (rows * k + rows * n + local * k * n * moved) * problem.recipe.activation_bytes,
            problem.matmul_flop_per_s
            * compute.grouped_matmul_efficiency(
                rows / local, inner, peak_fraction=efficiency.matmul.peak_fraction,
                k_half=efficiency.matmul.k_half * moved, fraction=efficiency.grouped_matmul.fraction,
                tokens_half=efficiency.grouped_matmul.tokens_half,
            ),
            problem.stream_bytes_per_s,
        )
        for inner, moved in ((k, 1.0), (n, 1.0), (rows / local, written))
    )  # fmt: skip
    bias_forward_s, bias_backward_s = expert_bias_s(problem, operator, rows * n, local)
    return OperatorSeconds(
        forward_s + cast_s(problem, rows * k) + bias_forward_s,
        input_s + cast_s(problem, rows * n) + bias_backward_s,
        weight_s + accumulate_s(problem, local * k * n) if operator.trained else 0.0 * weight_s,
    )


BIAS_FORWARD_KERNELS, BIAS_BACKWARD_KERNELS = 2, 5
"""Kernels of each expert that add its bias: product and sum; backward two products, two sums and a cast.

(Megatron-Core, TEGroupedMLP._apply_bias.)
"""


def expert_bias_s(problem: Problem, operator: GroupedMatmul, elements: Any, local: Any) -> tuple[Any, Any]:
    """Seconds of the kernels that add biases to `elements` of the output of `local` experts, (forward,
    backward); 0 where the software has none, or the operator is not the last product of experts with
    biases. The biases of other products are part of the matmul."""
    profile = problem.profile
    has_biases = any(len(weight.shape) == 1 for weight in operator.weights)
    if operator.k.role != "expert_ffn" or not has_biases or not np.any(profile.expert_bias_forward_bytes):
        return 0.0 * elements, 0.0 * elements
    launch_s = problem.efficiency.launch_s
    return (
        BIAS_FORWARD_KERNELS * local * launch_s
        + moved_s(problem, profile.expert_bias_forward_bytes * elements),
        BIAS_BACKWARD_KERNELS * local * launch_s
        + moved_s(problem, profile.expert_bias_backward_bytes * elements),
    )


def fused_attention_s(
    machine: Machine, curve: AttentionCurve, work: Any, moved_bytes: Any, keys: Any
) -> tuple[Any, Any]:
    """Seconds of fused attention with its launch, (forward, backward).

    `work` and `moved_bytes` are flop and bytes of the forward, `keys` the length of the sequence of keys. The
    backward moves each tensor and its gradient.
    """
    efficiency = machine.efficiency
    saturated = compute.saturation(keys, curve.seq_half)
    forward_s, backward_s = (
        efficiency.launch_s
        + compute.roofline_s(
            scale * work,
            passes * moved_bytes,
            machine.other_flop_per_s * fraction * saturated,
            machine.stream_bytes_per_s,
        )
        for scale, passes, fraction in (
            (1.0, 1.0, curve.forward_fraction),
            (FUSED_BACKWARD_WORK, 2.0, curve.backward_fraction),
        )
    )
    return forward_s, backward_s


def _attention(problem: Problem, table: Any, operator: Attention, rows: Any) -> OperatorSeconds:
    """Core attention; its whole backward counts as the input gradient.

    A fused kernel works within packed samples, at its rate for sequences of their length. With a window,
    which limits its blocks in either case, it has the rate for the whole sequence. Software with scores in
    memory computes those of the whole sequence and masks them. Blocks, as of images, are sequences of their
    own.
    """
    seq_len = 1.0 * (problem.job.seq_len if operator.block is None else operator.block)
    heads = width_of(problem, table, operator.heads)
    if problem.attention is None:
        forward_s, backward_s = unfused_attention_s(
            problem, problem.profile, rows * heads, seq_len, seq_len, operator.qk_dim, operator.v_dim,
            has_values=not isinstance(operator.v_dim, int) or operator.v_dim > 0,
        )  # fmt: skip
    else:
        length = 1.0 * problem.job.attention_len if operator.block is None else seq_len
        window = length if operator.window is None else np.minimum(operator.window, length)
        is_windowed = operator.window is not None and np.asarray(operator.window) < seq_len
        of_rate = np.where(is_windowed, seq_len, length)
        keys = compute.keys_per_query(length, window, 0.5 if operator.causal else 1.0)
        work = compute.attention_work(rows, keys, heads, operator.qk_dim, operator.v_dim)
        moved = rows * 2.0 * (heads + width_of(problem, table, operator.kv_heads))
        moved_bytes = moved * (operator.qk_dim + operator.v_dim) * problem.recipe.activation_bytes / 2.0
        forward_s, backward_s = fused_attention_s(problem, problem.attention, work, moved_bytes, of_rate)
    return OperatorSeconds(forward_s, backward_s, 0.0 * table.tp)


def _scan(problem: Problem, table: Any, operator: Scan, rows: Any) -> OperatorSeconds:
    """A chunked recurrence over the sequence; its whole backward counts as the input gradient."""
    flop = rows * (operator.flop / degree_of(problem, table, operator.heads))
    forward_s, backward_s = (
        problem.efficiency.launch_s
        + compute.roofline_s(
            scale * flop,
            rows * elements_of(problem, table, moved) * problem.recipe.activation_bytes,
            problem.other_flop_per_s * SCAN_FRACTION,
            problem.stream_bytes_per_s,
        )
        for scale, moved in ((1.0, operator.forward), (SCAN_BACKWARD_WORK, operator.backward))
    )
    return OperatorSeconds(forward_s, backward_s, 0.0 * table.tp)


def elements_of(problem: Problem, table: Any, extents: tuple[Extent, ...]) -> Any:
    """Elements of these widths together on one rank."""
    return sum((width_of(problem, table, extent) for extent in extents), start=0.0)


SOFTMAX_FORWARD_PASSES = 4.5
SOFTMAX_BACKWARD_PASSES = 5.5
"""16-bit passes over the scores of unfused attention, in addition to its products.

Forward, the scaled softmax reads and writes; dropout reads, writes, and writes a mask of one byte. Backward,
dropout reads, writes and reads the mask; the softmax reads its output and the gradient and writes.
"""


MASK_BYTES = 1.0
"""Bytes of a number of a dropout mask."""


def saved_score_bytes(machine: Machine, profile: Profile, *, has_dropout: bool) -> float:
    """Bytes that unfused attention saves per score.

    The softmax saves its output, which the product with the values reads: 2 bytes in 16 bits. Dropout saves a
    mask, and the product reads the output of dropout: 2 + 1 + 2 (Korthikanti et al. 2022, section 4.1).
    Modules of Transformers compute the softmax in fp32 and cast its output: 4 + 2, with dropout 4 + 1 + 2
    (`eager_attention_forward` in modeling_llama.py).
    """
    element = machine.recipe.activation_bytes
    softmax = FP32_BYTES if profile.eager_modules else element
    is_cast = softmax > element
    return softmax + (MASK_BYTES + element if has_dropout else element * is_cast)


def unfused_attention_s(
    machine: Machine,
    profile: Profile,
    rows: Any,
    queries: Any,
    keys: Any,
    width: Any,
    values: Any,
    *,
    has_values: bool = True,
) -> tuple[Any, Any]:
    """Seconds of attention with scores in memory, (forward, backward): two products per head over all `keys`,
    and passes over the scores between them.

    `rows` are the queries of all heads, `queries` those of one head; queries and keys have `width` numbers,
    values `values`. Without values, as in the indexer of sparse attention, there are scores alone.
    """
    pass_bytes = rows * keys * (machine.recipe.activation_bytes * profile.pointwise_passes)
    products_s = product_s(machine, rows, keys, width, queries)
    if has_values:
        products_s = products_s + product_s(machine, rows, values, keys, queries)
    return (
        products_s + moved_s(machine, SOFTMAX_FORWARD_PASSES * pass_bytes),
        2.0 * products_s + moved_s(machine, SOFTMAX_BACKWARD_PASSES * pass_bytes),
    )


def _pointwise(problem: Problem, table: Any, operator: Pointwise, rows: Any) -> OperatorSeconds:
    forward, backward = (
        sum((width_of(problem, table, extent) for extent in extents), start=0.0 * table.tp)
        * rows
        * (problem.recipe.activation_bytes * problem.profile.pointwise_passes)
        for extents in (operator.forward, operator.backward)
    )
    return OperatorSeconds(moved_s(problem, forward), moved_s(problem, backward), 0.0 * table.tp)


def _lookup(problem: Problem, table: Any, operator: Lookup, rows: Any) -> OperatorSeconds:
    """Reads and writes each row once; the backward reads the gradient and adds into fp32 rows."""
    width = width_of(problem, table, operator.width)
    element = problem.recipe.activation_bytes
    return OperatorSeconds(
        forward_s=moved_s(problem, 2.0 * rows * width * element),
        input_s=0.0 * table.tp,
        weight_s=moved_s(problem, rows * width * (element + 8.0)) if operator.trained else 0.0 * table.tp,
    )


def _loss(problem: Problem, table: Any, operator: Loss, rows: Any) -> OperatorSeconds:
    logits_bytes = 4.0 * rows * width_of(problem, table, operator.classes)
    return OperatorSeconds(
        forward_s=moved_s(problem, LOSS_FORWARD_PASSES * logits_bytes),
        input_s=moved_s(problem, LOSS_BACKWARD_PASSES * logits_bytes),
        weight_s=0.0 * table.tp,
    )
