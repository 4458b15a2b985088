"""Which strategies are legal: rules with reason codes, in one fixed order.

A rule is a mask over columns: true where it is broken. Rules are grouped by the fields they read, in the
order in which the search fixes these fields; a candidate that breaks several has the first as its reason.
`memory` and `host_memory` come last and belong to `cost`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule import legal_mask
from shardwise.strategy.strategy import SCHEDULES

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the rules need to know of model and job."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    ffn_splits: int
    expert_ffn: int
    seq_len: int
    global_batch_size: int


@dataclass(frozen=True, slots=True)
class Rule:
    """`is_broken(table, limits)` marks the rows that break it; `text` says what is demanded."""

    code: str
    text: str
    is_broken: Callable[[Any, Limits], Any]


def _is_illegal(table: Any, limits: Limits, *names: str) -> Any:
    """Rows of these schedules that the schedule itself cannot have."""
    asked = np.logical_or.reduce([table.schedule == SCHEDULES.index(name) for name in names])
    if not asked.any():
        return asked  # most tables, and the rest of a rule takes long for a small one
    microbatches = limits.global_batch_size // (table.dp * table.micro_batch_size)
    return asked & ~legal_mask(table.schedule, table.pp, microbatches, table.vpp)


GRID_RULES: tuple[Rule, ...] = (
    Rule("heads_tp", "tp divides the attention heads", lambda s, m: m.heads % s.tp != 0),
    Rule(
        "kv_heads_tp",
        "tp divides the key-value heads or is a multiple of them",
        lambda s, m: (m.kv_heads % s.tp != 0) & (s.tp % m.kv_heads != 0),
    ),
    Rule("ffn_tp", "tp divides the MLP width", lambda s, m: m.ffn_splits % s.tp != 0),
    Rule(
        "seq_cp",
        "cp divides the sequence, twice for a ring",
        lambda s, m: (s.cp > 1) & (m.seq_len % (s.cp * np.where(s.cp_kind == 0, 2, 1)) != 0),
    ),
    Rule(
        "heads_cp",
        "all-to-all context parallelism splits the heads of a tp rank over cp",
        lambda s, m: (
            (s.cp_kind == 1)
            & (((m.heads // s.tp) % s.cp != 0) | (np.maximum(m.kv_heads // s.tp, 1) % s.cp != 0))
        ),
    ),
    Rule(
        "seq_tp",
        "sequence parallelism splits the sequence over tp",
        lambda s, m: (s.sequence_parallel == 1) & ((m.seq_len // s.cp) % s.tp != 0),
    ),
    Rule("experts_ep", "ep divides the experts", lambda s, m: m.experts % s.ep != 0),
    Rule("expert_ffn_etp", "etp divides the expert width", lambda s, m: m.expert_ffn % s.etp != 0),
    Rule("batch_dp", "dp divides the global batch", lambda s, m: m.global_batch_size % s.dp != 0),
    Rule("layers_pp", "a pipeline has no more stages than layers", lambda s, m: s.pp > m.layers),
)
"""Rules on tp, cp, pp, dp, ep, etp, cp_kind, axis_order, sequence_parallel."""

SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule("layers_vpp", "pp * vpp is at most the number of layers", lambda s, m: s.pp * s.vpp > m.layers),
    Rule(
        "interleaved_microbatches",
        "interleaved_1f1b needs microbatches divisible by pp",
        lambda s, m: _is_illegal(s, m, "interleaved_1f1b"),
    ),
    Rule(
        "v_microbatches",
        "zb_v and dualpipe_v need at least 2 pp microbatches",
        lambda s, m: _is_illegal(s, m, "zb_v", "dualpipe_v"),
    ),
)
"""Rules on micro_batch_size, schedule, vpp."""

RULES: tuple[Rule, ...] = GRID_RULES + SCHEDULE_RULES

MEMORY = "memory"
HOST_MEMORY = "host_memory"
REASONS: tuple[str, ...] = (*(rule.code for rule in RULES), MEMORY, HOST_MEMORY)
"""All reason codes, in the order in which they are given."""


def first_broken(table: Any, limits: Limits, rules: tuple[Rule, ...]) -> NDArray[np.int64]:
    """Per row, the index in `rules` of the first rule that it breaks, or -1."""
    reason = np.full(len(table.tp), -1, dtype=np.int64)
    for index in reversed(range(len(rules))):
        reason = np.where(rules[index].is_broken(table, limits), np.int64(index), reason)
    return reason
