"""Nothing fits: the error counts every candidate, names the bottleneck, and offers changes with which a plan
fits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise.cluster import Cluster, load_cluster
from shardwise.errors import Infeasible
from shardwise.model import load_model, model_from_config
from shardwise.search import Question, answer, evaluate, plan
from shardwise.strategy import HOST_MEMORY, MEMORY, Job, complete, parse_fields
from shardwise_verify import count_space

LLAMA = load_model("llama-3.1-8b")
JOB = Job(seq_len=4096, global_batch_size=8, dtype="bf16")


def question(shorthand: str, **changes: object) -> Question:
    plain = Question(model=LLAMA, cluster=load_cluster(shorthand), job=JOB, space="core")
    return replace(plain, **changes)  # type: ignore[arg-type]


def refusal(requested: Question) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        plan(requested)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("exhaustive", [False, True])
def test_every_candidate_has_a_reason(exhaustive: bool) -> None:
    """8 billion parameters take 18 bytes each with AdamW in bf16: two devices of 40 GB are not enough."""
    error = refusal(question("2xA100-40G", exhaustive=exhaustive))
    counted = count_space(
        model_layers=32, experts=None, devices=2, global_batch_size=8, space="core", fixed={}
    )
    assert sum(error.reasons.values()) == counted.count
    assert error.reasons[MEMORY] > 0
    assert "memory binds" in error.message
    assert "GiB more than" in error.message


@pytest.mark.slow
def test_the_closest_candidate_misses_by_the_reported_bytes() -> None:
    """`evaluate` refuses the strategy of the message with the same missing bytes."""
    requested = question("2xA100-40G")
    error = refusal(requested)
    text = error.message.rpartition(" with ")[2]
    strategy = complete(
        parse_fields(text), devices=2, layers=32, experts=None, global_batch_size=JOB.global_batch_size
    )
    with pytest.raises(Infeasible, match="GiB too much") as caught:
        evaluate(LLAMA, requested.cluster, JOB, strategy)
    missing = caught.value.message.rpartition(": ")[2].split(" ")[0]
    assert f"{missing} GiB more than" in error.message
    # The listed parts, largest first, sum to nearly the whole demand.
    named = [float(each) for each in re.findall(r"\((\d+\.\d+) GiB\)", caught.value.message)]
    needed = float(caught.value.message.partition(" needs ")[2].partition(" ")[0])
    assert named == sorted(named, reverse=True) and 0.94 * needed < sum(named) <= needed


@pytest.mark.slow
def test_relaxations_fit() -> None:
    """Each one is planned again, and takes the promised time."""
    wider, *larger = refusal(question("2xA100-40G")).relaxations
    assert wider.startswith("with --space default: ")
    for text in larger:
        match = re.fullmatch(r"on (\d+) devices \((\d+) times as many nodes\): (.*) s per step with .*", text)
        assert match is not None
        devices, times = int(match[1]), int(match[2])
        assert devices == 2 * times and times > 1
        answer = plan(question(f"{times}x2xA100-40G"))
        assert match[3] == f"{answer.best.step_time_s:.3f}"


@pytest.mark.slow
def test_the_first_relaxation_of_a_kind_is_named() -> None:
    """Four times and eight times as many nodes both fit."""
    relaxations = refusal(question("2xA100-40G", job=replace(JOB, seq_len=4097))).relaxations
    assert [text.partition(":")[0] for text in relaxations] == [
        "with --space default",
        "on 8 devices (4 times as many nodes)",
    ]
    assert plan(question("8x2xA100-40G", job=replace(JOB, seq_len=4097))).best


def test_a_budget_bounds_the_relaxations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining budget is for the bottleneck and for relaxations: if the first search takes all of it, no
    other is completed. A primal heuristic may still find one relaxation, which is the last.
    """
    over: list[bool] = []

    def whole(*some: Any, clock: Any, **more: Any) -> Any:
        outcome = search(*some, clock=clock, **more)
        if not over:
            over.append(True)
            monkeypatch.setattr(clock, "_end_s", 0.0)  # for this call alone
        return outcome

    search = answer.search
    monkeypatch.setattr(answer, "search", whole)
    error = refusal(question("2xA100-40G", budget_s=1e3, use_all=True))
    assert error.message == "nothing fits: memory binds; by how much was not found within the budget"
    assert error.reasons[MEMORY] > 0 and len(error.relaxations) <= 1


def test_fixed_fields_are_relaxed_first() -> None:
    """On eight H100 the model fits, but not as one replica per device without any sharding."""
    requested = question("8xH100-SXM", fixed={"dp": 8, "zero_stage": 0})
    relaxations = refusal(requested).relaxations
    assert [text.partition(":")[0] for text in relaxations] == [
        "with --space default",
        "without --fix dp",
        "without --fix zero_stage",
    ]
    lifted = plan(replace(requested, fixed={"dp": 8}))
    assert f"{lifted.best.step_time_s:.3f} s per step" in relaxations[2]


def test_a_space_without_a_legal_candidate_names_the_rule() -> None:
    """17 heads on 2 devices with tp = 2: nothing is legal, whatever the memory."""
    model = model_from_config(
        {"layers": 2, "hidden": 17 * 64, "ffn": 4096, "heads": 17, "vocab": 1000, "seq_len": 1024}
    )
    job = replace(JOB, seq_len=1024)
    error = refusal(question("2xH100-SXM", model=model, job=job, fixed={"tp": 2}))
    assert set(error.reasons) == {"heads_tp"}
    assert "no candidate is legal" in error.message
    assert error.relaxations[0].startswith("without --fix tp")


def test_where_nothing_is_legal_fewer_devices_may_help() -> None:
    """17 heads, 7 layers, 8 samples of 1,024 tokens: no degree has a factor 3. Five of six nodes with one
    device are a prime number too, four are a power of two. Neither memory nor a smaller demand is named.
    """
    model = model_from_config(
        {"layers": 7, "hidden": 17 * 64, "ffn": 4096, "heads": 17, "vocab": 1000, "seq_len": 1024}
    )
    requested = question(
        "6x1xH100-SXM", model=model, job=replace(JOB, seq_len=1024), fixed={"pp": 1}, use_all=True
    )
    error = refusal(requested)
    assert "no candidate is legal" in error.message
    named = [text.partition(":")[0] for text in error.relaxations]
    assert named == ["without --fix pp", "on 4 of the 6 devices"]
    on_four = plan(replace(requested, cluster=load_cluster("4x1xH100-SXM")))
    assert f"{on_four.best.step_time_s:.3f} s per step" in error.relaxations[1]


def test_no_relaxation_is_searched_for_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty space is found at once, whatever the time: without a check of the clock all relaxations would
    be searched.
    """
    requested = question("6x1xH100-SXM", fixed={"tp": 3}, budget_s=1e3)
    made: list[Question] = []

    def counted(requested: Question, *some: Any, clock: Any, **more: Any) -> Any:
        made.append(requested)
        outcome = search(requested, *some, clock=clock, **more)
        monkeypatch.setattr(clock, "_end_s", 0.0)
        return outcome

    search = answer.search
    monkeypatch.setattr(answer, "search", counted)
    error = refusal(requested)
    assert error.relaxations == () and len(made) == 1 and "no candidate is legal" in error.message
    monkeypatch.setattr(answer, "search", search)
    assert refusal(requested).relaxations


@pytest.mark.slow
def test_host_memory_is_a_reason_of_its_own() -> None:
    """The optimizer states of 8 billion parameters, 12 bytes each, do not fit on hosts of 1 GB: candidates
    that fit on the devices fail on the hosts.
    """
    cluster = load_cluster("2xA100-80G")
    tiny = _with_host_memory(cluster, 1e9)
    fixed = {"offload": "optimizer", "tp": 2, "pp": 1, "cp": 1}
    error = refusal(question("2xA100-80G", cluster=tiny, space="default", fixed=fixed))
    assert set(error.reasons) == {MEMORY, HOST_MEMORY}
    assert error.reasons[HOST_MEMORY] > 0
    roomy = question("2xA100-80G", cluster=_with_host_memory(cluster, 1e12), space="default", fixed=fixed)
    assert plan(roomy).best.strategy.offload == "optimizer"


def _with_host_memory(cluster: Cluster, nbytes: float) -> Cluster:
    return replace(cluster, nodes=tuple(replace(node, host_memory_bytes=nbytes) for node in cluster.nodes))
