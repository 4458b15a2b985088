"""What a parameter costs: to hold it, to update it, to bring it to its readers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.one_layout.ledger import Ledger
from shardwise.cost.one_layout.rank import Held, Placements, Rank, gradient_held, owned_held, value_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
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


def store(rank: Rank, ledger: Ledger, use: Use) -> None:
    """Weights, gradients and optimizer states, and the pass of the optimizer over what the rank owns."""
    recipe, optimizer = rank.machine.recipe, rank.machine.optimizer
    whole = rank.elements(use.shape, value_held(use.stored))
    owned = rank.elements(use.shape, owned_held(use.stored))
    ledger.held["parameters"] += whole * recipe.weight_bytes
    ledger.held["gradients"] += whole * recipe.gradient_bytes
    ledger.held["optimizer"] += owned * (recipe.master_bytes + optimizer.state_bytes)
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


def _whole_bytes(rank: Rank, use: Use, used: Placements, is_gathered: bool) -> float:
    """Copies beside what is stored: gathered weights of this use, and of the next where they come beside
    computation; and a gradient of more than is stored."""
    recipe = rank.machine.recipe
    weights = 0 if not is_gathered else 1 if rank.profile.shard_overlap == 0.0 else 2
    in_use = _in_use(rank, use, used)
    is_more = in_use != rank.elements(use.shape, value_held(use.stored))
    return (weights * recipe.weight_bytes + (recipe.gradient_bytes if is_more else 0.0)) * in_use


def _in_use(rank: Rank, use: Use, used: Placements) -> float:
    return rank.elements(use.shape, value_held(used))


def _moved_s(
    rank: Rank, use: Use, element_bytes: float, start: tuple[Held, ...], end: tuple[Held, ...]
) -> float:
    """Its part of the time of the block's message."""
    return use.bucket * rank.bring_s(use.shape, element_bytes / use.bucket, start, end)


def _gather_s(rank: Rank, use: Use, used: Placements) -> float:
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, value_held(use.stored), value_held(used))


def _behind_pass(use: Use, used: Placements) -> tuple[Held, ...]:
    """What is held of a gathered parameter's gradient behind a backward pass: along axes that split it its
    parts, along the others what its reader leaves."""
    pairs = zip(value_held(use.stored), gradient_held(used), strict=True)
    return tuple(kept if isinstance(kept, int) else left for kept, left in pairs)


def _scattered_s(rank: Rank, use: Use, used: Placements) -> float:
    gradient_bytes = rank.machine.recipe.gradient_bytes
    return _moved_s(rank, use, gradient_bytes, gradient_held(used), _behind_pass(use, used))


def _summed_s(rank: Rank, use: Use, left: tuple[Held, ...]) -> float:
    """Bringing what is `left` of a gradient behind the last pass to what is updated."""
    return _moved_s(rank, use, rank.machine.recipe.gradient_bytes, left, owned_held(use.stored))


def _update_s(rank: Rank, use: Use) -> float:
    """Gathering the weights that others updated."""
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, owned_held(use.stored), value_held(use.stored))


def _beside_s(rank: Rank, seconds: float, computed_s: float, overlap: float) -> tuple[float, float]:
    hidden_s = min(overlap * seconds, computed_s)
    return seconds + (rank.slowdown - 2.0) * hidden_s, hidden_s


def use_alone(rank: Rank, ledger: Ledger, use: Use, *, is_again: bool) -> None:
    """The only reader: its weights come beside its forward pass and half of its backward pass, gradients of
    sharded ones leave beside the other half; others, and these along further axes, are summed once beside
    any backward computation. A reader that `is_again` computed has its weights come once more."""
    gather_s = _gather_s(rank, use, use.used)
    shard_overlap, data_overlap = rank.profile.shard_overlap, rank.profile.data_overlap
    forward_s, half_s = use.share * use.forward_s, use.share * use.backward_s / 2.0
    there_s, _ = _beside_s(rank, gather_s, forward_s, shard_overlap)
    back_s, busy_s = _beside_s(rank, gather_s, half_s, shard_overlap)
    update_s = _update_s(rank, use)
    update_s -= min(rank.profile.state_overlap * update_s, forward_s)
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", back_s, "backward")
    ledger.spend("gathers", update_s, "step")
    ledger.busy_s += busy_s
    left = gradient_held(use.used)
    if gather_s > 0.0:
        left = _behind_pass(use, use.used)
        scattered_s, busy_s = _beside_s(rank, _scattered_s(rank, use, use.used), half_s, shard_overlap)
        ledger.spend("gradients", scattered_s, "backward")
        ledger.busy_s += busy_s
    ledger.sum_gradient(_summed_s(rank, use, left), data_overlap)
    if is_again:
        again_s, busy_s = _beside_s(rank, gather_s, forward_s, shard_overlap)
        ledger.spend("gathers", again_s, "backward")
        ledger.busy_s += busy_s
    ledger.need(use.working_bytes + _whole_bytes(rank, use, use.used, gather_s > 0.0))


def use_shared(rank: Rank, ledger: Ledger, use: Use, shared: Placements, *, readers: int) -> None:
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
        left, overlap = gradient_held(shared), rank.profile.data_overlap
        if gather_s > 0.0:
            left, overlap = _behind_pass(use, shared), rank.profile.shard_overlap
            ledger.sum_gradient(_scattered_s(rank, use, shared), overlap)
        ledger.sum_gradient(_summed_s(rank, use, left), overlap)
        ledger.need(whole_bytes)
        if value_held(use.stored) != value_held(shared):  # a sum of its own until all readers are done
            ledger.held["gradients"] += recipe.gradient_bytes * _in_use(rank, use, shared)
    start, end = value_held(shared), value_held(use.used)
    there_s = rank.bring_s(use.shape, recipe.weight_bytes, start, end)
    back_s = rank.bring_s(use.shape, recipe.gradient_bytes, gradient_held(use.used), gradient_held(shared))
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", there_s + back_s, "backward")
    if start != end:
        copy = rank.elements(use.shape, end) * (recipe.weight_bytes + recipe.gradient_bytes)
        ledger.need(use.working_bytes + copy)
