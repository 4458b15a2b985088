"""The Python interface: plans, evaluations, frontiers and explanations without the command line."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise import api
from shardwise.app.cli.main import main
from shardwise.cluster import load_cluster
from shardwise.model import catalogue_entry, load_model, parameters
from shardwise.plans import plan_hash
from shardwise.strategy import strategy_record

JOB: dict[str, Any] = {"cluster": "1x4xA100-80G", "seq_len": 2048, "global_batch_size": 16}
MODEL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(MODEL, **JOB, tolerance=0.0)


# The package


def test_the_package_imports_nothing_before_a_name_is_used() -> None:
    """Each imported module takes time: there are none but the package itself."""
    program = "import sys; before = set(sys.modules); import shardwise; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shardwise"]


def test_planning_needs_no_pytorch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import shardwise as sw\n"
        "plan = sw.plan('gpt2', cluster='1x2xA100-80G', seq_len=1024, global_batch_size=8)\n"
        "print(plan.save(sys.argv[1]) == sw.load(sys.argv[1]).to_dict()['hash'])"
    )
    path = str(tmp_path / "plan.yaml")
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_every_public_name_is_there() -> None:
    planning = set(sw.__all__) - {"graph_module", "parallelize", "reference_module"}
    assert {name for name in planning if getattr(sw, name, None) is None} == set()
    assert set(sw.__all__) <= set(dir(sw))
    with pytest.raises(AttributeError, match="no attribute 'plans_'"):
        _ = sw.plans_


# Plans


def test_the_attributes_of_a_plan_agree_with_its_parts(plan: sw.Plan) -> None:
    assert sum(plan.breakdown.values()) == pytest.approx(plan.step_time_s, rel=1e-9)
    assert sum(plan.memory.values()) == pytest.approx(plan.best.peak_memory.device, rel=1e-9)
    assert plan.strategy.tp * plan.strategy.pp * plan.strategy.cp * plan.strategy.dp == 4
    # 16 sequences of 2,048 tokens on 4 devices.
    assert plan.best.tokens_per_s_per_device == pytest.approx(16 * 2048 / plan.step_time_s / 4, rel=1e-9)
    assert plan.certificate is not None and plan.certificate.best_s == plan.optimum_s
    assert [other.step_time_s for other in plan.runners_up] == sorted(
        other.step_time_s for other in plan.runners_up
    )


def test_a_saved_plan_is_loaded_as_it_was(plan: sw.Plan, tmp_path: Path) -> None:
    for name in ("plan.yaml", "plan.json"):
        digest = plan.save(tmp_path / name)
        loaded = sw.load(tmp_path / name)
        assert loaded == plan and loaded.to_dict()["hash"] == digest
    assert json.loads((tmp_path / "plan.json").read_text())["best"]["step_time_s"] == plan.step_time_s
    assert sw.save(plan, str(tmp_path / "again.yaml")) == digest


def test_an_evaluated_strategy_has_no_certificate(plan: sw.Plan, tmp_path: Path) -> None:
    found = sw.evaluate(MODEL, strategy={"tp": 4, "zero_stage": 1}, **JOB)
    assert (found.strategy.tp, found.strategy.dp) == (4, 1) and found.certificate is None
    assert found == sw.evaluate(MODEL, strategy="tp=4,zero_stage=1", **JOB)
    assert found.step_time_s >= plan.step_time_s
    found.save(tmp_path / "plan.yaml")
    assert sw.load(tmp_path / "plan.yaml") == found


def test_memory_by_stage_is_that_of_every_stage() -> None:
    """Stage 0 has the most micro-batches in flight, the last the logits; the peak is that of the fullest."""
    plan = sw.evaluate(
        "llama-3.1-8b", cluster="1x8xH100-SXM", seq_len=4096, global_batch_size=32,
        strategy="tp=2,pp=4,micro_batch_size=1,zero_stage=1",
    )  # fmt: skip
    stages = sw.memory_by_stage(plan)
    assert len(stages) == 4
    assert all(sum(parts.values()) == pytest.approx(2 * parts["device"]) for parts in stages)
    assert max(parts["device"] for parts in stages) == plan.best.peak_memory.device
    assert {**stages[0]} == pytest.approx({**plan.memory, "device": plan.best.peak_memory.device})
    # 1F1B with equal stages: 4, 3 and 2 micro-batches in flight.
    of_one = stages[0]["activations"] / 4
    assert [parts["activations"] for parts in stages[:3]] == pytest.approx(
        [4 * of_one, 3 * of_one, 2 * of_one]
    )
    assert stages[3]["temporaries"] > stages[2]["temporaries"]


def test_the_attention_kernel_is_an_argument() -> None:
    def peak(**given: Any) -> float:
        plan = sw.evaluate(
            "gpt2", cluster="1x8xV100-32G", seq_len=1024, global_batch_size=8, target="fsdp2", dtype="fp32",
            strategy="zero_stage=3,micro_batch_size=1,recompute=full", **given,
        )  # fmt: skip
        return plan.best.peak_memory.device

    # V100 has no FlashAttention-2; the default is PyTorch's memory-efficient kernel.
    assert peak() == peak(attention="efficient") == peak(attention="flash") < peak(attention="unfused")
    assert peak(attention="unfused") == peak(set={"attention": "unfused"})
    with pytest.raises(sw.ConfigError, match="contradicts"):
        peak(attention="unfused", set={"attention": "flash"})
    with pytest.raises(sw.ConfigError, match="attention"):
        peak(attention="fused")


def test_the_best_plan_evaluates_to_itself(plan: sw.Plan) -> None:
    found = sw.evaluate(MODEL, strategy=strategy_record(plan.strategy), target=plan.target, **JOB)
    assert found.best == plan.best


def test_a_plan_explains_itself(plan: sw.Plan) -> None:
    explained = plan.explain()
    assert explained.candidates is not None and plan.certificate is not None
    total = sum(explained.candidates.totals.values()) + explained.candidates.unexplored
    assert total == plan.certificate.enumerated
    assert {row["field"] for row in explained.rows()} >= {"tp", "micro_batch_size"}
    other = plan.explain(why_not={"tp": 4})
    assert other.after.strategy.tp == 4 and other.before == plan.best
    more_s = sum(float(str(row["more"])) for row in other.rows() if row["unit"] == "s")
    assert more_s == pytest.approx(other.after.step_time_s - plan.step_time_s, rel=1e-9, abs=1e-12)
    wider = plan.what_if(nodes=2)
    assert wider.question.cluster.devices == 8 and wider.after.step_time_s < plan.step_time_s
    with pytest.raises(sw.ConfigError, match="why_not: names no field"):
        plan.explain(why_not={})
    with pytest.raises(sw.ConfigError, match="what_if"):
        plan.what_if(colour="red")


def test_rows_are_plain_values(plan: sw.Plan) -> None:
    rows = plan.rows()
    assert len(rows) == 1 + len(plan.runners_up)
    assert (rows[0]["step_time_s"], rows[0]["tp"]) == (plan.step_time_s, plan.strategy.tp)
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


def test_a_plan_goes_through_other_processes(plan: sw.Plan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own bytes


def test_a_plan_whose_table_is_too_long_is_answered_but_not_written(tmp_path: Path) -> None:
    # 4,194,304 actions are allowed: 2 of each of 10,000,000 micro-batches on one device are more.
    found = sw.evaluate("gpt2", strategy="", cluster="1xH100-SXM", seq_len=8, global_batch_size=10_000_000)
    with pytest.raises(sw.ConfigError, match="global_batch_size: has too many micro-batches"):
        found.save(tmp_path / "plan.yaml")
    assert list(tmp_path.iterdir()) == []


# Models


def test_a_model_may_be_a_mapping_or_an_object_with_a_config() -> None:
    config = dict(catalogue_entry(MODEL).config)

    class Config:
        """As of Transformers: not a mapping, and with values that JSON does not have."""

        def to_dict(self) -> dict[str, object]:
            return {**config, "id2label": {0: "A"}, "dtype": Path("bfloat16"), "eos_token_id": (1, 2)}

    by_name = sw.evaluate(MODEL, strategy="tp=4", **JOB)
    for model in (config, Config(), by_name.model):
        found = sw.evaluate(model, strategy="tp=4", **JOB)
        assert found.step_time_s == by_name.step_time_s
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_a_config_object_of_transformers_is_a_model() -> None:
    from transformers import LlamaConfig  # it takes seconds to import

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
    )
    found = sw.evaluate(config, strategy="tp=2,pp=2", **JOB)
    # Embedding and head of 1,000 x 512; a layer has 4 matrices of 512 x 512 and 3 of 512 x 1,024, and 2 norms
    # of 512; a norm at the end.
    assert parameters(found.model) == 2 * 512_000 + 4 * (4 * 262_144 + 3 * 524_288 + 1024) + 512


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hugging Face Hub with a config of the revision that `main` names, and an older one."""
    folder = tmp_path / "models--acme--Tiny-8B"
    config = dict(catalogue_entry(MODEL).config)
    for revision, layers in (("a" * 40, 2), ("b" * 40, 4)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        text = json.dumps({**config, "num_hidden_layers": layers})
        (folder / "snapshots" / revision / "config.json").write_text(text)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("b" * 40)
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_an_id_of_the_hub_is_read_from_its_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    model = load_model("acme/Tiny-8B")
    assert (model.name, model.layers) == ("acme/Tiny-8B", 4)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub / "elsewhere"))
    with pytest.raises(sw.ConfigError, match=r"model: .* `hf download acme/Tiny-8B config.json`"):
        sw.plan("acme/Tiny-8B", **JOB)
    (hub / "hub").symlink_to(hub, target_is_directory=True)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(hub))
    assert load_model("acme/Tiny-8B") == model
    (hub / "models--acme--Tiny-8B" / "refs" / "main").write_text("../../escape")
    with pytest.raises(sw.ConfigError, match="hf download"):
        load_model("acme/Tiny-8B")


def test_a_folder_comes_before_an_id(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(hub)
    (hub / "acme" / "Tiny-8B").mkdir(parents=True)
    config = json.dumps({**catalogue_entry(MODEL).config, "num_hidden_layers": 6})
    (hub / "acme" / "Tiny-8B" / "config.json").write_text(config)
    assert load_model("acme/Tiny-8B").layers == 6


# Errors


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seq_len", "x"),
        ("seq_len", 2.5),
        ("seq_len", 0),
        ("global_batch_size", True),
        ("global_batch_size", None),
        ("cluster", 7),
        ("cluster", None),
        ("dtype", 3),
        ("optimizer", "lamb"),
        ("memory_margin", "0.1"),
        ("memory_margin", float("nan")),
        ("expert_imbalance", -1),
        ("objective", "speed"),
        ("space", 4),
        ("space", "wide"),
        ("fix", 3),
        ("fix", {"tpp": 3}),
        ("fix", {1: 3}),
        ("target", "no-such"),
        ("target", 5),
        ("use_all", 1),
        ("top", -1),
        ("frontier", "yes"),
        ("exhaustive", None),
        ("stage_dp", 3),
        ("mixed_pool_stages", 99),
        ("workers", 0),
        ("workers", 10**6),
        ("budget", "soon"),
        ("budget", -1.0),
        ("inter_node", 5),
        ("calibration", 5),
    ],
)
def test_a_wrong_argument_is_a_config_error_that_names_it(argument: str, value: object) -> None:
    with pytest.raises(sw.ConfigError) as caught:
        sw.plan(MODEL, **{**JOB, argument: value})
    assert caught.value.key == argument and "--" not in str(caught.value)
    assert type(caught.value) is sw.ConfigError and "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [None, 3, b"gpt2", ["gpt2"], {}, {"model_type": "nope"}, dict])
def test_a_wrong_model_is_a_config_error(model: Any) -> None:
    with pytest.raises(sw.ConfigError) as caught:
        sw.plan(model, **JOB)
    assert str(caught.value.key).startswith("model")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mode", "x"),
        ("memory_limit", "-1GiB"),
        ("memory_limit", [1]),
        ("devices", "x"),
        ("devices", [2, 2]),
        ("devices", [100]),
        ("stages", 0),
        ("microbatches", [8]),
        ("meshes", "all"),
        ("objectives", ["time"]),
        ("objectives", {"time": 1}),
        ("epsilon", 2.0),
    ],
)
def test_a_wrong_argument_of_a_frontier_is_named(argument: str, value: object) -> None:
    with pytest.raises(sw.ConfigError) as caught:
        sw.frontier(MODEL, **{**JOB, argument: value})
    assert caught.value.key == argument


def test_the_command_line_names_options_where_functions_name_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(sw.ConfigError) as caught:
        sw.plan(MODEL, **JOB, target="megatron-lm-0.19", dtype="fp8", mixed_pool_stages=2)
    words = ["--seq-len", "2048", "--global-batch-size", "16", "--dtype", "fp8", "--mixed-pool-stages", "2"]
    assert main(["plan", MODEL, "--cluster", "1x4xA100-80G", *words, "--target", "megatron-lm-0.19"]) == 2
    shown = capsys.readouterr().err
    option, argument = "--target", "target"
    assert caught.value.key == argument and f"error: {option}: " in shown and "--target any" in shown
    assert 'target="any"' in str(caught.value)
    # The command ends the naming of options.
    with pytest.raises(sw.ConfigError, match=r"^seq_len: "):
        sw.plan(MODEL, **{**JOB, "seq_len": 0})


def test_what_does_not_fit_is_infeasible_with_reasons_and_relaxations() -> None:
    with pytest.raises(sw.Infeasible) as caught:
        sw.plan("llama-3.1-70b", **{**JOB, "cluster": "1xV100-16G"})
    assert caught.value.reasons and not any("--" in line for line in caught.value.relaxations)
    other = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert (other.message, other.reasons, other.relaxations) == (
        caught.value.message,
        caught.value.reasons,
        caught.value.relaxations,
    )
    with pytest.raises(sw.Infeasible, match=r"needs .* GiB"):
        sw.evaluate("llama-3.1-70b", strategy="tp=4", **JOB)


def test_errors_go_through_other_processes() -> None:
    error = sw.ConfigError("is wrong", file="f", key="k", found="1", allowed="2")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes
    bug = sw.InternalError("broken", seed=3)
    assert pickle.loads(pickle.dumps(bug)).seed == 3  # noqa: S301 - our own bytes


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.ConfigError, match="plan: is no plan"):
        sw.save(3, tmp_path / "plan.yaml")  # type: ignore[arg-type]
    with pytest.raises(sw.ConfigError, match="path: is not a text"):
        sw.load(3)  # type: ignore[arg-type]
    with pytest.raises(sw.ConfigError, match=r"does not exist|no such file"):
        sw.load(tmp_path / "none.yaml")


# Frontiers


def test_the_points_of_a_frontier_trade_time_for_memory_and_have_plans() -> None:
    found = sw.frontier("gpt2-xl", **JOB)
    times, sizes = [point.time_s for point in found.points], [point.memory_bytes for point in found.points]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True) and len(found) > 2
    first, last = found.plan(0), found.plan(-1)
    assert first.step_time_s == times[0] and last.best.peak_memory.device == sizes[-1]
    assert found.plan() == first  # the mode picks the fastest
    assert first.step_time_s == pytest.approx(sw.plan("gpt2-xl", **JOB).optimum_s, rel=1e-9)
    rows = found.rows()
    assert [row["step_time_s"] for row in rows] == times and rows[0]["tp"] == first.strategy.tp
    assert json.loads(json.dumps(found.to_dict()))["points"][0]["time_s"] == times[0]
    with pytest.raises(sw.ConfigError, match="point: is no point"):
        found.plan(len(found))
    picked = sw.frontier("gpt2-xl", **JOB, memory_limit=sizes[1])
    assert picked.pick is not None and picked.pick.time_s == times[1]
    table = sw.frontier("gpt2-xl", **JOB, mode="profile", devices=[1, 4], target="any")
    assert {point.devices for point in table.points} == {1, 4}
    with pytest.raises(sw.ConfigError, match="point: is required"):
        table.plan()


def test_the_frontier_of_a_graph_has_plans_of_operators() -> None:
    found = sw.frontier("graph:mlp", cluster="1x4xA100-80G", global_batch_size=64, epsilon=0.01)
    assert found.plan().kind == "graph" and found.plan().step_time_s == pytest.approx(
        found.points[0].time_s, rel=1e-9
    )
    assert found.plan().question.epsilon == 0.01
    assert json.loads(json.dumps(found.to_dict()))["points"][0]["layout"]["mesh"] == [4]


# Checks and decisions


def test_a_plan_is_checked_in_memory_and_in_a_file(plan: sw.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    found, of_file = sw.check(plan), sw.check(tmp_path / "plan.yaml")
    assert found.ok and of_file.ok and found.rows() == of_file.rows()
    assert any(row["name"] == "optimal" and row["ok"] for row in found.rows())
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True
    faster = replace(plan.best, step_time_s=plan.step_time_s / 2)
    wrong = sw.check(replace(plan, best=faster))
    assert not wrong.ok and "fails: " in repr(wrong)
    with pytest.raises(sw.ConfigError, match=r"^plan: is no plan"):
        sw.check(3)  # type: ignore[arg-type]
    with pytest.raises(sw.ConfigError, match=r"^proof_budget: "):
        sw.check(plan, proof_budget="soon")


def test_an_evaluated_plan_is_checked_without_a_claim_of_optimality() -> None:
    found = sw.check(sw.evaluate(MODEL, strategy="tp=4", **JOB))
    assert found.ok and not any(row["name"] == "optimal" and row["ok"] for row in found.rows())


def test_a_plan_is_decided_anew_after_events(tmp_path: Path) -> None:
    plan = sw.plan("gpt2-xl", cluster="4x2xA100-80G", seq_len=1024, global_batch_size=64)
    same = sw.replan(plan, cluster="4x2xA100-80G", events="slow n1 1.0")
    assert same.decision == "keep" and same.step_time_s == pytest.approx(plan.step_time_s, rel=1e-9)
    lost = sw.replan(plan, cluster=load_cluster("4x2xA100-80G"), events="lost n1", savable=True)
    assert lost.decision != "keep" and lost.transition_s > 0.0 and lost.outcome.keep_step_s is None
    assert lost.plan.devices <= 6 and lost.plan.step_time_s == pytest.approx(lost.step_time_s, rel=1e-9)
    assert json.loads(json.dumps(lost.to_dict()))["decision"] == lost.decision
    lost.plan.save(tmp_path / "next.yaml")
    assert sw.load(tmp_path / "next.yaml") == lost.plan and lost.plan.for_trace is not None
    Page(lost._repr_html_()), Page(sw.check(plan)._repr_html_())
    for wrong in ({"events": 3}, {"horizon": "x"}, {"horizon": -1}, {"savable": 1}, {"cluster": 5}):
        with pytest.raises(sw.ConfigError) as caught:
            sw.replan(plan, **{"cluster": "4x2xA100-80G", "events": "lost n1", **wrong})  # type: ignore[arg-type]
        assert caught.value.key == next(iter(wrong))


def test_a_plan_for_a_trace_is_that_of_the_command(tmp_path: Path) -> None:
    job: dict[str, Any] = {"cluster": "2x2xT4", "seq_len": 512, "global_batch_size": 8}
    events = "lost n1"
    plan = sw.plan("gpt2", events=events, policy="worst", **job)
    assert plan.for_trace is not None and plan.for_trace.policy == "worst" and plan.devices == 2
    assert plan.question.events == plan.for_trace.source
    path = str(tmp_path / "plan.yaml")
    words = ["--cluster", "2x2xT4", "--seq-len", "512", "--global-batch-size", "8"]
    assert main(["plan", "gpt2", *words, "--events", events, "--policy", "worst", "--save", path]) == 0
    assert sw.load(path).to_dict()["hash"] == plan.to_dict()["hash"]  # but for the seconds of the search
    for wrong, key in (
        ({"policy": "worst"}, "policy"),
        ({"events": events, "policy": "best"}, "policy"),
        ({"events": events, "use_all": True}, "use_all"),
        ({"events": events, "budget": 3}, "budget"),
        ({"events": 7}, "events"),
    ):
        with pytest.raises(sw.ConfigError) as caught:
            sw.plan("gpt2", **job, **wrong)
        assert caught.value.key == key


# Notebooks


class Page(HTMLParser):
    """Checks that tags are balanced and that nothing is loaded; collects the text."""

    VOID = ("circle", "path")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.names: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []
        assert not re.search(r"https?:|(src|href)=\"|url\(|<script", html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


NAME = "<img src=x onerror=alert(1)>&"


def test_results_are_short_in_a_console_and_tables_in_a_notebook() -> None:
    config = {**catalogue_entry("gpt2").config, "_name_or_path": NAME}
    job = {**JOB, "seq_len": 1024}
    plan, frontier = sw.plan(config, **job), sw.frontier(config, **job)
    swept = sw.sweep([{"model": config, **job}], out=None)
    assert plan.name == NAME
    for found in (plan, frontier, swept, plan.explain(), plan.what_if(nodes=2)):
        text = repr(found)
        assert "\n" not in text and len(text) < 300 and text.startswith("<")
        page = Page(found._repr_html_())
        assert "table" in page.names and "img" not in page.names
        if not isinstance(found, type(plan.what_if(nodes=2))):
            assert NAME in "".join(page.words)
    assert "svg" in Page(frontier._repr_html_()).names
    words = "".join(Page(plan._repr_html_()).words)
    assert "Proven optimal among" in words and "runner-up" in words and "optimizer" in words


# The command line is a layer over the functions


class Sentinel(Exception):
    """Raised by the function that a command must call."""


QUESTION = (MODEL, "--cluster", "1x4xA100-80G", "--seq-len", "2048", "--global-batch-size", "16")


@pytest.mark.parametrize(
    ("function", "argv"),
    [
        ("plan", ("plan", *QUESTION)),
        ("evaluate", ("evaluate", *QUESTION, "--strategy", "tp=4")),
        ("frontier", ("frontier", *QUESTION)),
        ("frontier", ("frontier", "graph:mlp", "--cluster", "1x4xA100-80G", "--global-batch-size", "64")),
        ("check", ("check", "PLAN")),
        ("replan", ("replan", "PLAN", "--cluster", "1x4xA100-80G", "--events", "slow n0 0.5")),
        ("explain", ("explain", "PLAN")),
        ("explain", ("explain", "PLAN", "--why-not", "tp=4")),
        ("what_if", ("explain", "PLAN", "--what-if", "nodes=2")),
        ("export", ("export", "PLAN", "--to", "megatron-lm", "--out", "SAVED")),
        ("save", ("plan", *QUESTION, "--save", "SAVED")),
        ("save", ("evaluate", *QUESTION, "--strategy", "tp=4", "--save", "SAVED")),
    ],
)
def test_a_command_calls_its_function(
    function: str,
    argv: tuple[str, ...],
    plan: sw.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {"PLAN": str(tmp_path / "plan.yaml"), "SAVED": str(tmp_path / "saved.yaml")}
    plan.save(paths["PLAN"])
    called: list[str] = []

    def answer(*_: object, **__: object) -> None:
        called.append(function)
        raise Sentinel(function)

    monkeypatch.setattr(api, function, answer)
    assert main([paths.get(word, word) for word in argv]) == 1
    assert called == [function] and not Path(paths["SAVED"]).exists()


def test_evaluate_saves_a_plan_that_other_commands_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.yaml")
    assert main(["evaluate", *QUESTION, "--strategy", "tp=4", "--save", path]) == 0
    assert f"wrote {path} (sha256:" in capsys.readouterr().err
    assert sw.load(path).strategy.tp == 4 and sw.load(path).certificate is None
    # Nothing claims that the strategy is the best, so that a better one is no news.
    assert main(["explain", path]) == 0 and capsys.readouterr().err == ""
    why_not = ["explain", path, "--why-not", "tp=2"]
    for argv in (["simulate", path], ["explain", path], ["compare", path, path], why_not):
        assert main(argv) == 0, (argv, capsys.readouterr().err)


def test_a_cluster_may_be_a_record_of_a_plan(plan: sw.Plan) -> None:
    found = sw.evaluate(plan.model, strategy="tp=4", **{**JOB, "cluster": load_cluster("1x4xA100-80G")})
    assert found == sw.evaluate(MODEL, strategy="tp=4", **JOB)
    with pytest.raises(sw.ConfigError, match="inter_node: is for clusters that are named by a text"):
        sw.plan(MODEL, **{**JOB, "cluster": plan.cluster}, inter_node="200Gb/s")


# Exports


def test_a_plan_is_exported_from_memory_and_from_a_file(tmp_path: Path) -> None:
    plan = sw.plan(MODEL, **JOB, target="megatron-lm")
    found = plan.export(to="megatron-lm", out=tmp_path / "a")
    assert found.target == "megatron-lm-0.19" and found.is_equal and found.read_back is None
    assert [Path(path).name for path in found.paths] == [
        "megatron-lm.args", "megatron-lm.sh", "megatron-lm.yaml", "megatron-bridge.txt",
    ]  # fmt: skip
    plan.save(tmp_path / "plan.yaml")
    again = sw.export(tmp_path / "plan.yaml", to="megatron-lm-0.19", out=tmp_path / "b")
    for first, second in zip(found.paths, again.paths, strict=True):
        assert Path(first).read_bytes() == Path(second).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"to": "megatron"}, "to"), ({"out": 3}, "out"), ({"validate": "yes"}, "validate")],
)
def test_a_wrong_argument_of_an_export_is_named(tmp_path: Path, arguments: dict[str, Any], key: str) -> None:
    plan = sw.plan(MODEL, **JOB, target="megatron-lm")
    with pytest.raises(sw.ConfigError) as refused:
        sw.export(plan, **{"to": "megatron-lm", "out": tmp_path / "run", **arguments})
    assert refused.value.key == key
    assert not (tmp_path / "run").exists()


def test_a_plan_for_other_software_is_priced_again(tmp_path: Path) -> None:
    strategy = "dp=4,zero_stage=3,recompute=full"
    plan = sw.evaluate(MODEL, strategy=strategy, **JOB)
    own = sw.evaluate(MODEL, strategy=strategy, target="torchtitan", **JOB)
    assert own.step_time_s != pytest.approx(plan.step_time_s, rel=1e-3)
    (path, *_) = sw.export(plan, to="torchtitan", out=tmp_path / "run").paths
    text = Path(path).read_text()
    assert plan_hash(plan) in text and plan_hash(own) not in text
    assert f"Predicted step time: {own.step_time_s:.6g} s (band" in text
    assert f"As in the plan, for any: {plan.step_time_s:.6g} s (profile megatron-lm-0.19)." in text
    (alone, *_) = sw.export(own, to="torchtitan", out=tmp_path / "own").paths
    assert "As in the plan" not in Path(alone).read_text()
