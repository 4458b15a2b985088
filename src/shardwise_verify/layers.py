"""Operators and blocks on one rank: local widths and rows (docs/concepts/cost-model.md, section 6), seconds
of one operator (section 7), and seconds and bytes of one block: a layer, the embedding or the head (section
8).

`LocalSizes` has the sizes, `operator_seconds` the times of an operator, `block_amounts` the AMOUNTS of a
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise_verify.collectives import (
    Fabric,
    Groups,
    Sizes,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
)
from shardwise_verify.modules import module_parts, repeated_by_themselves
from shardwise_verify.problem import Figures, has_dropout
from shardwise_verify.records import (
    AttentionOperator,
    ExtentRecord,
    GroupedMatmulOperator,
    JobRecord,
    LayerOperator,
    LayersRecord,
    LookupOperator,
    LossOperator,
    MatmulOperator,
    PointwiseOperator,
    RoutingRecord,
    SavedRecord,
    ScanOperator,
    WeightRecord,
)
from shardwise_verify.strategy_rows import Column, StrategyRows

SAVED_BYTES = {"fp32": 4, "mask": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSizes:
    """One block on every row: the rows of data and the width that a rank has."""

    figures: Figures
    rows: StrategyRows
    experts: RoutingRecord | None

    @property
    def tokens(self) -> Column:
        """Tokens of a rank per micro-batch."""
        return self.rows.micro_batch_size * self.figures.job.seq_len / self.rows.cp

    def count(self, name: str) -> Column:
        """Rows of data of a rank per micro-batch: `tokens`, `head`, `sequence` or `routed`; of images all of
        its sequences, on every rank."""
        if name in ("patches", "images"):
            model = self.figures.model
            each = {"patches": model.patches, "images": model.image_tokens}[name]
            return self.rows.micro_batch_size * (1.0 * each)
        if name == "sequence":
            return self.tokens / np.where(self.rows.sequence_parallel, self.rows.tp, 1)
        if name == "routed" and self.experts is not None:
            factor = self.experts.capacity_factor
            load = self.figures.job.expert_imbalance if factor is None else factor
            return self.tokens * self.experts.top_k * load * self.rows.etp / self.rows.tp
        return self.tokens

    def width(self, extent: ExtentRecord) -> Column:
        """Elements of a rank along an extent; may be a fraction."""
        if extent.role == "whole":
            return extent.size
        if extent.role == "expert_ffn":
            return extent.size / self.rows.etp
        if extent.role == "kv_heads":
            return extent.size / np.minimum(self.rows.tp, self.figures.model.kv_heads)
        return extent.size / self.rows.tp

    def hidden_bytes(self, name: str) -> Column:
        """Bytes of a hidden state of these rows."""
        return self.count(name) * self.figures.model.hidden * self.figures.recipe.activation_bytes

    def weight_elements(self, weight: WeightRecord) -> Column:
        """Elements of a weight on a rank."""
        elements: Column = 1
        for extent in weight.shape:
            elements = elements * self.width(extent)
        return elements * weight.experts / self.rows.ep if weight.experts else elements

    def saved_elements(self, saved: SavedRecord, operator: LayerOperator) -> Column:
        """Elements on a rank, per micro-batch, of a saved activation of an operator."""
        rows = saved.rows
        if self.figures.profile.keeps_gathered_inputs and isinstance(operator, MatmulOperator):
            rows = operator.rows
        return self.count(rows) * self.width(saved.width)

    def saved_bytes(self, saved: SavedRecord, operator: LayerOperator) -> Column:
        """Bytes of the same."""
        recipe = self.figures.recipe
        each = {"compute": recipe.activation_bytes, "operand": recipe.operand_bytes, **SAVED_BYTES}[
            saved.dtype
        ]
        return self.saved_elements(saved, operator) * each


@dataclass(frozen=True, slots=True)
class KernelSeconds:
    """One operator: forward, input gradient, weight gradient."""

    forward: Column
    input: Column
    weight: Column


def operator_seconds(operator: LayerOperator, sizes: LocalSizes) -> KernelSeconds:
    """Seconds of the operator, every time that it runs, on every row."""
    one = _seconds_of_one(operator, sizes)
    times, back = operator.repeats, 0 if operator.forward_only else operator.repeats
    return KernelSeconds(one.forward * times, one.input * back, one.weight * back)


def _seconds_of_one(operator: LayerOperator, sizes: LocalSizes) -> KernelSeconds:
    zero = 0.0 * sizes.tokens
    rows = sizes.count(operator.rows)
    each = sizes.figures.recipe.activation_bytes
    match operator:
        case MatmulOperator():
            k, n = sizes.width(operator.k), sizes.width(operator.n)
            return KernelSeconds(
                _matmul_s(sizes, rows, n, k) + _cast_s(sizes, rows * k),
                _matmul_s(sizes, rows, k, n) + _cast_s(sizes, rows * n),
                (
                    _matmul_s(sizes, k, n, rows, _written_in_accumulation(sizes))
                    + _accumulation_s(sizes, k * n)
                    if operator.trained
                    else zero
                ),
            )
        case GroupedMatmulOperator():
            return _grouped_matmul_seconds(operator, sizes)
        case AttentionOperator():
            return _attention_seconds(operator, sizes)
        case ScanOperator():
            work = rows * operator.flop * (sizes.width(operator.heads) / operator.heads.size)
            rate = 0.4 * sizes.figures.attention_flop_per_s
            memory, launch = sizes.figures.memory_bytes_per_s, sizes.figures.efficiency.launch_s
            read = rows * each * sum((sizes.width(extent) for extent in operator.forward), start=zero)
            back = rows * each * sum((sizes.width(extent) for extent in operator.backward), start=zero)
            return KernelSeconds(
                launch + np.maximum(work / rate, read / memory),
                launch + np.maximum(3 * work / rate, back / memory),
                zero,
            )
        case PointwiseOperator():
            forward = sum((sizes.width(extent) for extent in operator.forward), start=zero)
            backward = sum((sizes.width(extent) for extent in operator.backward), start=zero)
            nbytes = rows * (each * sizes.figures.profile.pointwise_passes)
            return KernelSeconds(
                _memory_bound_s(sizes, nbytes * forward), _memory_bound_s(sizes, nbytes * backward), zero
            )
        case LookupOperator():
            elements = rows * sizes.width(operator.width)
            return KernelSeconds(
                _memory_bound_s(sizes, 2 * elements * each),
                zero,
                _memory_bound_s(sizes, elements * (each + 8)) if operator.trained else zero,
            )
        case LossOperator():
            logits = 4 * rows * sizes.width(operator.classes)
            return KernelSeconds(_memory_bound_s(sizes, 3 * logits), _memory_bound_s(sizes, 2 * logits), zero)


def _memory_bound_s(sizes: LocalSizes, nbytes: Column) -> Column:
    """Seconds of a memory-bound kernel."""
    half = sizes.figures.efficiency.memory.half_bytes
    transfer = (nbytes + half) / sizes.figures.memory_bytes_per_s
    return sizes.figures.efficiency.launch_s + np.where(nbytes > 0, transfer, 0.0)


def _matmul_efficiency(sizes: LocalSizes, m: Column, n: Column, k: Column, written: float = 1.0) -> Column:
    """The share of the peak that the matmul [m, k] x [k, n] reaches. Its tiles end with `written` times the
    bytes of an element per output."""
    curve = sizes.figures.efficiency.matmul

    def fill(tile_m: float, tile_n: float) -> Column:
        waves = np.ceil(np.ceil(m / tile_m) * np.ceil(n / tile_n) / curve.units)
        return m * n / (waves * curve.units * tile_m * tile_n)

    large = fill(curve.tile_m, curve.tile_n)
    small = curve.small_tile_fraction * fill(curve.tile_m / 2, curve.tile_n / 2)
    return curve.peak_fraction * k / (k + curve.k_half * written) * np.maximum(large, small)


def _matmul_s(sizes: LocalSizes, m: Column, n: Column, k: Column, written: float = 1.0) -> Column:
    """Seconds of the matmul [m, k] x [k, n]."""
    figures = sizes.figures
    efficiency = _matmul_efficiency(sizes, m, n, k, written)
    arithmetic = 2 * m * n * k / (figures.matmul_flop_per_s * efficiency)
    nbytes = (m * k + k * n + written * m * n) * figures.recipe.activation_bytes
    return figures.efficiency.launch_s + np.maximum(arithmetic, nbytes / figures.memory_bytes_per_s)


def _cast_s(sizes: LocalSizes, elements: Column) -> Column:
    """Seconds to cast elements to the matmul dtype, where it is another."""
    each = sizes.figures.recipe.cast_bytes
    return _memory_bound_s(sizes, each * elements) if each else 0.0 * elements


def _written_in_accumulation(sizes: LocalSizes) -> float:
    """Elements that the matmul of a weight gradient moves per weight: it writes one, or reads and writes an
    accumulated gradient."""
    figures = sizes.figures
    if figures.profile.fuses_accumulation:
        return 2 * figures.recipe.gradient_bytes / figures.recipe.activation_bytes
    return 1.0


def _accumulation_s(sizes: LocalSizes, weights: Column) -> Column:
    """Seconds to add up gradients of weights in memory and to copy them, where kernels of their own do it
    with every micro-batch."""
    profile = sizes.figures.profile
    each = 0.0 if profile.reduces_by_block else profile.accumulated_bytes
    return _memory_bound_s(sizes, each * weights) if each else 0.0 * weights


def _grouped_matmul_seconds(operator: GroupedMatmulOperator, sizes: LocalSizes) -> KernelSeconds:
    figures, curve = sizes.figures, sizes.figures.efficiency.matmul
    grouped = figures.efficiency.grouped_matmul
    rows, k, n = sizes.count(operator.rows), sizes.width(operator.k), sizes.width(operator.n)
    local = operator.experts / sizes.rows.ep
    tokens = rows / local
    of_plain = grouped.fraction * tokens / (tokens + grouped.tokens_half)

    def seconds(inner: Column, written: float = 1.0) -> Column:
        nbytes = (rows * k + rows * n + written * local * k * n) * figures.recipe.activation_bytes
        efficiency = curve.peak_fraction * of_plain * inner / (inner + curve.k_half * written)
        arithmetic = 2 * rows * n * k / (figures.matmul_flop_per_s * efficiency)
        return figures.efficiency.launch_s + np.maximum(arithmetic, nbytes / figures.memory_bytes_per_s)

    bias_forward_s, bias_backward_s = _expert_bias_seconds(operator, sizes, rows * n, local)
    return KernelSeconds(
        seconds(k) + _cast_s(sizes, rows * k) + bias_forward_s,
        seconds(n) + _cast_s(sizes, rows * n) + bias_backward_s,
        (
            seconds(tokens, _written_in_accumulation(sizes)) + _accumulation_s(sizes, local * k * n)
            if operator.trained
            else 0.0 * rows
        ),
    )


def _expert_bias_seconds(
    operator: GroupedMatmulOperator, sizes: LocalSizes, elements: Column, local: Column
) -> tuple[Column, Column]:
    """Forward and backward of the kernels that add the biases of the experts' last product: 2 and 5 of each
    expert."""
    profile, launch = sizes.figures.profile, sizes.figures.efficiency.launch_s
    is_last = operator.k.role == "expert_ffn" and any(len(weight.shape) == 1 for weight in operator.weights)
    if not is_last or not profile.expert_bias_forward_bytes:
        return 0.0 * elements, 0.0 * elements
    forward = 2 * local * launch + _memory_bound_s(sizes, profile.expert_bias_forward_bytes * elements)
    backward = 5 * local * launch + _memory_bound_s(sizes, profile.expert_bias_backward_bytes * elements)
    return forward, backward


def attended_tokens(job: JobRecord) -> int:
    """Tokens within which attention is computed: a packed sample, or else the sequence."""
    return job.seq_len if job.mean_sample_len is None else job.mean_sample_len


def keys_of_query(seq_len: int, window: int | None, *, causal: bool) -> float:
    """Average number of keys that a query attends to."""
    width = seq_len if window is None else min(window, seq_len)
    if width < seq_len:
        return width - width * width / (2 * seq_len)
    return seq_len / 2 if causal else float(seq_len)


def _attention_seconds(operator: AttentionOperator, sizes: LocalSizes) -> KernelSeconds:
    figures, curve = sizes.figures, sizes.figures.fused
    if curve is None:
        return _unfused_seconds(operator, sizes)
    tokens = attended_tokens(figures.job) if operator.block is None else operator.block
    seq_len = figures.job.seq_len if operator.block is None else operator.block
    rate_len = tokens if operator.window is None or operator.window >= seq_len else seq_len
    heads, kv_heads = sizes.width(operator.heads), sizes.width(operator.kv_heads)
    dims = operator.qk_dim + operator.v_dim
    rows = sizes.count(operator.rows)
    work = 2 * rows * keys_of_query(tokens, operator.window, causal=operator.causal) * heads * dims
    nbytes = rows * (heads + kv_heads) * dims * figures.recipe.activation_bytes
    flop_per_s = figures.attention_flop_per_s * rate_len / (rate_len + curve.seq_half)
    launch, memory = figures.efficiency.launch_s, figures.memory_bytes_per_s
    forward = launch + np.maximum(work / (flop_per_s * curve.forward_fraction), nbytes / memory)
    backward = launch + np.maximum(2.5 * work / (flop_per_s * curve.backward_fraction), 2 * nbytes / memory)
    return KernelSeconds(forward, backward, 0.0 * forward)


def _unfused_seconds(operator: AttentionOperator, sizes: LocalSizes) -> KernelSeconds:
    """Two batched matmuls forward and four backward over all keys, and the softmax between them."""
    figures, each = sizes.figures, sizes.figures.recipe.activation_bytes
    keys = float(figures.job.seq_len if operator.block is None else operator.block)
    rows = sizes.count(operator.rows) * sizes.width(operator.heads)

    def product_s(n: float, k: float) -> Column:
        work = 2 * rows * n * k / (figures.attention_flop_per_s * _matmul_efficiency(sizes, rows, n, k))
        nbytes = (rows * k + k * n * (rows / keys) + rows * n) * each
        return figures.efficiency.launch_s + np.maximum(work, nbytes / figures.memory_bytes_per_s)

    products = product_s(keys, operator.qk_dim)
    if operator.v_dim > 0:
        products = products + product_s(operator.v_dim, keys)
    scores = rows * keys * (each * figures.profile.pointwise_passes)
    forward = products + _memory_bound_s(sizes, 4.5 * scores)
    return KernelSeconds(forward, 2 * products + _memory_bound_s(sizes, 5.5 * scores), 0.0 * forward)


def score_bytes(operator: AttentionOperator, sizes: LocalSizes) -> Column:
    """Saved activations of unfused attention. Per score: what the product with the values reads, the output
    of the softmax where that is another tensor, and the mask of dropout."""
    figures = sizes.figures
    read = figures.recipe.activation_bytes
    of_softmax = 4 if figures.profile.eager_modules else read
    if has_dropout(figures.model):
        each = of_softmax + 1 + read
    else:
        each = read if of_softmax == read else of_softmax + read
    keys = figures.job.seq_len if operator.block is None else operator.block
    queries = operator.repeats * sizes.count(operator.rows) * sizes.width(operator.heads)
    return each * queries * keys * (not operator.forward_only)


Amounts = Mapping[str, Column]
"""The amounts of a block by name, all per rank and micro-batch: see AMOUNTS."""

PHASES = ("forward", "input", "weight")

AMOUNTS = (
    "forward_computation_s", "input_computation_s", "weight_computation_s", "forward_s", "input_s",
    "weight_s", "matmul_s", "attention_s", "memory_bound_s", "tensor_s", "context_s", "expert_s",
    "host_s", "selective_s", "repeated_s", "forward_contended_s", "input_contended_s", "repeated_contended_s",
    "selective_contended_s",
    "dense", "expert", "dense_blocks", "expert_blocks", "trained_dense", "trained_expert", "trained_blocks",
    "saved_bytes", "saved_selective_bytes", "input_bytes", "waiting_bytes", "copied_bytes", "moved_bytes",
)  # fmt: skip
"""Amounts of a block that add up over a stage.

- Seconds of the phases, alone and with communication, and their parts.
- Seconds that selective and full recomputation repeat.
- `*_contended_s`: seconds of collectives that use the same cards as the gradient reduction between replicas,
  in the forward pass, the input gradient, a repeated forward pass, and under selective recomputation.
- Elements of dense and expert weights; 1 where the block has such weights. The same of weights that are not
  frozen.
- Bytes of saved activations for each choice of recompute, of what waits for weight gradients, and of copies
  of weights in the dtype of the matmuls. Those of tensors that named modules copy to the host.

A block also has `largest_bytes`, `logits_bytes`, `offloaded_bytes`, `replicated` and `selective_peak_bytes`,
which are not summed over a stage. The last are the tensors that exist at once while a layer is recomputed
selectively.
"""

SELECTIVE_AMOUNTS = ("selective_s", "selective_contended_s", "saved_selective_bytes", "selective_peak_bytes")
"""Amounts that depend on the set of recomputed modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The operators of a block; by phase, the number of collectives over the tensor ranks."""

    operators: tuple[LayerOperator, ...]
    experts: RoutingRecord | None
    tensor_syncs: Mapping[str, int]
    is_layer: bool


def block_shapes(model: LayersRecord) -> tuple[BlockShape, ...]:
    """The kinds of layers, then the embedding, then the head."""
    kinds = [
        BlockShape(
            operators=kind.operators,
            experts=kind.experts,
            tensor_syncs={"forward": kind.tensor_syncs, "input": kind.tensor_syncs},
            is_layer=True,
        )
        for kind in model.kinds
    ]
    embedding = BlockShape(
        operators=model.embedding,
        experts=None,
        tensor_syncs={"forward": 1, "input": 0},
        is_layer=False,
    )
    of_head = model.head_tensor_syncs
    head = BlockShape(
        operators=model.head,
        experts=model.head_experts,
        tensor_syncs={"forward": of_head, "input": of_head + 1},
        is_layer=False,
    )
    return (*kinds, embedding, head)


def block_amounts(
    figures: Figures, fabric: Fabric, groups: Groups, rows: StrategyRows, shape: BlockShape
) -> dict[str, Column]:
    """All amounts of a block on every row."""
    sizes = LocalSizes(figures=figures, rows=rows, experts=shape.experts)
    parts = _computation(sizes, shape)
    traffic = _communication(sizes, fabric, groups, shape, parts)
    found = {
        f"{part}_s": sum(parts[part, phase] for phase in PHASES)
        for part in ("matmul", "attention", "memory_bound")
    }
    busy = {}
    for phase in PHASES:
        alone = sum(parts[part, phase] for part in ("matmul", "attention", "memory_bound"))
        sent = sum(seconds for (_, of_phase), seconds in traffic.items() if of_phase == phase)
        waits = np.maximum(_host_s(sizes, shape.operators, phase) - alone - sent, 0.0)
        busy[phase] = alone + sent
        found[f"{phase}_computation_s"] = alone + waits
        found[f"{phase}_s"] = alone + waits + sent
        found["host_s"] = found.get("host_s", 0.0) + waits
    for kind in ("tensor", "context", "expert"):
        found[f"{kind}_s"] = traffic[kind, "forward"] + traffic[kind, "input"]
    for phase in ("forward", "input"):
        found[f"{phase}_contended_s"] = sum(
            np.where(_contends_with_replicas(sizes, groups, getattr(groups, kind)), traffic[kind, phase], 0.0)
            for kind in ("tensor", "context", "expert")
        )
    contended_s = found["forward_contended_s"]
    found["repeated_contended_s"] = contended_s if shape.is_layer else 0.0 * contended_s
    found |= _bytes(sizes, shape)
    one: Column = np.ones(np.shape(sizes.tokens))
    found["dense_blocks"] = one
    found["expert_blocks"] = one if shape.experts is not None else 0.0 * one
    trains = any(operator.trained and operator.weights for operator in shape.operators)
    found["trained_blocks"] = one if trains else 0.0 * one
    selective = parts["selective", "forward"]
    found["selective_s"] = selective if shape.is_layer else 0.0 * selective
    started = _host_s(sizes, shape.operators[: _left_out(sizes, shape)], "forward")
    repeated_s = np.maximum(busy["forward"] - parts["left_out", "forward"], started)
    found["repeated_s"] = repeated_s if shape.is_layer else 0.0 * selective
    found |= {"selective_contended_s": 0.0 * selective, "selective_peak_bytes": 0.0 * selective}
    if shape.is_layer:
        contended_s = {
            kind: np.where(
                _contends_with_replicas(sizes, groups, getattr(groups, kind)), traffic[kind, "forward"], 0.0
            )
            for kind in ("tensor", "context", "expert")
        }
        found |= _of_named_sets(sizes, shape, traffic, contended_s, found)
    return found


def _of_named_sets(
    sizes: LocalSizes,
    shape: BlockShape,
    traffic: Mapping[tuple[str, str], Column],
    contended_s: Mapping[str, Column],
    own: Mapping[str, Column],
) -> dict[str, Column]:
    """SELECTIVE_AMOUNTS of a layer: `own` in rows that name no modules, else those of the set of the row."""
    found = {name: own[name] + 0.0 * sizes.tokens for name in SELECTIVE_AMOUNTS}
    sets = np.asarray(sizes.rows.recompute_modules)
    for modules in np.unique(sets):
        if modules:
            named = _of_named_set(sizes, shape, traffic, contended_s, own["saved_bytes"], str(modules))
            found = {name: np.where(sets == modules, named[name], found[name]) for name in SELECTIVE_AMOUNTS}
    return found


def _of_named_set(
    sizes: LocalSizes,
    shape: BlockShape,
    traffic: Mapping[tuple[str, str], Column],
    contended_s: Mapping[str, Column],
    all_saved: Column,
    modules: str,
) -> dict[str, Column]:
    """SELECTIVE_AMOUNTS of a layer under one set of modules. Each half of the layer is recomputed at once."""
    profile, names = sizes.figures.profile, repeated_by_themselves(modules)
    again_s = again_contended_s = started_s = 0.0 * sizes.tokens
    halves = {"attention": again_s, "mlp": again_s}
    for part in module_parts(shape.operators):
        if part.module not in names:
            continue
        again_s = again_s + sum(operator_seconds(operator, sizes).forward for operator in part.repeated)
        started_s = started_s + profile.dispatch_s * len(part.repeated)
        if "expert" in part.collectives:
            started_s = started_s + profile.expert_dispatch_s
        for kind in part.collectives:
            # One of the tensor-parallel collectives of the layer is that of the module.
            share = 1 / max(shape.tensor_syncs["forward"], 1) if kind == "tensor" else 1.0
            again_s = again_s + share * traffic[kind, "forward"]
            again_contended_s = again_contended_s + share * contended_s[kind]
        dropped = sum((sizes.saved_bytes(saved, operator) for operator, saved in part.dropped), start=0.0)
        if part.drops_scores and sizes.figures.fused is None:
            cores = (each for each in part.repeated if isinstance(each, AttentionOperator))
            dropped = dropped + sum(score_bytes(core, sizes) for core in cores)
        if profile.eager_modules:
            dropped = dropped + sum(
                sizes.count(operator.rows) * eager_row_bytes(sizes, operator) for operator in part.repeated
            )
        halves[part.half] = halves[part.half] + dropped
    return {
        "selective_s": np.maximum(again_s, started_s),
        "selective_contended_s": again_contended_s,
        "saved_selective_bytes": all_saved - halves["attention"] - halves["mlp"],
        "selective_peak_bytes": np.maximum(halves["attention"], halves["mlp"]),
    }


def _contends_with_replicas(sizes: LocalSizes, groups: Groups, group: Sizes) -> Column:
    """Whether a group's collectives contend with the gradient reduction between replicas: both cross
    nodes, or both stay inside them."""
    tiers = sizes.figures.cluster.tiers
    apart: Column = np.zeros_like(sizes.rows.tp, dtype=bool)
    is_out = apart
    for tier, size in zip(tiers, groups.data, strict=True):
        is_out = is_out | (tier.is_network & (size > 1))
    are_replicas: Column = np.prod(np.broadcast_arrays(*groups.data), axis=0) > 1
    for tier, size in zip(tiers, group, strict=True):
        apart = apart | ((size > 1) & (is_out == tier.is_network))
    return apart & are_replicas


def _computation(sizes: LocalSizes, shape: BlockShape) -> dict[tuple[str, str], Column]:
    """Seconds by part and phase; the part `selective` is what selective recomputation repeats."""
    zero = 0.0 * sizes.tokens
    found = {
        (part, phase): zero
        for part in ("matmul", "attention", "memory_bound", "selective", "left_out")
        for phase in PHASES
    }
    left_out = _left_out(sizes, shape)
    for number, operator in enumerate(shape.operators):
        part = {
            "matmul": "matmul", "grouped_matmul": "matmul", "attention": "attention", "scan": "attention",
        }.get(operator.kind, "memory_bound")  # fmt: skip
        seconds = operator_seconds(operator, sizes)
        for phase in PHASES:
            found[part, phase] = found[part, phase] + getattr(seconds, phase)
        if number >= left_out:
            found["left_out", "forward"] = found["left_out", "forward"] + seconds.forward
        if operator.kind == "attention" or getattr(operator, "selective", False):
            found["selective", "forward"] = found["selective", "forward"] + seconds.forward
    return found


def _left_out(sizes: LocalSizes, shape: BlockShape) -> int:
    """Index of the last matmul: a recomputation that stops early needs no operator from there on."""
    products = [
        number
        for number, operator in enumerate(shape.operators)
        if isinstance(operator, MatmulOperator | GroupedMatmulOperator)
    ]
    if not sizes.figures.profile.recompute_stops_early or not products:
        return len(shape.operators)
    return products[-1]


def _host_s(sizes: LocalSizes, operators: Sequence[LayerOperator], phase: str) -> float:
    """Seconds in which the host starts all kernels of a phase."""
    profile = sizes.figures.profile
    if phase == "weight":
        return profile.dispatch_s * sum(
            operator.repeats
            for operator in operators
            if operator.trained
            and isinstance(operator, MatmulOperator | GroupedMatmulOperator | LookupOperator)
        )
    has_experts = any(isinstance(operator, GroupedMatmulOperator) for operator in operators)
    started = sum(one.repeats for one in operators if phase == "forward" or not one.forward_only)
    return profile.dispatch_s * started + (profile.expert_dispatch_s if has_experts else 0.0)


def _communication(
    sizes: LocalSizes,
    fabric: Fabric,
    groups: Groups,
    shape: BlockShape,
    parts: Mapping[tuple[str, str], Column],
) -> dict[tuple[str, str], Column]:
    """Exposed seconds by kind (tensor, context, expert) and phase (forward, input)."""
    exposed_s = sizes.figures.exposed_s
    is_ring = sizes.rows.cp_kind == "ring"
    sync_s = _sync_s(sizes, fabric, groups)
    routing_s = _routing_s(sizes, fabric, groups, shape)
    profile = sizes.figures.profile
    overlap = np.where(is_ring, profile.context_overlap, 0.0)
    scan_s = _scan_exchange_s(sizes, fabric, groups, shape)
    found = {}
    for phase, times in (("forward", 1), ("input", 2)):
        ring_s, a2a_s = _context_s(sizes, fabric, groups, shape)
        context_s = np.where(is_ring, times * ring_s, a2a_s)
        hiding, share = parts["matmul", phase], np.asarray(profile.tensor_overlap)
        if phase == "input":
            hiding, share = hiding + parts["matmul", "weight"], share + profile.tensor_backward_overlap
        if profile.needs_sequence_parallel:
            share = np.where(sizes.rows.sequence_parallel, share, 0.0)
        found["tensor", phase] = exposed_s(shape.tensor_syncs[phase] * sync_s, hiding, share)
        found["context", phase] = exposed_s(context_s, parts["attention", phase], overlap) + scan_s
        routed_share = np.where(sizes.rows.ep > 1, profile.expert_overlap, 0.0)
        found["expert", phase] = exposed_s(routing_s, parts["matmul", phase], routed_share)
    return found


def _scan_exchange_s(sizes: LocalSizes, fabric: Fabric, groups: Groups, shape: BlockShape) -> Column:
    """Seconds in one phase of the two all-to-alls around each scan, which computes whole sequences of some
    heads."""
    each = sizes.tokens * sizes.figures.recipe.activation_bytes
    total = 0.0 * sizes.tokens
    for operator in shape.operators:
        if isinstance(operator, ScanOperator):
            elements = sum(sizes.width(extent) for extent in operator.exchanged)
            total = total + 2 * all_to_all_s(fabric, each * elements / 2, groups.context, 1.0)
    return np.where(sizes.rows.cp > 1, total, 0.0)


def _sync_s(sizes: LocalSizes, fabric: Fabric, groups: Groups) -> Column:
    nbytes = sizes.hidden_bytes("tokens")
    return np.where(
        sizes.rows.sequence_parallel,
        all_gather_s(fabric, nbytes, groups.tensor)
        + reduce_scatter_s(fabric, sizes.figures.backend, nbytes, groups.tensor),
        all_reduce_s(fabric, nbytes, groups.tensor),
    )


def _context_s(sizes: LocalSizes, fabric: Fabric, groups: Groups, shape: BlockShape) -> tuple[Column, Column]:
    """Seconds of context parallelism in one forward phase: keys and values around a ring; or all-to-all of
    heads and tokens."""
    each = sizes.figures.recipe.activation_bytes
    ring_s = a2a_s = 0.0 * sizes.tokens
    for operator in shape.operators:
        if isinstance(operator, AttentionOperator) and operator.block is None:
            dims = operator.qk_dim + operator.v_dim
            kv, q = sizes.width(operator.kv_heads) * dims, sizes.width(operator.heads) * dims
            ring_s = ring_s + all_gather_s(fabric, sizes.tokens * kv * each * sizes.rows.cp, groups.context)
            nbytes = sizes.tokens * (kv + q) * each / 4
            a2a_s = a2a_s + 4 * all_to_all_s(fabric, nbytes, groups.context, 1.0)
    return ring_s, a2a_s


def _routing_s(sizes: LocalSizes, fabric: Fabric, groups: Groups, shape: BlockShape) -> Column:
    experts, rows = shape.experts, sizes.rows
    if experts is None or not any(
        isinstance(operator, GroupedMatmulOperator) for operator in shape.operators
    ):
        return 0.0 * sizes.tokens
    routed = sizes.hidden_bytes("routed")
    parts = np.prod(np.array(np.broadcast_arrays(*groups.expert[1:], 1)), axis=0)
    missed = (1 - 1 / parts) ** experts.top_k
    copies = parts * (1 - missed) / experts.top_k
    if experts.groups > 1:
        copies = np.minimum(copies, experts.groups_per_token / experts.top_k)
    spread = 2 * all_to_all_s(fabric, routed / rows.etp, groups.expert, copies)
    split = all_gather_s(fabric, routed, groups.expert_tensor)
    split = split + reduce_scatter_s(fabric, sizes.figures.backend, routed, groups.expert_tensor)
    whole = all_gather_s(fabric, sizes.hidden_bytes("tokens"), groups.tensor)
    needs_whole = (rows.tp > 1) & ~rows.sequence_parallel
    return (
        np.where(rows.ep > 1, spread, 0.0)
        + np.where(rows.etp > 1, split, 0.0)
        + np.where(needs_whole, whole, 0.0)
    )


def _bytes(sizes: LocalSizes, shape: BlockShape) -> dict[str, Column]:
    zero = 0.0 * sizes.tokens
    dense = expert = all_saved = selective_saved = largest = logits = copies = zero
    trained_dense = trained_expert = zero
    each_copy = copied_bytes(sizes.figures)
    replicated = 0
    for operator in shape.operators:
        for weight in operator.weights:
            elements = sizes.weight_elements(weight)
            is_matrix = (
                isinstance(operator, MatmulOperator | GroupedMatmulOperator) and len(weight.shape) == 2
            )
            if is_matrix and operator.rows != "head":
                copies = copies + elements * each_copy
            if weight.experts:
                expert = expert + elements
                trained_expert = trained_expert + (elements if operator.trained else zero)
            else:
                dense = dense + elements
                trained_dense = trained_dense + (elements if operator.trained else zero)
                if operator.trained and all(extent.role == "whole" for extent in weight.shape):
                    replicated += weight.parameters
        if isinstance(operator, AttentionOperator) and sizes.figures.fused is None:
            scores = score_bytes(operator, sizes)
            all_saved, largest = all_saved + scores, np.maximum(largest, scores)
        for saved in operator.saved:
            nbytes = sizes.saved_bytes(saved, operator)
            if isinstance(operator, LossOperator):
                logits = logits + nbytes
                continue
            all_saved = all_saved + nbytes
            selective_saved = selective_saved + (0.0 if saved.selective else 1.0) * nbytes
            largest = np.maximum(largest, nbytes)
        if sizes.figures.profile.eager_modules and not operator.forward_only:
            nbytes = operator.repeats * sizes.count(operator.rows) * eager_row_bytes(sizes, operator)
            all_saved = all_saved + nbytes
            if not (isinstance(operator, PointwiseOperator) and operator.selective):
                selective_saved = selective_saved + nbytes
    left, moved = offloaded_bytes(sizes, shape)
    waiting = waiting_bytes(sizes, shape.operators, all_saved)
    all_saved, selective_saved = all_saved - left, selective_saved - left
    return {
        "moved_bytes": moved,
        "offloaded_bytes": left,
        "dense": dense,
        "expert": expert,
        "trained_dense": trained_dense,
        "trained_expert": trained_expert,
        "replicated": replicated + zero,
        "saved_bytes": all_saved,
        "saved_selective_bytes": selective_saved if shape.is_layer else all_saved,
        "input_bytes": sizes.hidden_bytes("sequence") if shape.is_layer else all_saved,
        "waiting_bytes": zero + waiting,
        "copied_bytes": copies,
        "largest_bytes": largest,
        "logits_bytes": logits,
    }


ATTENTION_INPUTS = {
    "qkv_linear": (
        "layer.input",
        "attention.norm.output",
        "attention.q_norm.input",
        "attention.k_norm.input",
    ),
    "attn_norm": (),
}
"""Saved tensors that a module before attention over heads copies to the host: its norm is fused with it, and
those of queries and keys are in it."""

COPIED = {
    "core_attn": ("attention.q", "attention.k", "attention.v", "attention.kv", "attention.core.output",
                  "attention.core.log_sum_exp"),
    "attn_proj": ("attention.core.output",),
    "expert_fc1": ("experts.input",),
    "moe_act": ("experts.up.output",),
}  # fmt: skip
"""Saved tensors that other modules copy. `mlp_norm` copies its input before experts, where it is alone."""

LEAST_COPIED = 2**20
"""Elements of a tensor below which it stays."""


def offloaded_bytes(sizes: LocalSizes, shape: BlockShape) -> tuple[Column, Column]:
    """Bytes of saved tensors that modules have taken from the device, and bytes that they copy. The output of
    attention is on the device until the projection that reads it has copied it too."""
    chosen = sizes.figures.profile.offload_modules.split("+")
    has_experts = any(isinstance(one, GroupedMatmulOperator) for one in shape.operators)
    is_latent = any(one.name.endswith("attention.kv_up") for one in shape.operators)
    left = moved = 0.0 * sizes.tokens
    for operator in shape.operators:
        for saved in () if operator.rows in ("patches", "images") else operator.saved:
            copies = sum(_copies(name, operator, saved.name, is_latent, has_experts) for name in chosen)
            if not copies:
                continue
            nbytes = sizes.saved_bytes(saved, operator)
            each = sizes.saved_elements(saved, operator)
            halves = 2 if saved.name.endswith("attention.kv") else 1
            nbytes = np.where(each / halves >= LEAST_COPIED, nbytes, 0.0)
            moved = moved + copies * nbytes
            stays = saved.name.endswith("attention.core.output") and "attn_proj" not in chosen
            left = left + (0.0 if stays else 1.0) * nbytes
    return left, moved


def _copies(module: str, operator: LayerOperator, tensor: str, is_latent: bool, has_experts: bool) -> bool:
    """Whether a module copies a saved tensor of an operator. The tensors within adapters stay."""
    if tensor.endswith("_lora_a.output"):
        return False
    if module == "mlp_norm":
        return has_experts and tensor.endswith("mlp.norm.input")
    if module in ATTENTION_INPUTS and is_latent:
        inner = operator.name.rpartition("attention.")[2].partition("_lora_")[0]
        is_norm = inner == "norm"
        if "attention." not in operator.name or inner in ("core", "out", "dropout", "residual"):
            return False
        return is_norm if module == "attn_norm" else not is_norm
    if module in ATTENTION_INPUTS:
        if "attention." not in operator.name:
            return False
        return tensor.endswith(ATTENTION_INPUTS[module]) if ATTENTION_INPUTS[module] else False
    return tensor.endswith(COPIED.get(module, ("?",)))


def waiting_bytes(sizes: LocalSizes, operators: Sequence[LayerOperator], all_saved: Column) -> Column:
    """Bytes that a backward pass of the inputs leaves for that of the weights: of every matmul with trained
    weights its input and the gradient of its output; where PyTorch keeps the graph, all saved tensors, and
    the gradients of the outputs of matmuls and norms."""
    recipe = sizes.figures.recipe
    keeps_all = sizes.figures.profile.keeps_split_graphs
    found: Column = all_saved if keeps_all else 0.0
    for place, operator in enumerate(operators):
        if operator.forward_only:
            continue
        count = operator.repeats * sizes.count(operator.rows)
        match operator:
            case MatmulOperator(trained=False) | GroupedMatmulOperator(trained=False):
                continue
            case MatmulOperator() | GroupedMatmulOperator():
                narrow = (
                    recipe.activation_bytes if keeps_all or operator.rows == "head" else recipe.operand_bytes
                )
                found = found + count * sizes.width(operator.n) * narrow
                if not keeps_all:
                    found = found + sum(
                        sizes.saved_bytes(saved, operator) for saved in _inputs(operators, place)
                    )
            case PointwiseOperator() if keeps_all and operator.weights:
                # A norm reads its input and writes its output.
                moved = sum(sizes.width(extent) for extent in operator.forward)
                found = found + count * moved * recipe.activation_bytes / 2
    return found


def _inputs(operators: Sequence[LayerOperator], place: int) -> Iterable[SavedRecord]:
    """The saved tensors that the matmul at this place reads and no matmul before it: its own ones, or the
    output of the attention just before it, frozen matmuls aside."""
    operator = operators[place]
    earlier = [
        one
        for one in operators[:place]
        if one.trained or not isinstance(one, MatmulOperator | GroupedMatmulOperator)
    ]
    before = earlier[-1] if earlier else None
    if not operator.saved and isinstance(before, AttentionOperator):
        return (saved for saved in before.saved if saved.selective and saved.dtype == "compute")
    return operator.saved


def eager_row_bytes(sizes: LocalSizes, operator: LayerOperator) -> Column:
    """Bytes per row that only modules without fused kernels save."""
    more: Column = 0.0
    if isinstance(operator, PointwiseOperator):
        more = more + sum(sizes.width(extent) for extent in operator.eager)
    return _usual_eager_bytes(sizes, operator) + more * sizes.figures.recipe.activation_bytes


def _usual_eager_bytes(sizes: LocalSizes, operator: LayerOperator) -> Column:
    """Those of all families: of an RMSNorm 4 per element (without the
    normalised input, where its weight is frozen), of a gated activation the output of its function, of
    experts their outputs."""
    each = sizes.figures.recipe.activation_bytes
    match operator:
        case GroupedMatmulOperator() if operator.n.role == "whole":
            return operator.n.size * each
        case PointwiseOperator() if operator.weights:
            # A LayerNorm has two weights for what it normalises, an RMSNorm one.
            is_rms = len(operator.weights) == len(operator.forward)
            is_rms = is_rms and all(len(weight.shape) == 1 for weight in operator.weights)
            elements = sum(sizes.width(extent) for extent in operator.forward) / 2
            return elements * (4 if operator.trained else 4 - each) if is_rms else 0
        case PointwiseOperator() if len(operator.saved) == 1:
            halves = operator.saved[0].width
            if operator.forward[0].size * 2 * operator.repeats == halves.size * 3:
                return sizes.width(halves) / (2 * operator.repeats) * each
    return 0


def copied_bytes(figures: Figures) -> float:
    """Bytes of copies of a weight in the dtype of the matmuls: a plain one and a transposed one, where the
    software keeps them; less the weight itself, where it is in that dtype alone."""
    has_copies = figures.profile.keeps_low_precision_weights and figures.recipe.cast_bytes > 0
    if not has_copies:
        return 0
    itself = figures.recipe.weight_bytes if figures.profile.has_fp8_parameters else 0
    return max(2 * figures.recipe.operand_bytes - itself, 0)


def tied_head_elements(head: tuple[LayerOperator, ...]) -> int:
    """Elements that the matmuls of the head multiply with and that are another block's weights."""
    return sum(
        operator.k.size * operator.n.size
        for operator in head
        if isinstance(operator, MatmulOperator) and not operator.weights
    )
