"""The commands: stdout and stderr, exit codes, JSON documents, and the questions that reach the planner."""

from __future__ import annotations

import errno
import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError, Infeasible, InternalError
from shardwise.plans import read_plan
from shardwise.plans.documents import document_hash
from shardwise.schedule import generate
from shardwise.strategy import parse_fields, target_of

if TYPE_CHECKING:
    from tests.unit.app.conftest import Planner, Run

ROOT = Path(__file__).parents[3]
QUESTION = ("llama-3.1-8b", "--cluster", "2x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "64")


def validated(text: str, name: str) -> Any:
    """The JSON document in `text`, validated against its published schema."""
    document = json.loads(text)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_plan_passes_the_options_to_the_planner(run: Run, planner: Planner) -> None:
    options = (
        "--dtype", "fp8", "--optimizer", "muon", "--space", "core", "--fix", "tp=8,zero_stage=1",
        "--top", "1", "--memory-margin", "0.1", "--expert-imbalance", "1.5", "--exhaustive", "--objective",
        "time",
    )  # fmt: skip
    assert run("plan", "--target=any", *QUESTION, *options).code == 0
    (question,) = planner.questions
    assert question.model.name == "llama-3.1-8b"
    assert question.cluster.devices == 16
    job = question.job
    assert (job.seq_len, job.global_batch_size, job.dtype, job.optimizer) == (4096, 64, "fp8", "muon")
    assert (job.memory_margin, job.expert_imbalance) == (0.1, 1.5)
    assert (question.space, question.top, question.exhaustive) == ("core", 1, True)
    assert question.fixed == {"tp": 8, "zero_stage": 1}


@pytest.mark.parametrize("cluster", ["2x8xA100-80G", "64x8xA100-80G"])
def test_the_default_space_is_used_at_any_size(run: Run, planner: Planner, cluster: str) -> None:
    planner.error = Infeasible("enough", reasons={})
    run(
        "plan", "--target=any", "gpt2", "--cluster", cluster, "--seq-len", "1024", "--global-batch-size", "64"
    )
    (question,) = planner.questions
    assert (question.space, question.workers, question.budget_s) == ("default", 1, None)
    assert question.axes == {"recompute_modules": ("", "mlp")} and question.has_own_set


def test_plan_passes_the_search_options_on(run: Run, planner: Planner) -> None:
    options = ("--workers", "1", "--budget", "1.5min", "--frontier", "--use-all", "--objective", "memory")
    assert run("plan", "--target=any", *QUESTION, *options).code == 0
    (question,) = planner.questions
    assert (question.workers, question.budget_s) == (1, 90.0)
    assert (question.frontier, question.use_all, question.objective) == (True, True, "memory")


def test_plan_prints_the_card_on_stdout_and_nothing_else(run: Run, planner: Planner) -> None:
    ran = run("plan", "--target=any", *QUESTION)
    assert (ran.code, ran.err) == (0, "")
    assert "12.500 s" in ran.out and "optimal among 1,234 candidates" in ran.out


def test_plan_json_has_the_documented_schema(run: Run, planner: Planner) -> None:
    ran = run("plan", "--target=any", *QUESTION, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = validated(ran.out, "plan-answer")
    assert document["model"]["name"] == "llama-3.1-8b"
    assert document["best"]["strategy"]["tp"] == 8
    assert document["best"]["memory"]["tightest_rank"] == 3
    # 32 layers over 2 stages.
    assert [stage["layers"] for stage in document["best"]["layout"]["pipelines"][0]["stages"]] == [16, 16]
    assert len(document["runners_up"]) == 2
    certificate = document["certificate"]
    # 1,000 + 200 rejected, 30 pruned, 4 simulated.
    assert certificate["enumerated"] == sum(certificate["rejected"].values()) + 30 + 4


def test_save_writes_a_readable_plan_and_reports_it_on_stderr(
    run: Run, planner: Planner, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    ran = run("plan", "--target=any", *QUESTION, "--json", "--save", str(path))
    assert ran.code == 0
    document = json.loads(ran.out)
    assert ran.err == f"wrote {path} ({document['plan_hash']})\n"
    plan = read_plan(str(path))
    assert plan.best.step_time_s == document["best"]["step_time_s"]
    assert f"hash: {json.dumps(document['plan_hash'])}\n" in path.read_text()


def test_the_same_question_gives_the_same_bytes(run: Run, planner: Planner, tmp_path: Path) -> None:
    outputs = set()
    for name in ("a.yaml", "b.yaml"):
        ran = run("plan", "--target=any", *QUESTION, "--json", "--save", str(tmp_path / name))
        outputs.add((ran.out, (tmp_path / name).read_bytes()))
    assert len(outputs) == 1


def test_evaluate_estimates_the_given_strategy(run: Run, planner: Planner) -> None:
    ran = run("evaluate", *QUESTION, "--strategy", "tp=4,pp=2", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = validated(ran.out, "evaluation")
    # tp is not 8: 12.5 + 0.25 s.
    assert document["result"]["step_time_s"] == 12.75
    assert document["result"]["strategy"]["dp"] == 2


def test_space_prints_every_axis_and_the_count(run: Run, planner: Planner) -> None:
    ran = run("space", *QUESTION, "--space", "core", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = validated(ran.out, "space")
    assert document["axes"]["tp"] == ["1", "2", "4", "8", "16"]
    table = run("space", *QUESTION, "--space", "core").out
    assert f"{document['count']:,}" in table
    assert all(axis in table for axis in document["axes"])
    fixed = json.loads(run("space", *QUESTION, "--space", "core", "--fix", "tp=8", "--json").out)
    assert 0 < fixed["count"] < document["count"]


def test_simulate_draws_the_step_and_writes_a_trace(run: Run, planner: Planner, tmp_path: Path) -> None:
    plan, trace = str(tmp_path / "plan.yaml"), str(tmp_path / "step.json")
    assert run("plan", "--target=any", *QUESTION, "--save", plan).code == 0
    ran = run("simulate", plan, "--trace", trace)
    assert (ran.code, ran.err) == (0, f"wrote {trace}; open it at https://ui.perfetto.dev\n")
    assert max(map(len, ran.out.splitlines())) <= 100
    # 64 micro-batches are too many for one chart: the beginning and the end of the step, 2 ranks each.
    assert sum(line.startswith("rank ") for line in ran.out.splitlines()) == 2 * 2
    assert "\nbeginning: 0 s to " in ran.out and "\nend: " in ran.out
    events = json.loads(Path(trace).read_text())["traceEvents"]
    # 2 ranks, 64 micro-batches (dp 1, micro-batch 1), a forward and a backward each.
    assert sum(event["ph"] == "X" and event["cat"] == "compute" for event in events) == 2 * 64 * 2
    document = validated(run("simulate", plan, "--json").out, "timeline")
    # 1F1B, equal stages: with hops of 0.5 ms below the slack, each rank computes 64 * (1 + 2) ms.
    assert [round(rank["busy_s"], 9) for rank in document["ranks"]] == [0.192, 0.192]
    # (m + pp - 1) * 3 ms without hops; the first and the last micro-batch cross one hop each way.
    assert document["timeline_s"] >= 0.195
    assert document["step_time_s"] == 12.5


def test_a_plan_whose_schedule_is_not_its_strategys_is_refused(
    run: Run, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "plan.yaml")
    assert run("plan", "--target=any", *QUESTION, "--save", path).code == 0
    generated = planner.step_durations

    def other(*arguments: Any) -> Any:
        schedule, durations = generated(*arguments)
        return generate("gpipe", pp=schedule.pp, microbatches=schedule.microbatches, vpp=1), durations

    monkeypatch.setattr("shardwise.search.plan_timeline.step_durations", other)
    ran = run("simulate", path)
    assert ran.code == 2
    assert ran.err == f"shardwise: error: {path}: schedule: is not the schedule of the strategy\n"


@pytest.mark.parametrize("name", ["models", "devices", "graphs"])
def test_lists_are_printed_as_tables_and_as_json(run: Run, name: str) -> None:
    ran = run(name)
    assert (ran.code, ran.err) == (0, "")
    document = validated(run(name, "--json").out, name)
    lines = [line for line in ran.out.splitlines() if not line.startswith(" not in 80 columns: ")]
    assert len(lines) == 1 + len(document[name])
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:]] == [entry["name"] for entry in document[name]]


def test_an_infeasible_question_exits_3_with_reasons_and_relaxations(run: Run, planner: Planner) -> None:
    planner.error = Infeasible(
        "memory: rank 0 lacks 12.5 GiB",
        reasons={"memory": 90, "heads_tp": 1200},
        relaxations=("--cluster 4x8xA100-80G", "--seq-len 2048"),
    )
    ran = run("plan", "--target=any", *QUESTION)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.splitlines() == [
        "shardwise: infeasible: memory: rank 0 lacks 12.5 GiB",
        "  rejected: 1,200 not met: tp divides the attention heads; "
        "90 too large for the memory of the device",
        "  would fit: --cluster 4x8xA100-80G",
        "  would fit: --seq-len 2048",
    ]
    document = validated(run("plan", *QUESTION, "--json").out, "error")
    assert document["error"]["kind"] == "infeasible"
    assert document["reasons"] == {"memory": 90, "heads_tp": 1200}
    assert len(document["relaxations"]) == 2
    evaluated = run("evaluate", *QUESTION, "--strategy", "tp=8", "--json")
    assert evaluated.code == 3
    assert validated(evaluated.out, "error")["reasons"]["memory"] == 90


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InternalError("the ledger does not add up", seed=7), "the ledger does not add up (seed 7)"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (RecursionError("maximum recursion depth\nexceeded"), "maximum recursion depth exceeded"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_unexpected_error_is_one_line_with_exit_code_1(
    run: Run, planner: Planner, error: Exception, words: str
) -> None:
    planner.error = error
    ran = run("plan", "--target=any", *QUESTION)
    assert (ran.code, ran.out) == (1, "")
    assert words in ran.err and ran.err.count("\n") == 1
    assert "Traceback" not in ran.err


def test_debugging_shows_the_traceback(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    planner.error = ZeroDivisionError("division by zero")
    monkeypatch.setenv("SHARDWISE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["plan", "--target=any", *QUESTION])


def test_an_error_of_the_planner_names_its_place_in_json_too(run: Run, planner: Planner) -> None:
    planner.error = ConfigError("is odd", file="c.yaml", key="nodes[0]", found="7", allowed="even numbers")
    ran = run("plan", "--target=any", *QUESTION, "--json")
    assert ran.code == 2
    assert ran.err == "shardwise: error: c.yaml: nodes[0]: is odd; found 7; allowed: even numbers\n"
    assert validated(ran.out, "error")["error"] == {
        "kind": "config", "message": "is odd", "file": "c.yaml", "key": "nodes[0]", "found": "7",
        "allowed": "even numbers",
    }  # fmt: skip


def test_ctrl_c_exits_130_quietly(run: Run, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.search.plan", interrupted)
    ran = run("plan", "--target=any", *QUESTION)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "shardwise: error: interrupted before there was an answer\n"


class ClosedPipe(io.StringIO):
    """A stdout whose reader has closed the pipe."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("argv", [("models",), ("models", "--json"), ("--help",)])
def test_a_closed_pipe_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    assert main(argv) == 1
    assert capsys.readouterr().err == ""


class FullDisk(ClosedPipe):
    """A stdout on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("argv", [("models",), ("models", "--json"), ("--help",), ("--version",)])
@pytest.mark.parametrize(
    ("stdout", "why"), [(FullDisk(), "no space left on device"), (None, "bad file descriptor")]
)
def test_an_answer_that_cannot_be_written_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    stdout: io.StringIO | None,
    why: str,
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(argv) == 1
    assert capsys.readouterr().err == f"shardwise: error: stdout: cannot be written; found {why}\n"


@pytest.mark.parametrize("stdout", [FullDisk(), None])
def test_an_error_keeps_its_code_where_stdout_takes_no_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdout: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["plan", "--json"]) == 2
    assert capsys.readouterr().err.startswith("shardwise: error: Missing argument 'MODEL'")


@pytest.mark.parametrize("stderr", [FullDisk(), ClosedPipe(), None])
def test_an_answer_does_not_need_stderr(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["plan", "--target=any", *QUESTION, "--save", str(tmp_path / "plan.yaml")]) == 0
    assert main(["plan"]) == 2


def test_help_lists_the_commands_and_no_command_shows_it_too(run: Run) -> None:
    shown, bare = run("--help"), run()
    assert shown.code == bare.code == 0
    assert shown.out == bare.out
    for name in (
        "plan",
        "evaluate",
        "frontier",
        "space",
        "simulate",
        "check",
        "explain",
        "review",
        "models",
        "devices",
        "graphs",
        "capture",
    ):
        assert f"  {name} " in shown.out
    assert "╭" not in shown.out


QUESTION_OPTIONS = (
    "--inter-node --calibration --software --attention --set --price --lora --images --freeze "
    "--dtype --optimizer "
    "--memory-margin --expert-imbalance --mean-sample-len"
)
RUN_OPTIONS = (
    "--tokens --steps --days --power --mtbf --checkpoint-interval --checkpoint-stall --restart --jitter"
)
OPTIONS = {
    "plan": "--cluster --seq-len --global-batch-size --objective --frontier --use-all --inter-node "
    "--calibration --dtype --optimizer --space --fix --target --tolerance --software "
    "--attention --set --price --lora --images --freeze --memory-margin --expert-imbalance "
    "--mean-sample-len --top "
    f"--exhaustive --workers --stage-dp --mixed-pool-stages --budget --save {RUN_OPTIONS} --events "
    "--policy --json --brief --verbose",
    "evaluate": f"--cluster --seq-len --global-batch-size --strategy --target {QUESTION_OPTIONS} "
    f"--save {RUN_OPTIONS} --json --brief --verbose",
    "frontier": "--cluster --global-batch-size --seq-len --mode --memory-limit --devices --stages "
    "--microbatches --meshes --objectives --epsilon --inter-node --calibration --target "
    "--software --attention --set --price --lora --images --freeze --dtype --optimizer --space "
    "--fix --memory-margin "
    "--expert-imbalance --mean-sample-len --workers --save --plot "
    f"--use-all {RUN_OPTIONS} --json",
    "space": "--cluster --global-batch-size --seq-len --inter-node --space --fix --stage-dp "
    "--mixed-pool-stages --json",
    "simulate": "--trace --plot --target --json",
    "check": "--proof-budget --json",
    "explain": "--why-not --what-if --workers --budget --json --verbose",
    "review": "--cluster --model --trainer --measured --seq-len --global-batch-size --fix --inter-node "
    "--calibration --software --memory-margin --expert-imbalance --mean-sample-len --workers --budget --json",
    "models": "--json",
    "devices": "--json",
    "graphs": "--json",
    "capture": "--out --batch",
    "launch": "--with --print --head --port --host --image --target --files --script",
    "calibrate": "--out --devices --cluster --links --from --measured --model --seq-len "
    "--global-batch-size --threads",
    "compare": "--trace --out --json",
    "emulate": "--cpu-share --events",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_explains_its_options(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    found = [word for line in ran.out.splitlines() if (word := _option(line))]
    assert found == [*OPTIONS[command].split(), "--help"]


def _option(line: str) -> str:
    """The option that a line of help begins with; texts are indented further and may name others."""
    words = line.replace("-h, ", "").split()
    return words[0] if words and line.startswith("  -") else ""


def test_version_is_the_package_version(run: Run) -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("shardwise ") and ran.out.count("\n") == 1


def test_the_next_commands_can_be_copied(run: Run, planner: Planner, tmp_path: Path) -> None:
    path = tmp_path / "my plan.yaml"
    ran = run(
        "plan",
        "--target=any",
        *QUESTION,
        "--inter-node",
        "100Gb/s",
        "--memory-margin",
        "0.1",
        "--save",
        str(path),
    )
    shown = ran.out.split(" next ")[1]
    assert max(map(len, shown.splitlines())) <= 80 + len(str(path))
    # A shell continues a line that ends with a backslash.
    commands = [line.strip() for line in re.sub(r" \\\n +", " ", shown).splitlines() if line.strip()]
    explain, simulate, launch, evaluate = (shlex.split(command) for command in commands)
    assert explain == ["shardwise", "explain", str(path)]
    assert launch == ["shardwise", "launch", str(path), "--with", "slurm", "--print"]
    assert simulate[:3] == ["shardwise", "simulate", str(path)]
    again = run(*evaluate[1:], "--json")
    assert again.code == 0
    document = json.loads(again.out)
    assert document["job"]["memory_margin"] == 0.1
    (question,) = planner.questions
    # The short text names the best strategy in full: tp=8,pp=2 with ZeRO-1.
    best = document["result"]["strategy"]
    assert (best["tp"], best["pp"], best["optim_shard"], best["grad_shard"]) == (8, 2, 1, 1)
    assert parse_fields(evaluate[-1]).keys() < best.keys()
    assert question.cluster.devices == 16


@pytest.mark.parametrize(
    ("encoding", "glyphs"), [("utf-8", ("█", "·")), ("ascii", ("#", "-")), ("latin-1", ("#", "-"))]
)
def test_the_card_uses_characters_that_the_terminal_has(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, encoding: str, glyphs: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # room for bars
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(("plan", "--target=any", *QUESTION)) == 0
    stream.seek(0)
    text = stream.read()
    assert all(glyph in text for glyph in glyphs)


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "is_styled"),
    [({"TERM": "xterm-256color"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_used_only_on_a_terminal_that_allows_it(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_styled: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(("plan", "--target=any", *QUESTION)) == 0
    assert ("\x1b[" in terminal.getvalue()) is is_styled


def test_the_hash_does_not_depend_on_effort_or_provenance() -> None:
    body = {"schema": "shardwise.plan", "certificate": {"enumerated": 5, "search_s": 1.0, "simulated": 2},
            "cluster": {"classes": {"a": {"memory_bytes": 7, "sources": {"memory_bytes": "x"}}}}}  # fmt: skip
    changes: list[tuple[Callable[[Any], None], bool]] = [
        (lambda d: d["certificate"].update(search_s=9.0, simulated=4), True),
        (lambda d: d["cluster"]["classes"]["a"]["sources"].update(memory_bytes="y"), True),
        (lambda d: d.update(hash="sha256:0"), True),
        (lambda d: d["certificate"].update(enumerated=6), False),
        (lambda d: d["cluster"]["classes"]["a"].update(memory_bytes=8), False),
    ]
    for change, is_same in changes:
        changed = json.loads(json.dumps(body))
        change(changed)
        assert (document_hash(changed) == document_hash(body)) is is_same


TINY = (
    "examples/tiny.yaml",
    "--seq-len",
    "64",
    "--global-batch-size",
    "8",
    "--dtype",
    "fp32",
    "--fix",
    "tp=2,pp=2",
)


def test_plans_for_cpu_processes_are_ones_that_train_runs(run: Run) -> None:
    answer = validated(run("plan", *TINY, "--cluster", "1x4xcpu", "--json").out, "plan-answer")
    assert answer["not_run"] == []
    assert answer["certificate"]["axes"]["offload"] == ["none"]
    card = run("plan", *TINY, "--cluster", "1x4xcpu").out
    assert "shardwise train plan.yaml" in card


@pytest.mark.slow
def test_plans_that_train_does_not_run_are_planned_on_request_and_marked(run: Run) -> None:
    command_line = (
        *TINY[:-1],
        "tp=2,pp=2,schedule=zb_h1,offload=both",
        "--cluster",
        "1x4xcpu",
        "--optimizer",
        "muon",
    )
    refused = run("plan", *command_line)
    assert refused.code == 2 and "runs no plan of this job; found optimizer muon" in refused.err
    refused = run("plan", *command_line[:-1], "adamw")
    assert refused.code == 3 and "shardwise train" in refused.err
    ran = run("plan", *command_line, "--target", "any", "--json")
    assert validated(ran.out, "plan-answer")["not_run"] == [
        "offload=both (it runs none or optimizer where backward passes are split)",
        "optimizer muon (it runs adamw, sgd)",
    ]  # fmt: skip
    assert "`shardwise train` does not run this plan: offload=both" in ran.err
    assert "; --target shardwise restricts the search to plans that it runs\n" in ran.err
    assert "shardwise train" not in run("plan", *command_line, "--target", "any").out


@pytest.mark.slow
def test_context_ranks_are_planned_only_where_attention_has_no_windows(run: Run, tmp_path: Path) -> None:
    """Our runtime does not divide the sequence of layers with windows, and the search respects that."""
    config = {
        "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128,
    }  # fmt: skip
    command_line = ("--cluster", "1x2xcpu", "--seq-len", "64", "--global-batch-size", "8", "--dtype", "fp32")
    for window, code in ((16, 2), (64, 0), (None, 0)):
        path = tmp_path / f"window-{window}.json"
        path.write_text(json.dumps({**config, "sliding_window": window}))
        ran = run("plan", str(path), *command_line, "--fix", "cp=2")
        assert ran.code == code, (window, ran.err)
        document = json.loads(
            run("plan", str(path), *command_line, "--fix", "cp=2", "--target", "any", "--json").out
        )
        assert bool(document["not_run"]) == (code == 2)
    free = json.loads(run("plan", str(tmp_path / "window-16.json"), *command_line, "--json").out)
    assert free["best"]["strategy"]["cp"] == 1 and free["not_run"] == []


def test_a_target_on_devices_that_it_does_not_know_is_refused(run: Run) -> None:
    ran = run("plan", *TINY, "--cluster", "1x4xTPU-v4", "--target", "shardwise")
    assert ran.code == 2
    assert ran.err.startswith("shardwise: error: --target: shardwise train does not run on this cluster")
    assert "allowed: clusters of cpu, or devices of NVIDIA and AMD; or --target any" in ran.err
    assert run("plan", *TINY, "--cluster", "1x4xcpu", "--target", "megatron").code == 2
    on_devices = run("plan", *TINY, "--cluster", "1x4xTPU-v4", "--json")
    assert validated(on_devices.out, "plan-answer")["not_run"] is None


@pytest.mark.slow
def test_plans_for_accelerators_are_marked_where_our_runtime_does_not_run_them(
    run: Run, tmp_path: Path
) -> None:
    """Any plan may be requested there; a message on stderr names the file of one that is not run, and the
    JSON answer has a key for it.
    """
    command_line = ("plan", "--target", "any", *TINY, "--cluster", "1x4xA100-40G")
    assert validated(run(*command_line, "--json").out, "plan-answer")["not_run"] == []
    muon = run(*command_line, "--optimizer", "muon", "--json")
    known = ", ".join(target_of("shardwise").optimizers)
    assert validated(muon.out, "plan-answer")["not_run"] == [f"optimizer muon (it runs {known})"]
    assert muon.err == ""
    saved = run(*command_line, "--optimizer", "muon", "--save", str(tmp_path / "plan.yaml"))
    assert "`shardwise train` does not run this plan: optimizer muon" in saved.err
    assert "shardwise launch" not in saved.out


@pytest.mark.slow
def test_plans_for_accelerators_are_our_runtime_s_on_request(run: Run) -> None:
    command_line = ("plan", *TINY, "--cluster", "1x4xA100-40G", "--json")
    free, own = (
        validated(run(*command_line, *more).out, "plan-answer")
        for more in (("--target", "any"), ("--target", "shardwise"))
    )
    assert "offload" not in free["certificate"]["axes"]
    assert (
        free["certificate"]["axes"] == {"recompute_modules": ["", "mlp"]} and free["certificate"]["own_set"]
    )
    assert own["certificate"]["axes"] == {} and "own_set" not in own["certificate"]
