"""How long the actions of each stage take (docs/concepts/cost-model.md, sections 10 and 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.check.figures import Figures
from shardwise.check.rows import Column, Family, StrategyRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage; `recompute_s`, `offload_s` and `traffic_s` are parts of them, per microbatch.

    `input_s` and `weight_s` are the halves of the backward without what a W costs as an action of its own.
    """

    forward_s: Column
    input_s: Column
    weight_s: Column
    weight_action_s: Column
    gather_s: Column
    reduce_s: Column
    recompute_s: Column
    offload_s: Column
    traffic_s: Column

    def action_s(self, kind: str) -> Column:
        """Seconds of an action F, B, I or W."""
        return {
            "F": self.forward_s,
            "B": self.input_s + self.weight_s,
            "I": self.input_s,
            "W": self.weight_action_s,
        }[kind]

    def row(self, index: int) -> StageSeconds:
        """The times of one row as plain numbers."""
        return StageSeconds(
            **{name: float(getattr(self, name)[index]) for name in StageSeconds.__dataclass_fields__}
        )


def recomputed_share(rows: StrategyRows, layers: Column) -> Column:
    """The share of a stage's layers that are recomputed in full."""
    return np.minimum(rows.recompute_layers, layers) / np.maximum(layers, 1)


def saved_bytes(rows: StrategyRows, layers: Column, stage: Mapping[str, Column]) -> Column:
    """Bytes of one microbatch that a stage keeps from forward to backward."""
    all_saved = stage["saved_bytes"]
    full = all_saved - recomputed_share(rows, layers) * (all_saved - stage["input_bytes"])
    selective = np.where(rows.recompute == "selective", stage["saved_selective_bytes"], all_saved)
    return np.where(rows.recompute == "full", full, selective)


def offloads_activations(rows: StrategyRows) -> Column:
    return (rows.offload == "activations") | (rows.offload == "both")


def offloads_optimizer(rows: StrategyRows) -> Column:
    return (rows.offload == "optimizer") | (rows.offload == "both")


def stage_times(
    figures: Figures,
    family: Family,
    stage: Mapping[str, Column],
    layers: Column,
    reduction_s: Column,
    gathering_s: Column,
    waits_s: tuple[Column, Column],
) -> StageSeconds:
    """The times of a stage that has these amounts and so many layers, and whose reduction and gathering take
    so long when nothing hides them; `waits_s` is how long its forward and its backward wait for what they
    send."""
    rows, host_s = family.rows, figures.profile.host_action_s
    selective = np.where(rows.recompute == "selective", stage["selective_s"], 0.0)
    full = recomputed_share(rows, layers) * stage["repeated_s"]
    recompute_s = np.where(rows.recompute == "full", full, selective)
    nbytes = np.where(offloads_activations(rows), saved_bytes(rows, layers, stage), 0.0)
    offload_transfer_s = nbytes / figures.host_link_bytes_per_s
    out_s = figures.exposed_s(offload_transfer_s, stage["forward_computation_s"], 1.0)
    in_s = figures.exposed_s(offload_transfer_s, stage["input_computation_s"], 1.0)
    on_s, back_s = waits_s
    forward_s = stage["forward_s"] + host_s + on_s + out_s + stage["forward_traffic_s"]
    input_s = stage["input_s"] + host_s + back_s + recompute_s + in_s + stage["input_traffic_s"]
    weight_s = stage["weight_s"] + stage["weight_traffic_s"]
    # What leaves by the replicas' cards leaves them nothing to sum gradients by.
    repeated_s = np.where(
        rows.recompute == "full", recomputed_share(rows, layers) * stage["repeated_contended_s"], 0.0
    )
    contended_s = stage["input_contended_s"] + repeated_s
    last_s = weight_s if family.splits_backward else input_s + weight_s - contended_s
    profile = figures.profile
    overlap = np.where(rows.optim_shard == 1, profile.data_overlap, profile.state_overlap)
    return StageSeconds(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        weight_action_s=weight_s + host_s,
        gather_s=_added_s(gathering_s, overlap, forward_s - stage["forward_contended_s"], layers),
        reduce_s=_added_s(reduction_s, overlap, last_s, layers),
        recompute_s=recompute_s,
        offload_s=out_s + in_s,
        traffic_s=stage["forward_traffic_s"] + stage["input_traffic_s"] + stage["weight_traffic_s"],
    )


def _added_s(seconds: Column, overlap: Column, action_s: Column, layers: Column) -> Column:
    """What a gathering or reduction in buckets of a layer adds to an action, beside which all but one go."""
    buckets = np.maximum(layers, 1)
    hidden_s = np.minimum(overlap * seconds, action_s)
    return seconds - hidden_s + hidden_s / buckets


def times_of_row(times: Sequence[StageSeconds], index: int) -> list[StageSeconds]:
    """All stages of one row as plain numbers."""
    return [stage.row(index) for stage in times]
