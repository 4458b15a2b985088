"""The plan file: is read back equal, has the same bytes each time, and refuses content that was not written
so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.property.software import SOFTWARE

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import dumps_yaml, read_mapping
from shardwise.plans import Idle, Plan, plan_document, read_plan, write_plan
from shardwise.plans.documents import document_hash
from shardwise.strategy import PROFILES
from shardwise_verify import check_document

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path, plan: Plan) -> Path:
    """A plan file that was just written."""
    path = tmp_path / "plan.yaml"
    write_plan(str(path), plan)
    return path


@pytest.fixture
def on_a_part(plan: Plan) -> Plan:
    """The same on the first two of three nodes."""
    idle = Idle(devices=8, nodes=1, ranks="16-23")
    whole = load_cluster("3x8xA100-80G")
    return replace(plan, idle=idle, question=plan.question.of_part(plan.cluster, whole))


def _set(*keys: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def _delete(*keys: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


def test_a_plan_reads_back_equal(path: Path, plan: Plan) -> None:
    assert read_plan(str(path)) == plan


@pytest.mark.parametrize("name", ["plan.json", "PLAN.JSON", "plan.yml", "plan", "plan.json.txt"])
def test_any_name_that_a_plan_is_saved_under_reads_back_equal(
    name: str, path: Path, plan: Plan, tmp_path: Path
) -> None:
    other = tmp_path / name
    plan_hash = write_plan(str(other), plan)
    assert read_plan(str(other)) == plan
    assert plan_hash == document_hash(read_mapping(str(path)))
    text = other.read_text()
    if name.lower().endswith(".json"):
        assert json.loads(text)["hash"] == plan_hash
    else:
        assert text == path.read_text()


@pytest.mark.parametrize("name", [*PROFILES, *SOFTWARE])
def test_a_plan_for_any_software_reads_back_equal(name: str, plan: Plan, tmp_path: Path) -> None:
    profile = PROFILES[name] if name in PROFILES else SOFTWARE[name]
    saved_plan = replace(plan, job=replace(plan.job, profile=profile))
    path = tmp_path / "plan.yaml"
    write_plan(str(path), saved_plan)
    assert read_plan(str(path)) == saved_plan
    first = path.read_bytes()
    write_plan(str(path), read_plan(str(path)))
    assert path.read_bytes() == first


def test_writing_gives_the_same_bytes_and_the_hash_of_the_content(
    path: Path, plan: Plan, tmp_path: Path
) -> None:
    again = tmp_path / "again.yaml"
    plan_hash = write_plan(str(again), plan)
    assert again.read_bytes() == path.read_bytes()
    assert plan_hash == document_hash(read_mapping(str(path)))
    write_plan(str(again), read_plan(str(path)))
    assert again.read_bytes() == path.read_bytes()


def test_the_file_follows_its_published_schema(path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "plan.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(read_mapping(str(path)))


def test_the_file_has_the_documented_facts(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('schema: shardwise.plan\nversion: 2\nhash: "sha256:')
    # Rank 0 of 4 warms up with (pp - 1) * 2 + (vpp - 1) * pp = 14 forwards in groups of 4 micro-batches.
    assert "0F0*4 4F0*4 8F0*4" in text
    assert len(text) < 25_000


def test_timings_effort_and_provenance_change_the_file_but_not_the_hash(plan: Plan) -> None:
    effort = replace(plan.proof, search_s=9.0, search_cpu_s=9.0, cut_by_bound=0, simulated=6)
    cluster = replace(plan.cluster, assumptions=("another text",))
    profile = replace(plan.job.profile, provenance={"dispatch_s": "another text"})
    job = replace(plan.job, profile=profile)
    other = plan_document(replace(plan, certificate=effort, cluster=cluster, job=job))
    assert other["hash"] == plan_document(plan)["hash"]
    assert other != plan_document(plan)


def test_every_part_of_the_answer_changes_the_hash(plan: Plan) -> None:
    hashes = {
        str(plan_document(changed)["hash"])
        for changed in (
            plan,
            replace(plan, best=replace(plan.best, step_time_s=0.5)),
            replace(plan, job=replace(plan.job, seed=1)),
            replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, dispatch_s=1.0))),
            replace(plan, certificate=replace(plan.proof, lower_bound_s=0.2)),
            replace(plan, runners_up=()),
            replace(plan, cluster=replace(plan.cluster, nodes=plan.cluster.nodes[:1])),
        )
    }
    assert len(hashes) == 7


def test_the_requested_cluster_is_saved_where_the_plan_is_on_a_part_of_it(
    plan: Plan, on_a_part: Plan, tmp_path: Path
) -> None:
    path = str(tmp_path / "part.yaml")
    write_plan(path, on_a_part)
    document = read_mapping(path)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "plan.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert read_plan(path) == on_a_part
    assert read_plan(path).requested_cluster.devices == 24 and read_plan(path).cluster.devices == 16
    # a plan on all of the cluster has no such key, as files that were written before it
    assert "cluster" not in plan_document(plan)["question"]  # type: ignore[operator]
    assert plan.question.of_part(plan.cluster, plan.cluster) == plan.question
    assert plan.requested_cluster == plan.cluster


def test_the_hash_has_the_requested_cluster_without_its_provenance(on_a_part: Plan) -> None:
    """By the planner and by the checker, which refuses a document whose hash it does not find again."""

    def with_whole(**changes: Any) -> dict[str, object]:
        whole = replace(on_a_part.requested_cluster, **changes)
        question = replace(on_a_part.question, cluster=whole)
        return plan_document(replace(on_a_part, question=question))

    whole, named, moved = with_whole(), with_whole(assumptions=("another text",)), with_whole(name="other")
    assert whole != named and whole["hash"] == named["hash"] != moved["hash"]
    for document in (whole, named, moved):
        check_document(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("question", "cluster", to=7), "question.cluster: is not a mapping"),
        (_set("question", "cluster", to={}), "question.cluster"),
        (
            _set("question", "cluster", "nodes", 0, "count", to=4),
            r"part.yaml: question.cluster.tiers: do not span the cluster; found \[8, 24\]",
        ),
        (
            _set("question", "cluster", "classes", "A100-80G", "memory_bytes", to=10**10),
            "question.cluster: does not have the plan's devices",
        ),
        (
            _set("idle", "devices", to=7),
            "question.cluster: does not have the used and the idle devices; found 24 devices; "
            "allowed: 16 used and 7 idle",
        ),
    ],
)
def test_a_requested_cluster_that_does_not_hold_the_plan_is_refused(
    on_a_part: Plan, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    path, document = tmp_path / "part.yaml", plan_document(on_a_part)
    change(document)
    document["hash"] = document_hash(document)
    path.write_text(dumps_yaml(document))
    with pytest.raises(ConfigError, match=message):
        read_plan(str(path))


def test_a_ledger_that_does_not_add_up_is_not_written(plan: Plan, tmp_path: Path) -> None:
    broken = replace(plan, certificate=replace(plan.proof, simulated=3))
    with pytest.raises(InternalError, match="1000000000006 candidates enumerated, 1000000000007"):
        write_plan(str(tmp_path / "plan.yaml"), broken)
    assert list(tmp_path.iterdir()) == []


STAGE = ("best", "layout", "pipelines", 0, "stages", 0)
AT_STAGE = r"best.layout.pipelines\[0\].stages\[0\]"
FAULTS: list[tuple[Callable[[Any], None], str]] = [
    (_set("schema", to="shardwise.plans"), "schema: is not a plan file; found 'shardwise.plans'"),
    (_delete("schema"), "schema: is not a plan file; found null"),
    (_set("schema", to="shardwise.uneven-plan"), r"version: is a newer .*\(shardwise.uneven-plan 2\)"),
    (
        _set("version", to=3),
        r"version: is a newer plan format than this shardwise reads \(shardwise.plan 3\)",
    ),
    (_set("version", to="1"), "version: "),
    (_set("surprise", to=1), "surprise: "),
    (_set("question", "objective", to="beauty"), "question.objective: .*allowed: time"),
    (_set("question", "fixed", to={"tpp": 1}), "question.fixed.tpp: is not a field of a strategy"),
    (_set("question", "axes", to={"tp": [1, 1]}), "question.axes.tp: has a value twice"),
    (_set("question", "stage_dp", to=0), "question.stage_dp: "),
    (_delete("question", "use_all"), "question.use_all: "),
    (_set("target", to="megatron-lm-9"), "target: .*did you mean"),
    (_set("idle", "devices", to=-1), "idle.devices: "),
    (_set("mixed", to={"idle": []}), "mixed.uneven_gap: "),
    (_set("model", "family", to="llama"), "model.family: is not that of the config"),
    (_set("model", "layers", "pattern", to=[[0, 11]]), "model.layers: are not those of the config"),
    (_set("model", "layers", "vocab", to=1), "model.layers: are not those of the config"),
    (_set("model", "config", "n_layer", to=0), "model.config.n_layer: "),
    (_set("model", "config", "n_layer", to=11), "model.parameters: is not what the config has"),
    (_set("model", "config", to=[]), "model.config: is not a mapping"),
    (_set("job", "optimizer", to="adam"), "job.optimizer: .*did you mean adamw"),
    (_set("job", "seq_len", to=-1), "job.seq_len: "),
    (_set("job", "memory_margin", to=1.5), "job.memory_margin: "),
    (_delete("job", "seed"), "job.seed: "),
    (_delete("job", "profile"), "job.profile: "),
    (_delete("job", "profile", "dispatch_s"), "job.profile.dispatch_s: "),
    (_set("job", "profile", "data_overlap", to=1.5), "job.profile.data_overlap: .*allowed: .*1"),
    (_set("job", "profile", "tensor_backward_overlap", to=-0.5), "job.profile.tensor_backward_overlap: "),
    (_set("job", "profile", "zero_stages", to=[7]), r"job.profile.zero_stages.0: "),
    (_set("job", "profile", "warm_band", to=[1.0]), r"job.profile.warm_band: "),
    (_set("job", "profile", "surprise", to=1), "job.profile.surprise: "),
    (_set("best", "strategy", "tp", to=True), "best.strategy.tp: "),
    (_set("best", "strategy", "tp", to=0), "best.strategy.tp: "),
    (
        _set("best", "strategy", "micro_batch", to=1),
        "best.strategy.micro_batch: .*did you mean micro_batch_size",
    ),
    (_set("best", "strategy", "sequence_parallel", to=1), "best.strategy.sequence_parallel: "),
    (_set("best", "strategy", "schedule", to="gpipe"), "schedule.name: is not the strategy's"),
    (_set("best", "band_s", to=[1.0]), "best.band_s: "),
    (_set("best", "band_s", to=[1.0, "2"]), "best.band_s: is not a pair of numbers"),
    (_set("best", "memory", "context", to="big"), "best.memory.context: "),
    (_set("best", "step_time_s", to=1.0), "certificate.best_s: is not the step time of the optimum"),
    (_set(*STAGE, "layers", to=9), f"{AT_STAGE}.layers: is not the sum of the chunks"),
    (_set(*STAGE, "chunks", to=[3, -1]), f"{AT_STAGE}.chunks: is not a list of counts"),
    (_set(*STAGE, "share", to=1.5), f"{AT_STAGE}.share: "),
    (_delete(*STAGE, "ranks"), f"{AT_STAGE}.ranks: "),
    (_set("best", "layout", "pipelines", to=[]), "best.layout.pipelines: "),
    (_set(*STAGE, "recompute", to="some"), f"{AT_STAGE}.recompute: "),
    (_set(*STAGE[:4], "rows", to=15), "best.layout.pipelines.rows: do not sum to the batch; found 15; .*16"),
    (_set(*STAGE[:4], "microbatches", to=0), r"best.layout.pipelines\[0\].microbatches: "),
    (
        _set("certificate", "enumerated", to=7),
        "certificate: 7 candidates enumerated, 1000000000006 accounted for",
    ),
    (_set("certificate", "rejected", "memory", to=1.5), "certificate.rejected.memory: "),
    (_set("certificate", "fixed", to={"tpp": 1}), "certificate.fixed.tpp: is not a field of a strategy"),
    (_set("certificate", "fixed", to={"tp": "two"}), "certificate.fixed.tp: is not a value of this field"),
    (_set("certificate", "axes", to={"zero_stage": 3}), "certificate.axes.zero_stage: is not a list"),
    (_set("certificate", "axes", to={"tp": []}), "certificate.axes.tp: "),
    (_set("certificate", "axes", to={"tp": [1, True]}), "certificate.axes.tp: is not a value of this field"),
    (_set("certificate", "unexplored", to=-1), "certificate.unexplored: "),
    (_set("schedule", "ranks", 0, to="0X0"), "schedule.ranks: line 2: "),
    (_set("schedule", "ranks", 0, to=7), "schedule.ranks: has a row that is not a line of text"),
    (_set("schedule", "ranks", 0, to="0F0\n0B0"), "schedule.ranks: has a row that is not a line of text"),
    (_set("schedule", "stage_rank", to=[9]), "schedule.stage_rank: names a rank without actions"),
    (_set("cluster", to=7), "cluster: is not a mapping"),
    (_set("cluster", to={}), "cluster"),
    (_set("cluster", "nodes", to=[]), "plan.yaml: cluster.nodes: "),
    (_set("runners_up", to={}), "runners_up: "),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_fault_is_named_with_file_and_key_although_the_hash_matches(
    path: Path, change: Callable[[Any], None], message: str
) -> None:
    document = read_mapping(str(path))
    change(document)
    document["hash"] = document_hash(document)
    path.write_text(dumps_yaml(document))
    with pytest.raises(ConfigError, match=message) as caught:
        read_plan(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_restrictions_of_the_space_are_saved(plan: Plan, tmp_path: Path) -> None:
    certificate = replace(
        plan.proof,
        fixed={"zero_stage": 1, "sequence_parallel": True},
        axes={"tp": (1, 2), "schedule": ("interleaved_1f1b",)},
        unexplored=10**15,
    )
    path = str(tmp_path / "asked.yaml")
    write_plan(
        path, replace(plan, certificate=certificate, question=replace(plan.question, objective="cost"))
    )
    found = read_plan(path)
    assert found.certificate == certificate
    assert found.objective == "cost"


def test_a_file_without_these_keys_is_read_as_one_without_restrictions(path: Path) -> None:
    document = read_mapping(str(path))
    certificate: Any = document["certificate"]
    for key in ("fixed", "axes", "unexplored"):
        del certificate[key]
    document["hash"] = document_hash(document)
    path.write_text(dumps_yaml(document))
    found = read_plan(str(path)).proof
    assert (found.fixed, found.axes, found.unexplored) == ({}, {}, 0)


def test_any_change_that_the_hash_covers_is_found(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("step_time_s: 0.30000000000000004", "step_time_s: 0.3"))
    with pytest.raises(ConfigError, match="hash: does not match the content: the file was changed"):
        read_plan(str(path))


def test_version_comes_before_hash_and_hash_before_content(path: Path) -> None:
    """A newer file is reported as newer, although its hash is computed differently and its keys are
    unknown.
    """
    path.write_text('schema: shardwise.plan\nversion: 3\nhash: "blake3:00"\nnovelty: 1\n')
    with pytest.raises(ConfigError, match="newer plan format"):
        read_plan(str(path))
    path.write_text('schema: shardwise.plan\nversion: 2\nhash: "sha256:00"\nnovelty: 1\n')
    with pytest.raises(ConfigError, match="hash: does not match"):
        read_plan(str(path))


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    data = path.read_bytes().rstrip()
    for keep in range(0, len(data), len(data) // 40):
        path.write_bytes(data[:keep])
        with pytest.raises(ConfigError):
            read_plan(str(path))


def test_a_path_without_a_regular_file_is_refused(tmp_path: Path) -> None:
    for name in ("", "missing.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_plan(str(tmp_path / name))


def test_options_of_an_uneven_plan_are_those_that_act_on_a_stage() -> None:
    """Overlap of tensor parallelism acts where a stage has tp above 1."""
    plan = read_plan(ROOT / "tests" / "recorded" / "plans" / "uneven.yaml")
    profile = replace(plan.job.profile, options={"tp_comm_overlap": "on"})
    plan = replace(plan, job=replace(plan.job, profile=profile))
    layout = plan.best.layout

    def with_tp(tp: int) -> Plan:
        pipelines = [
            replace(one, stages=tuple(replace(stage, tp=1, parts=()) for stage in one.stages))
            for one in layout.pipelines
        ]
        stages = pipelines[0].stages
        pipelines[0] = replace(pipelines[0], stages=(*stages[:-1], replace(stages[-1], tp=tp)))
        best = replace(plan.best, layout=replace(layout, pipelines=tuple(pipelines)))
        return replace(plan, best=best)

    assert plan.kind == "uneven" and plan.target is None
    assert with_tp(1).options == {}
    assert with_tp(2).options == {"tp_comm_overlap": "on"}
