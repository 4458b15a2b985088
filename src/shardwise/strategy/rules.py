"""Legality rules with reason codes, in one fixed order.

A rule is a mask over columns: true where the rule is broken. Rules are grouped by the fields that they read,
in the order in which the search fixes these fields. The first broken rule of a candidate is its reason. The
reasons `memory` and `host_memory` come last; the `cost` package decides them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule import legal_mask
from shardwise.strategy.strategy import SCHEDULES, Strategy

Mask = NDArray[np.bool_]

INTERLEAVED = SCHEDULES.index("interleaved_1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of the model and the job that the rules read."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    ffn_splits: int
    expert_ffn: int
    seq_len: int
    global_batch_size: int
    linked_devices: int = 0


_LIMITS = {
    "layers": "layers",
    "heads": "attention heads",
    "kv_heads": "key-value heads",
    "experts": "experts",
    "ffn_splits": "columns of MLP width",
    "expert_ffn": "columns of expert width",
    "seq_len": "tokens per sequence",
    "global_batch_size": "sequences per batch",
    "linked_devices": "devices with direct links",
}
"""Names of the limits in messages."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`is_broken(table, limits)` marks the rows that break the rule. `text` states the requirement, on the
    strategy `fields` and the `limits` of these names."""

    code: str
    text: str
    fields: tuple[str, ...]
    limits: tuple[str, ...]
    is_broken: Callable[[Any, Limits], Any]

    def violation_text(self, strategy: Strategy, limits: Limits) -> str:
        """The requirement and the values that break it: `tp divides the attention heads; found tp 5, 12
        attention heads`."""
        found = ", ".join(f"{name} {getattr(strategy, name)}" for name in self.fields)
        return f"{self.text}; found {found}, {self.limits_text(limits)}"

    def limits_text(self, limits: Limits) -> str:
        """The limits in words: `12 attention heads`."""
        return ", ".join(f"{getattr(limits, name):,} {_LIMITS[name]}" for name in self.limits)


def most_stages(layers: int, schedule: Any) -> Any:
    """The largest pp * vpp under schedules (codes): a layer for each stage. Under interleaved 1F1B the first
    and the last stage may have only the embedding and the head."""
    return layers + 2 * (schedule == INTERLEAVED)


def _is_illegal(table: Any, limits: Limits, *names: str) -> Any:
    """Rows of these schedules whose pp, vpp and micro-batches the schedule does not allow."""
    selected = np.logical_or.reduce([table.schedule == SCHEDULES.index(name) for name in names])
    if not selected.any():
        return selected  # true for most tables; the rest is slow for small ones
    microbatches = limits.global_batch_size // (table.dp * table.micro_batch_size)
    return selected & ~legal_mask(table.schedule, table.pp, microbatches, table.vpp)


GRID_RULES: tuple[Rule, ...] = (
    Rule("heads_tp", "tp divides the attention heads", ("tp",), ("heads",), lambda s, m: m.heads % s.tp != 0),
    Rule(
        "kv_heads_tp",
        "tp divides the key-value heads or is a multiple of them",
        ("tp",),
        ("kv_heads",),
        lambda s, m: (m.kv_heads % s.tp != 0) & (s.tp % m.kv_heads != 0),
    ),
    Rule(
        "ffn_tp", "tp divides the MLP width", ("tp",), ("ffn_splits",), lambda s, m: m.ffn_splits % s.tp != 0
    ),
    Rule(
        "seq_cp",
        "cp divides the sequence, twice for a ring",
        ("cp", "cp_kind"),
        ("seq_len",),
        lambda s, m: (s.cp > 1) & (m.seq_len % (s.cp * np.where(s.cp_kind == 0, 2, 1)) != 0),
    ),
    Rule(
        "heads_cp",
        "all-to-all context parallelism splits the heads of a tp rank over cp",
        ("tp", "cp"),
        ("heads", "kv_heads"),
        lambda s, m: (
            (s.cp_kind == 1)
            & (((m.heads // s.tp) % s.cp != 0) | (np.maximum(m.kv_heads // s.tp, 1) % s.cp != 0))
        ),
    ),
    Rule(
        "seq_tp",
        "sequence parallelism splits the sequence over tp",
        ("tp", "cp"),
        ("seq_len",),
        lambda s, m: (s.sequence_parallel == 1) & ((m.seq_len // s.cp) % s.tp != 0),
    ),
    Rule(
        "tp_overlap",
        "with tp_comm_overlap=on, tp and sequence parallelism stay inside a node",
        ("tp", "sequence_parallel"),
        ("linked_devices",),
        lambda s, m: (
            (m.linked_devices > 0) & (s.sequence_parallel == 1) & (max(m.linked_devices, 1) % s.tp != 0)
        ),
    ),
    Rule("experts_ep", "ep divides the experts", ("ep",), ("experts",), lambda s, m: m.experts % s.ep != 0),
    Rule(
        "expert_ffn_etp",
        "etp divides the expert width",
        ("etp",),
        ("expert_ffn",),
        lambda s, m: m.expert_ffn % s.etp != 0,
    ),
    Rule(
        "batch_dp",
        "dp divides the global batch",
        ("dp",),
        ("global_batch_size",),
        lambda s, m: m.global_batch_size % s.dp != 0,
    ),
    Rule(
        "layers_pp",
        "a pipeline has no more stages than layers",
        ("pp",),
        ("layers",),
        lambda s, m: s.pp > m.layers,
    ),
)
"""Rules on tp, cp, pp, dp, ep, etp, cp_kind, axis_order, sequence_parallel."""

SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        "layers_vpp",
        "pp * vpp is at most the number of layers, or 2 more with interleaved_1f1b",
        ("pp", "vpp", "schedule"),
        ("layers",),
        lambda s, m: s.pp * s.vpp > most_stages(m.layers, s.schedule),
    ),
    Rule(
        "interleaved_microbatches",
        "interleaved_1f1b needs micro-batches divisible by pp",
        ("pp", "dp", "micro_batch_size"),
        ("global_batch_size",),
        lambda s, m: _is_illegal(s, m, "interleaved_1f1b"),
    ),
    Rule(
        "v_microbatches",
        "zb_v and dualpipe_v need at least 2 pp micro-batches",
        ("pp", "dp", "micro_batch_size"),
        ("global_batch_size",),
        lambda s, m: _is_illegal(s, m, "zb_v", "dualpipe_v"),
    ),
)
"""Rules on micro_batch_size, schedule, vpp."""

RULES: tuple[Rule, ...] = GRID_RULES + SCHEDULE_RULES

TARGET_LIMIT = "target"
MEMORY = "memory"
HOST_MEMORY = "host_memory"
REASONS: tuple[str, ...] = (
    *(rule.code for rule in GRID_RULES),
    TARGET_LIMIT,
    *(rule.code for rule in SCHEDULE_RULES),
    MEMORY,
    HOST_MEMORY,
)
"""All reason codes, in the order of precedence. `target`: the target does not support the strategy."""


def first_broken(table: Any, limits: Limits, rules: tuple[Rule, ...]) -> NDArray[np.int64]:
    """Per row, the index in `rules` of the first broken rule, or -1."""
    reason = np.full(len(table.tp), -1, dtype=np.int64)
    for index in reversed(range(len(rules))):
        reason = np.where(rules[index].is_broken(table, limits), np.int64(index), reason)
    return reason
