"""Bytes and seconds of transitions, computed by hand."""

from __future__ import annotations

import pytest
from tests.unit.replanning.conftest import job

from shardwise.cluster import NodeLost
from shardwise.model import parameters
from shardwise.replanning import Arrangement
from shardwise.replanning.situation import Situation
from shardwise.replanning.transition import STORAGE, Transitions
from shardwise.strategy import Strategy, complete

SMALL = ("opt-350m", "4x2xT4", 32)


def strategy(devices: int, **fields: int) -> Strategy:
    return complete(
        {"micro_batch_size": 1, **fields}, devices=devices, layers=24, experts=None, global_batch_size=32
    )


def arrangement(laid: Strategy, *slots: str) -> Arrangement:
    return Arrangement(strategy=laid, slots=slots, microbatches=(32 // laid.dp,) * laid.dp)


def transitions() -> Transitions:
    return job(*SMALL).planner.transitions


def after_losses(*nodes: str) -> Situation:
    return job(*SMALL).situation(NodeLost(time_s=0.0, node=node) for node in nodes)


def test_keeping_the_plan_has_no_transition_cost() -> None:
    laid = arrangement(strategy(8, dp=8), "n0", "n1", "n2", "n3")
    found = transitions().between(laid, laid, after_losses())
    assert (found.seconds, found.bytes_per_link) == (0.0, {})


def test_a_replicated_plan_loses_a_node_for_a_regrouping_only() -> None:
    old = arrangement(strategy(8, dp=8), "n0", "n1", "n2", "n3")
    new = arrangement(strategy(4, dp=4), "n0", "n1")
    found = transitions().between(old, new, after_losses("n2", "n3"))
    assert found.bytes_per_link == {}
    assert (found.seconds, found.lost_s) == (10.0, 0.0)


def test_a_new_node_gets_all_weights_and_states_from_one_that_has_them() -> None:
    old = arrangement(strategy(4, dp=4), "n0", "n1")
    new = arrangement(strategy(8, dp=8), "n0", "n1", "n2", "n3")
    found = transitions().between(old, new, after_losses())
    # fp16 with adamw: 2 bytes of weight, 4 of master copy, 8 of moments for each parameter, to n2 and to n3.
    whole = 14.0 * parameters(job(*SMALL).model)
    into = {name: nbytes for name, nbytes in found.bytes_per_link.items() if name.endswith((">n2", ">n3"))}
    assert len(into) == 2
    assert all(nbytes == pytest.approx(whole) for nbytes in into.values())
    out = [nbytes for name, nbytes in found.bytes_per_link.items() if name.startswith(("n0>", "n1>"))]
    assert sum(out) == pytest.approx(2 * whole)
    # Weights and states come from the first two in turn: each sends one whole copy.
    assert found.transfer_s == pytest.approx(whole / job(*SMALL).planner.steps.prices.node_bytes_per_s[0])


def test_sharded_states_of_a_lost_node_are_lost_with_it() -> None:
    old = arrangement(strategy(8, dp=8, zero_stage=1), "n0", "n1", "n2", "n3")
    new = arrangement(strategy(6, dp=6, zero_stage=1), "n0", "n1", "n2")
    found = transitions().between(old, new, after_losses("n3"))
    assert found.lost_s == 300.0
    # Everything is read again: 2 bytes of weights on each of three nodes, 12 of states sharded over them.
    whole = parameters(job(*SMALL).model)
    assert sum(found.bytes_per_link.values()) == pytest.approx(3 * 2.0 * whole + 12.0 * whole)
    noticed = transitions().between(old, new, after_losses("n3"), saved=frozenset({"n3"}))
    assert noticed.lost_s == 0.0


def test_states_that_stay_where_they_are_do_not_travel() -> None:
    old = arrangement(strategy(8, dp=8, zero_stage=1), "n0", "n1", "n2", "n3")
    new = arrangement(strategy(4, dp=4, zero_stage=1), "n0", "n1")
    found = transitions().between(old, new, after_losses())
    # n0 had the first quarter of the states and needs the first half; n1 had the second and needs the other
    # half: a quarter from n1 to n0, a half from n2 and n3 to n1.
    states = 12.0 * parameters(job(*SMALL).model)
    link = {name: nbytes / states for name, nbytes in found.bytes_per_link.items()}
    into = {name[-2:]: share for name, share in link.items() if name.endswith((">n0", ">n1"))}
    assert into == {"n0": pytest.approx(0.25), "n1": pytest.approx(0.5)}


def test_stages_move_with_their_layers() -> None:
    old = arrangement(strategy(8, pp=4, dp=2), "n0", "n1", "n2", "n3")
    new = arrangement(strategy(8, pp=4, dp=2), "n1", "n0", "n2", "n3")
    found = transitions().between(old, new, after_losses())
    below = transitions()._below
    # Stages of 6 of 24 layers; the first has the embedding too, the second only its layers.
    first, second = below[7], below[13] - below[7]
    into = {name[-2:]: nbytes for name, nbytes in found.bytes_per_link.items() if ">n" in name}
    assert into == {"n1": pytest.approx(14.0 * first), "n0": pytest.approx(14.0 * second)}


def test_storage_does_not_count_as_a_node() -> None:
    found = transitions().between(None, arrangement(strategy(2, dp=2), "n0"), after_losses())
    assert STORAGE == "" and found.lost_s == 0.0
    assert sum(found.bytes_per_link.values()) == pytest.approx(14.0 * parameters(job(*SMALL).model))
