"""Every reason code with a strategy made for it, and the first of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.strategy import (
    GRID_RULES,
    REASONS,
    RULES,
    SCHEDULE_RULES,
    Limits,
    Strategy,
    StrategyTable,
    first_broken,
)
from shardwise.strategy.rules import Rule

LIMITS = Limits(
    layers=6, heads=12, kv_heads=4, experts=6, ffn_splits=24, expert_ffn=10, seq_len=60, global_batch_size=24
)


def strategy(**changes: Any) -> Strategy:
    fields: dict[str, Any] = {
        "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "cp_kind": "ring", "ep": 1, "etp": 1, "dp": 1, "param_shard": 1,
        "grad_shard": 1, "optim_shard": 1, "micro_batch_size": 1, "schedule": "1f1b",
        "sequence_parallel": False, "recompute": "none", "recompute_layers": 0, "offload": "none",
        "axis_order": "tp-cp-dp-pp", "first_stage_layers": 6, "last_stage_layers": 6,
    }  # fmt: skip
    return Strategy(**{**fields, **changes})


def reason(**changes: Any) -> str | None:
    broken = int(first_broken(StrategyTable.of([strategy(**changes)]), LIMITS, RULES)[0])
    return None if broken < 0 else RULES[broken].code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"tp": 5}, "heads_tp"),  # 12 % 5 = 2
        ({"tp": 4}, None),  # 12, 4 and 24 % 4 = 0
        ({"tp": 6}, "kv_heads_tp"),  # 12 % 6 = 0, but 4 % 6 = 4 and 6 % 4 = 2
        ({"tp": 12}, None),  # 12 % 4 = 0: key-value heads are repeated
        ({"cp": 2}, None),  # 60 % 4 = 0
        ({"cp": 4}, "seq_cp"),  # a ring needs two parts: 60 % 8 = 4
        ({"cp": 4, "cp_kind": "all_to_all"}, None),  # 60 % 4 = 0, 12 % 4 = 0, 4 % 4 = 0
        ({"cp": 7, "cp_kind": "all_to_all"}, "seq_cp"),
        ({"cp": 3, "cp_kind": "all_to_all"}, "heads_cp"),  # 12 % 3 = 0, but 4 % 3 = 1
        ({"cp": 2, "tp": 4, "cp_kind": "all_to_all"}, "heads_cp"),  # 12 / 4 = 3 heads over 2
        ({"tp": 4, "cp": 2, "sequence_parallel": True}, "seq_tp"),  # 30 % 4 = 2
        ({"tp": 4, "sequence_parallel": True}, None),  # 60 % 4 = 0
        ({"ep": 4}, "experts_ep"),  # 6 % 4 = 2
        ({"ep": 3}, None),
        ({"etp": 4}, "expert_ffn_etp"),  # 10 % 4 = 2
        ({"etp": 5}, None),
        ({"dp": 5}, "batch_dp"),  # 24 % 5 = 4
        ({"pp": 7}, "layers_pp"),
        ({"pp": 6}, None),
        ({"pp": 4, "vpp": 2, "schedule": "zb_v"}, "layers_vpp"),  # 8 stages of 6 layers
        ({"pp": 4, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 6}, None),  # 8 stages: 2 without layers
        ({"pp": 3, "vpp": 3, "schedule": "interleaved_1f1b", "dp": 8}, "layers_vpp"),  # 9 stages
        ({"pp": 3, "vpp": 2, "schedule": "zb_v", "dp": 4}, None),  # 6 micro-batches are 2 * 3
        ({"pp": 3, "vpp": 2, "schedule": "zb_v", "dp": 6}, "v_microbatches"),  # 4 < 6
        ({"pp": 3, "vpp": 2, "schedule": "dualpipe_v", "dp": 6}, "v_microbatches"),
        ({"pp": 3, "vpp": 2, "schedule": "dualpipe_v", "dp": 2, "micro_batch_size": 3}, "v_microbatches"),
        ({"pp": 3, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 6}, "interleaved_microbatches"),  # 4 % 3
        ({"pp": 3, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 8}, None),
        ({"pp": 5, "schedule": "zb_h2", "dp": 12}, None),  # 2 micro-batches on 5 stages: allowed
    ],
)
def test_reason(changes: dict[str, Any], code: str | None) -> None:
    assert reason(**changes) == code


def test_mlp_width() -> None:
    """24 % 12 = 0 is legal; with 6 splits, 6 % 12 is not."""
    limits = replace(LIMITS, kv_heads=12, ffn_splits=6)
    broken = first_broken(StrategyTable.of([strategy(tp=12), strategy(tp=6)]), limits, RULES)
    assert [RULES[code].code if code >= 0 else None for code in broken] == ["ffn_tp", None]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "span", "code"),
    [
        (4, True, 4, None),
        (4, True, 8, None),
        (4, True, 2, "tp_overlap"),  # 2 % 4 = 2: a group is on two nodes
        (4, True, 6, "tp_overlap"),  # 6 % 4 = 2: so is every second group
        (4, False, 2, None),  # without sequence parallelism nothing overlaps
        (4, True, 0, None),  # not requested
    ],
)
def test_requested_overlap_of_tensor_parallelism_stays_in_a_node(
    tp: int, sequence_parallel: bool, span: int, code: str | None
) -> None:
    limits = replace(LIMITS, linked_devices=span)
    table = StrategyTable.of([strategy(tp=tp, sequence_parallel=sequence_parallel)])
    broken = int(first_broken(table, limits, RULES)[0])
    assert (None if broken < 0 else RULES[broken].code) == code


def test_dense_models_have_no_expert_reasons() -> None:
    """No experts and no expert width count as 0, which every degree divides."""
    limits = replace(LIMITS, experts=0, expert_ffn=0)
    assert first_broken(StrategyTable.of([strategy(ep=1, etp=1)]), limits, RULES)[0] == -1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tp": 5, "dp": 5, "pp": 7}, "heads_tp"),
        ({"tp": 6, "cp": 7}, "kv_heads_tp"),
        ({"cp": 7, "ep": 4, "dp": 5}, "seq_cp"),
        ({"ep": 4, "etp": 4, "dp": 5}, "experts_ep"),
        ({"etp": 4, "dp": 5}, "expert_ffn_etp"),
        ({"dp": 5, "pp": 7}, "batch_dp"),
        ({"pp": 7, "vpp": 2, "schedule": "interleaved_1f1b"}, "layers_pp"),
        ({"pp": 3, "vpp": 3, "schedule": "interleaved_1f1b", "dp": 6}, "layers_vpp"),  # 4 micro-batches
        ({"pp": 4, "vpp": 2, "schedule": "dualpipe_v", "dp": 8}, "layers_vpp"),
    ],
)
def test_the_first_of_several_violations_is_reported(changes: dict[str, Any], code: str) -> None:
    assert reason(**changes) == code


def test_the_order_of_reasons_is_fixed() -> None:
    """Users compare ledgers of different runs: the order is part of the format."""
    assert REASONS == (
        "heads_tp", "kv_heads_tp", "ffn_tp", "seq_cp", "heads_cp", "seq_tp", "tp_overlap", "experts_ep",
        "expert_ffn_etp",
        "batch_dp", "layers_pp", "target", "layers_vpp", "interleaved_microbatches", "v_microbatches",
        "memory", "host_memory",
    )  # fmt: skip
    assert RULES == GRID_RULES + SCHEDULE_RULES
    assert all(rule.text for rule in RULES)


def test_each_row_is_checked_by_itself() -> None:
    rows = [strategy(), strategy(tp=5), strategy(dp=5), strategy(pp=7)]
    broken = first_broken(StrategyTable.of(rows), LIMITS, RULES)
    assert [int(code) for code in broken] == [-1, 0, 9, 10]
    late = first_broken(StrategyTable.of(rows), LIMITS, SCHEDULE_RULES)
    assert [int(code) for code in late] == [-1, -1, -1, 0]  # pp * vpp = 7 of 6 layers


class Seen:
    """Records the names of the attributes that are read."""

    def __init__(self, of: object) -> None:
        self.of, self.names = of, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.of, name)


IN_THE_TEXT = {"schedule", "vpp", "sequence_parallel", "cp_kind"}
"""Fields that limit the scope of a rule, which its text states."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_names_the_fields_that_it_reads(rule: Rule) -> None:
    """On tables of each schedule: a field that a rule reads and does not list would be missing in its
    message.
    """
    fields, limits = set[str](), set[str]()
    for schedule, vpp in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)):
        table = StrategyTable.of([strategy(pp=2, vpp=vpp, schedule=schedule)])
        seen, bounds = Seen(table), Seen(LIMITS)
        rule.is_broken(seen, bounds)  # type: ignore[arg-type]
        fields |= seen.names
        limits |= bounds.names
    assert fields - IN_THE_TEXT <= set(rule.fields) <= fields
    assert limits == set(rule.limits)


def test_a_violation_names_the_values() -> None:
    (rule,) = (rule for rule in RULES if rule.code == "batch_dp")
    message = rule.violation_text(strategy(dp=5), replace(LIMITS, global_batch_size=1024))
    assert message == "dp divides the global batch; found dp 5, 1,024 sequences per batch"
