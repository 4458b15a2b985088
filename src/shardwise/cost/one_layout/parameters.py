"""What a parameter costs: to hold it, to update it, to bring it to its readers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.one_layout.ledger import StepLedger
from shardwise.cost.one_layout.rank import (
    LocalShard,
    Placements,
    Rank,
    gradient_shards,
    owned_shards,
    value_shards,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """A parameter at one of its readers: how it is stored and used, the `share` of the reader's computation
    beside which its traffic runs, and what the reader needs while it works. Parameters of a block travel
    together: this one is the share `bucket` of a message as long as all of them."""

    shape: tuple[int, ...]
    stored: Placements
    used: Placements
    share: float
    bucket: float
    forward_s: float
    backward_s: float
    working_bytes: float


def store(rank: Rank, ledger: StepLedger, use: ParameterUse) -> None:
    """Weights, gradients and optimizer states, and the pass of the optimizer over what the rank owns."""
    recipe, optimizer = rank.machine.recipe, rank.machine.optimizer
    whole = rank.elements(use.shape, value_shards(use.stored))
    owned = rank.elements(use.shape, owned_shards(use.stored))
    ledger.resident["parameters"] += whole * recipe.weight_bytes
    ledger.resident["gradients"] += whole * recipe.gradient_bytes
    ledger.resident["optimizer"] += owned * (recipe.master_bytes + optimizer.state_bytes)
    # Gradient read, master copy (or the weight itself) and states read and written, weight written; the norm
    # of the gradients reads them twice and writes them.
    copied = (
        2.0 * recipe.master_bytes + recipe.weight_bytes if recipe.master_bytes else 2.0 * recipe.weight_bytes
    )
    moved_bytes = 4.0 * recipe.gradient_bytes + copied + 2.0 * optimizer.state_bytes
    ledger.spend("optimizer", owned * moved_bytes / rank.stream_bytes_per_s, "step")
    if optimizer.work_flop_per_hidden and len(use.shape) > 1:
        peak = rank.machine.matmul_flop_per_s * rank.machine.efficiency.matmul.peak_fraction
        work_flop = owned * optimizer.work_flop_per_hidden * min(use.shape)
        ledger.spend("optimizer", work_flop / peak, "step")


def _whole_bytes(rank: Rank, use: ParameterUse, used: Placements, is_gathered: bool) -> float:
    """Copies beside what is stored: gathered weights of this use, and of the next where they come beside
    computation; and a gradient of more than is stored."""
    recipe = rank.machine.recipe
    weights = 0 if not is_gathered else 1 if rank.profile.shard_overlap == 0.0 else 2
    in_use = _in_use(rank, use, used)
    is_more = in_use != rank.elements(use.shape, value_shards(use.stored))
    return (weights * recipe.weight_bytes + (recipe.gradient_bytes if is_more else 0.0)) * in_use


def _in_use(rank: Rank, use: ParameterUse, used: Placements) -> float:
    return rank.elements(use.shape, value_shards(used))


def _moved_s(
    rank: Rank,
    use: ParameterUse,
    element_bytes: float,
    start: tuple[LocalShard, ...],
    end: tuple[LocalShard, ...],
) -> float:
    """Its part of the time of the block's message."""
    return use.bucket * rank.redistribute_s(use.shape, element_bytes / use.bucket, start, end)


def _gather_s(rank: Rank, use: ParameterUse, used: Placements) -> float:
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, value_shards(use.stored), value_shards(used))


def _after_backward(use: ParameterUse, used: Placements) -> tuple[LocalShard, ...]:
    """What is held of a gathered parameter's gradient behind a backward pass: along axes that split it its
    parts, along the others what its reader leaves."""
    pairs = zip(value_shards(use.stored), gradient_shards(used), strict=True)
    return tuple(own if isinstance(own, int) else left for own, left in pairs)


def _reduce_scatter_s(rank: Rank, use: ParameterUse, used: Placements) -> float:
    gradient_bytes = rank.machine.recipe.gradient_bytes
    return _moved_s(rank, use, gradient_bytes, gradient_shards(used), _after_backward(use, used))


def _summed_s(rank: Rank, use: ParameterUse, left: tuple[LocalShard, ...]) -> float:
    """Bringing what is `left` of a gradient behind the last pass to what is updated."""
    return _moved_s(rank, use, rank.machine.recipe.gradient_bytes, left, owned_shards(use.stored))


def _update_s(rank: Rank, use: ParameterUse) -> float:
    """Gathering the weights that others updated."""
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, owned_shards(use.stored), value_shards(use.stored))


def _overlapped_s(rank: Rank, seconds: float, computed_s: float, overlap: float) -> tuple[float, float]:
    hidden_s = min(overlap * seconds, computed_s)
    return seconds + (rank.slowdown - 2.0) * hidden_s, hidden_s


def use_alone(rank: Rank, ledger: StepLedger, use: ParameterUse, *, is_recomputed: bool) -> None:
    """The only reader: its weights come beside its forward pass and half of its backward pass, gradients of
    sharded ones leave beside the other half; others, and these along further axes, are summed once beside
    any backward computation. A reader that `is_recomputed` computed has its weights come once more."""
    gather_s = _gather_s(rank, use, use.used)
    shard_overlap, data_overlap = rank.profile.shard_overlap, rank.profile.data_overlap
    forward_s, half_s = use.share * use.forward_s, use.share * use.backward_s / 2.0
    there_s, _ = _overlapped_s(rank, gather_s, forward_s, shard_overlap)
    back_s, busy_s = _overlapped_s(rank, gather_s, half_s, shard_overlap)
    update_s = _update_s(rank, use)
    update_s -= min(rank.profile.state_overlap * update_s, forward_s)
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", back_s, "backward")
    ledger.spend("gathers", update_s, "step")
    ledger.busy_s += busy_s
    left = gradient_shards(use.used)
    if gather_s > 0.0:
        left = _after_backward(use, use.used)
        reduce_scatter_s, busy_s = _overlapped_s(
            rank, _reduce_scatter_s(rank, use, use.used), half_s, shard_overlap
        )
        ledger.spend("gradients", reduce_scatter_s, "backward")
        ledger.busy_s += busy_s
    ledger.sum_gradient(_summed_s(rank, use, left), data_overlap)
    if is_recomputed:
        recompute_s, busy_s = _overlapped_s(rank, gather_s, forward_s, shard_overlap)
        ledger.spend("gathers", recompute_s, "backward")
        ledger.busy_s += busy_s
    ledger.need(use.working_bytes + _whole_bytes(rank, use, use.used, gather_s > 0.0))


def use_shared(
    rank: Rank, ledger: StepLedger, use: ParameterUse, shared: Placements, *, readers: int
) -> None:
    """One of several readers, for all of which the parameter is brought to `shared`; `readers` is their
    number at the first of them, and 0 later: there all of them pay for that, and the gradient is summed."""
    recipe = rank.machine.recipe
    gather_s = _gather_s(rank, use, shared)
    whole_bytes = _whole_bytes(rank, use, shared, gather_s > 0.0)
    ledger.need_now(whole_bytes)
    if readers:
        ledger.spend("gathers", readers * gather_s, "forward")
        ledger.spend("gathers", readers * gather_s, "backward")
        ledger.spend("gathers", _update_s(rank, use), "step")
        left, overlap = gradient_shards(shared), rank.profile.data_overlap
        if gather_s > 0.0:
            left, overlap = _after_backward(use, shared), rank.profile.shard_overlap
            ledger.sum_gradient(_reduce_scatter_s(rank, use, shared), overlap)
        ledger.sum_gradient(_summed_s(rank, use, left), overlap)
        ledger.need(whole_bytes)
        if value_shards(use.stored) != value_shards(shared):  # a sum of its own until all readers are done
            ledger.resident["gradients"] += recipe.gradient_bytes * _in_use(rank, use, shared)
    start, end = value_shards(shared), value_shards(use.used)
    there_s = rank.redistribute_s(use.shape, recipe.weight_bytes, start, end)
    back_s = rank.redistribute_s(
        use.shape, recipe.gradient_bytes, gradient_shards(use.used), gradient_shards(shared)
    )
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", there_s + back_s, "backward")
    if start != end:
        copy = rank.elements(use.shape, end) * (recipe.weight_bytes + recipe.gradient_bytes)
        ledger.need(use.working_bytes + copy)
