"""Bad input: exit 2, one line on stderr that names the place, nothing on stdout, no file written, no
traceback.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from shardwise.plans.documents import document_hash

if TYPE_CHECKING:
    from tests.unit.app.conftest import Planner, Ran, Run

MODEL = {"layers": 8, "hidden": 512, "ffn": 2048, "heads": 8, "kv_heads": 8, "vocab": 32000, "seq_len": 1024}
CLUSTER: dict[str, Any] = {
    "name": "two pods",
    "nodes": [{"device": "A100-80G", "count": 2, "devices": 8, "nics": {"count": 8, "bandwidth": "200Gb/s"}}],
    "tiers": [
        {"name": "NVLink", "span": "node", "bandwidth": "300GB/s", "latency": "2us"},
        {"name": "leaf", "latency": "4us", "rails": 8},
    ],
}
JOB = ("--seq-len", "1024", "--global-batch-size", "64")
PLAN = ("plan", "gpt2", "--cluster", "2x8xA100-80G", *JOB, "--target=any")


def refused(ran: Ran, *words: str) -> str:
    """The only line of a user error; it contains all `words`."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("shardwise: error: ") and ran.err.count("\n") == 1
    assert ran.err.rstrip("\n").isprintable()
    assert "Traceback" not in ran.err and "╭" not in ran.err
    for word in words:
        assert word in ran.err
    return ran.err


def put(folder: Path, name: str, content: object) -> str:
    """Write a file with `content`: text, bytes, or a value to write as YAML."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return str(path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plna",), ("plna",)),
        (("plan",), ("MODEL",)),
        (("plan", "gpt2"), ("--cluster",)),
        (("plan", "gpt2", "--cluster", "1x8xA100-80G", "--seq-len", "1024"), ("--global-batch-size",)),
        ((*PLAN, "--seqlen", "5"), ("--seqlen", "--seq-len")),
        ((*PLAN, "extra"), ("extra",)),
        ((*PLAN, "--seq-len"), ("--seq-len",)),
        ((*PLAN, "--json=yes"), ("--json",)),
        ((*PLAN, "--objective", "tme"), ("--objective", "did you mean time?")),
        ((*PLAN, "--space", "cor"), ("--space", "did you mean core?")),
        ((*PLAN, "--space", ""), ("--space", "neither a space nor a file")),
        ((*PLAN, "--space", "missing.yaml"), ("missing.yaml", "cannot be read")),
        ((*PLAN, "--workers", "0"), ("--workers", "found '0'", "allowed: 1 to ")),
        ((*PLAN, "--workers", "-1"), ("--workers", "found '-1'")),
        ((*PLAN, "--workers", str((os.cpu_count() or 1) + 1)), ("--workers", f"1 to {os.cpu_count()}")),
        ((*PLAN, "--budget", "0s"), ("--budget", "found '0s'")),
        ((*PLAN, "--budget", "-3s"), ("--budget", "found '-3s'")),
        ((*PLAN, "--budget", "10"), ("--budget", "has no unit")),
        ((*PLAN, "--budget", "soon"), ("--budget", "is not a number with a unit")),
        (("explain", "missing.yaml"), ("missing.yaml", "cannot be read")),
        (("explain", "plan.yaml", "--why-not", "tpp=8"), ("--why-not", "tpp", "did you mean tp?")),
        (("explain", "plan.yaml", "--why-not", ""), ("--why-not", "names no field")),
        (
            ("explain", "plan.yaml", "--why-not", "tp=8", "--what-if", "nodes=2x"),
            ("--why-not", "one of the two"),
        ),
        ((*PLAN, "--dtype", "bf61"), ("--dtype", "did you mean bf16?")),
        ((*PLAN, "--optimizer", "adam"), ("--optimizer", "did you mean adamw?")),
        ((*PLAN, "--fix", "tp"), ("--fix",)),
        ((*PLAN, "--fix", "tpp=8"), ("--fix", "tpp", "tp")),
        ((*PLAN, "--fix", "tp=8,tp=4"), ("--fix", "tp")),
        ((*PLAN, "--fix", "tp=eight"), ("--fix.tp", "eight")),
        ((*PLAN, "--fix", "tp=0"), ("--fix.tp",)),
        ((*PLAN, "--fix", "zero_stage=4"), ("--fix.zero_stage",)),
        ((*PLAN, "--top", "-1"), ("--top",)),
        ((*PLAN, "--inter-node", "200"), ("200",)),
        ((*PLAN, "--inter-node", "fast"), ("fast",)),
        ((*PLAN, "--save", "missing/plan.yaml"), ("missing/plan.yaml", "folder does not exist")),
        ((*PLAN, "--save", "."), ("a directory",)),
        ((*PLAN, "--save", ""), ("--save", "found ''")),
        ((*PLAN, "--save", "/dev/null"), ("/dev/null", "not a regular file")),
        (("plan", "gpt3", "--cluster", "1x8xA100-80G", *JOB), ("gpt3",)),
        (("plan", "gpt2", "--cluster", "1x8xA100-90G", *JOB), ("A100-90G", "A100-80G")),
        (("plan", "gpt2", "--cluster", "0x8xA100-80G", *JOB), ("cluster",)),
        (("plan", "gpt2", "--cluster", "x", *JOB), ("cluster",)),
        (("plan", "gpt2", "--cluster", "", *JOB), ("cluster",)),
        (("plan", "", "--cluster", "1x8xA100-80G", *JOB), ("MODEL",)),
        (("evaluate", *PLAN[1:]), ("--strategy",)),
        (("evaluate", *PLAN[1:], "--strategy", "tp=3"), ("strategy", "16")),
        (("evaluate", *PLAN[1:], "--strategy", "tp=8,vpp=2,schedule=1f1b"), ("strategy",)),
        (("space", "gpt2", "--cluster", "1x8xA100-80G"), ("--global-batch-size",)),
        (("simulate", "missing.yaml"), ("missing.yaml", "cannot be read")),
        (("simulate", "."), ("a directory",)),
        (("models", "llama"), ("llama",)),
    ],
)
def test_arguments_that_cannot_be_used(
    run: Run, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    refused(run(*argv), *words)
    assert planner.questions == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--seq-len", "--global-batch-size", "--top"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "1e9",
        "nan",
        "inf",
        "-1",
        "1.5",
        "0x10",
        "1_000",
        "10000001",
        "9" * 400,
        "٣",
        "true",
        " 8",
        "8\n",
        "\0",
    ],
)
def test_counts_are_plain_digits_in_range(run: Run, planner: Planner, option: str, text: str) -> None:
    refused(run(*PLAN, option, text), option)
    assert planner.questions == []


@pytest.mark.parametrize("option", ["--memory-margin", "--expert-imbalance"])
@pytest.mark.parametrize("text", ["", "1e9", "nan", "inf", "-0.1", "0.95.1", "101", "9" * 400, "5%", "true"])
def test_fractions_are_decimals_in_range(run: Run, planner: Planner, option: str, text: str) -> None:
    refused(run(*PLAN, option, text), option)


def test_errors_are_json_on_stdout_too_where_requested(run: Run, planner: Planner) -> None:
    ran = run(*PLAN, "--json", "--seq-len", "8k")
    error = json.loads(ran.out)["error"]
    assert (ran.code, error["kind"], error["key"], error["found"]) == (2, "config", "--seq-len", "'8k'")
    assert ran.err.count("\n") == 1
    usage = run(*PLAN, "--json", "--nonsense")
    assert (usage.code, json.loads(usage.out)["error"]["kind"]) == (2, "usage")


def _without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def _node(**changes: object) -> dict[str, Any]:
    return {**CLUSTER, "nodes": [{**CLUSTER["nodes"][0], **changes}]}


BAD_MODELS: list[tuple[object, tuple[str, ...]]] = [
    *((_without(MODEL, key), (key,)) for key in ("layers", "hidden", "ffn", "heads", "vocab", "seq_len")),
    ({**MODEL, "layers": 0}, ("layers", "0")),
    ({**MODEL, "layers": -4}, ("layers", "-4")),
    ({**MODEL, "layers": 10**12}, ("layers",)),
    ({**MODEL, "layers": 2.5}, ("layers", "2.5")),
    ({**MODEL, "layers": "8"}, ("layers", "8")),
    ({**MODEL, "layers": True}, ("layers", "true")),
    ({**MODEL, "layers": [8]}, ("layers",)),
    ({**_without(MODEL, "kv_heads"), "heads": 7}, ("heads", "7")),
    ({**MODEL, "kv_heads": 3}, ("kv_heads", "3")),
    ({**MODEL, "lairs": 8}, ("lairs", "layers")),
    ({**MODEL, "dropout": float("nan")}, ("dropout",)),
    ({**MODEL, "vocab": float("inf")}, ("vocab",)),
    ({"model_type": "llamma"}, ("model_type", "llamma", "llama")),
    ({"model_type": "llama"}, ()),
    ({"architectures": ["LlamaForCausalLM"]}, ("model_type",)),
    ("layers: 8\nlayers: 9\n", ("layers",)),
    ("base: &a {layers: 8}\nother: *a\n", ("base",)),
    ("layers: !!int '8'\n", ("layers",)),
    ("layers: !!python/object/apply:os.system ['true']\n", ("layers",)),
    ("8: layers\n", ()),
    ("- layers\n", ("mapping",)),
    ("layers: [8\n", ("YAML",)),
    ("layers: 8\n---\nlayers: 9\n", ()),
    ("", ("empty",)),
    ("   \n# nothing\n", ()),
    ("null\n", ()),
    (b"\xff\xfe\x00\x01layers: 8\n", ("UTF-8",)),
    (b"layers: 8\n\x00", ()),
    ("{" * 5000, ()),
    ("[" * 100 + "]" * 100, ()),
    ("a:\n" + "".join("  " * depth + "a:\n" for depth in range(1, 60)), ()),
    ('{"model_type": "llama", "a": ' + "[" * 3000 + "]" * 3000 + "}", ()),
    ('{"model_type": "gpt2", "n_layer": NaN}', ()),
    ('{"model_type": "gpt2", "n_layer": 1e999}', ()),
    ('{"model_type": "gpt2", "model_type": "gpt2"}', ("model_type",)),
    ('{"model_type": "gpt2", "n_layer": 12', ("JSON",)),
    ("layers: " + "9" * 5000, ()),
    ("x" * (33 << 20), ("too large",)),
]

BAD_CLUSTERS: list[tuple[object, tuple[str, ...]]] = [
    ({**CLUSTER, "nodes": []}, ("nodes",)),
    (_without(CLUSTER, "nodes"), ("nodes",)),
    ({**CLUSTER, "nodes": {}}, ("nodes",)),
    ({**CLUSTER, "nodes": ["A100-80G"]}, ("nodes[0]",)),
    ({**CLUSTER, "nods": []}, ("nods", "nodes")),
    (_node(device="A1000"), ("nodes[0].device", "A1000")),
    (_node(device=""), ("nodes[0].device",)),
    (_node(devices=0), ("nodes[0].devices", "0")),
    (_node(count=-1), ("nodes[0].count", "-1")),
    (_node(count=10**15), ("nodes[0].count",)),
    (_node(speed=0), ("nodes[0].speed",)),
    (_node(speed=float("nan")), ("nodes[0].speed",)),
    (_node(tier="spine"), ("nodes[0].tier",)),
    ("nodes: [{device: A100-80G, nics: {bandwidth: '1e9'}}]\n", ("nodes[0].nics.bandwidth", "1e9")),
    (_node(nics={"count": 8, "bandwidth": "200 parsecs"}), ("nodes[0].nics.bandwidth", "parsecs")),
    (_node(nics={"count": 8, "bandwidth": "-200Gb/s"}), ("nodes[0].nics.bandwidth",)),
    (_node(nics={"count": 8, "bandwidth": "1e300GB/s"}), ("nodes[0].nics.bandwidth",)),
    (_node(nics={"cuont": 8}), ("nodes[0].nics.cuont", "count")),
    ({**CLUSTER, "tiers": [{"name": "a", "span": "rack", "bandwidth": "1GB/s"}]}, ("tiers[0].span", "rack")),
    ({**CLUSTER, "tiers": []}, ("tiers",)),
    ({**CLUSTER, "tiers": [{"name": "a"}, {"name": "a"}]}, ("tiers",)),
    ("nodes:\n- &n {device: A100-80G}\n- *n\n", ()),
    ("nodes: [{device: A100-80G, device: H100-SXM}]\n", ("device",)),
]


@pytest.mark.parametrize(("content", "words"), BAD_MODELS)
def test_model_files_that_cannot_be_used(
    run: Run, planner: Planner, tmp_path: Path, content: object, words: tuple[str, ...]
) -> None:
    path = put(tmp_path, "model.yaml", content)
    if isinstance(content, str) and content.startswith('{"'):
        path = put(tmp_path, "config.json", content)
    refused(run("plan", path, "--cluster", "1x8xA100-80G", *JOB), path, *words)
    assert planner.questions == []


@pytest.mark.parametrize(("content", "words"), BAD_CLUSTERS)
def test_cluster_files_that_cannot_be_used(
    run: Run, planner: Planner, tmp_path: Path, content: object, words: tuple[str, ...]
) -> None:
    path = put(tmp_path, "cluster.yaml", content)
    refused(run("plan", "gpt2", "--cluster", path, *JOB), path, *words)
    assert planner.questions == []


def test_the_base_files_of_these_tests_are_good(run: Run, planner: Planner, tmp_path: Path) -> None:
    model, cluster = put(tmp_path, "model.yaml", MODEL), put(tmp_path, "cluster.yaml", CLUSTER)
    assert run("plan", "--target=any", model, "--cluster", cluster, *JOB).code == 0


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


KINDS: dict[str, Callable[[Path], None]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a large file": _sparse,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["model", "cluster", "plan"])
def test_a_file_must_be_small_and_regular(
    run: Run, planner: Planner, tmp_path: Path, kind: str, command: str
) -> None:
    path = tmp_path / "input.yaml"
    KINDS[kind](path)
    argv = {
        "model": ("plan", str(path), "--cluster", "1x8xA100-80G", *JOB),
        "cluster": ("plan", "gpt2", "--cluster", str(path), *JOB),
        "plan": ("simulate", str(path)),
    }[command]
    refused(run(*argv), str(path))


def test_an_unreadable_file(
    run: Run, planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's refusal is simulated, since a test may run as root, who may read everything."""
    path = put(tmp_path, "model.yaml", MODEL)

    def denied(*arguments: object, **options: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    refused(run("plan", path, "--cluster", "1x8xA100-80G", *JOB), path, "permission denied")


@pytest.mark.parametrize("name", ["a\nb.yaml", "\x1b[31mred.yaml", "ä\u2028.yaml", "-.yaml", "$(x) 'y'.yaml"])
def test_odd_file_names_stay_on_one_line(run: Run, planner: Planner, tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name, {**MODEL, "layers": 0})
    refused(run("plan", path, "--cluster", "1x8xA100-80G", *JOB), "layers")


@pytest.mark.parametrize("which", ["model", "folder", "cluster", "link"])
def test_a_plan_does_not_overwrite_its_inputs(run: Run, planner: Planner, tmp_path: Path, which: str) -> None:
    config = json.dumps({"model_type": "gpt2"})
    model = put(tmp_path, "config.json", config)
    cluster = put(tmp_path, "cluster.yaml", CLUSTER)
    (tmp_path / "link.yaml").symlink_to(cluster)
    target = {"link": str(tmp_path / "link.yaml"), "cluster": cluster}.get(which, model)
    command_line = str(tmp_path) if which == "folder" else model
    refused(
        run("plan", command_line, "--cluster", cluster, *JOB, "--save", target),
        "--save",
        "an input",
        "another file",
    )
    assert Path(model).read_text() == config and yaml.safe_load(Path(cluster).read_text()) == CLUSTER


def test_a_trace_does_not_replace_the_plan(run: Run, planner: Planner, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run(*PLAN, "--save", str(path)).code == 0
    plan = path.read_bytes()
    refused(run("simulate", str(path), "--trace", str(path)), "--trace", "an input")
    assert path.read_bytes() == plan
    # A new plan may overwrite an old plan.
    assert run(*PLAN, "--save", str(path)).code == 0


@pytest.mark.parametrize("option", ["--save", "--json"])
def test_a_schedule_too_long_for_a_plan_file_is_refused_before_it_is_made(
    run: Run, planner: Planner, tmp_path: Path, option: str
) -> None:
    # The planner answers tp 8, pp 2: 2 actions on each of 2 stages for 1,048,577 micro-batches, 4 above 2^22.
    command_line = (
        "plan",
        "--target=any",
        "gpt2",
        "--cluster",
        "2x8xA100-80G",
        "--seq-len",
        "1024",
        "--global-batch-size",
        "1048577",
    )
    ran = run(*command_line, option, *([str(tmp_path / "plan.yaml")] if option == "--save" else []))
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert "--global-batch-size: has too many micro-batches" in ran.err and "4194304" in ran.err
    assert list(tmp_path.iterdir()) == []
    assert run(*command_line).code == 0


@pytest.mark.parametrize("key", ["nodes", "layers"])
def test_a_misspelt_key_that_is_needed_is_named(run: Run, planner: Planner, tmp_path: Path, key: str) -> None:
    content = {name + "z" * (name == key): value for name, value in {**MODEL, **CLUSTER}.items()}
    path = put(tmp_path, "input.yaml", content)
    argv = ("plan", "gpt2", "--cluster", path) if key == "nodes" else ("plan", path, "--cluster", "8xH100")
    refused(run(*argv, *JOB), f"{key}: is missing; found {key}z;")


# --- fuzz ------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, 10**9, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "1e9",
    "017", "node", "200Gb/s", "A100-80G", "no", [], {}, [1], {"a": 1}, "x" * 500, "\u2028", "a: b", [[[]]],
)  # fmt: skip


def _mutated(value: Any, rng: random.Random) -> Any:
    """`value` with one part changed: replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = dict(value)
        what = rng.randrange(4)
        if what == 0:
            del changed[key]
        elif what == 1:
            changed[key + rng.choice("sx_")] = changed.pop(key)
        else:
            changed[key] = _mutated(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _mutated(value[place], rng), *value[place + rng.randrange(2) :]]
    return rng.choice(ODD)


def _mangled(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, dropped or inserted, or truncated."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        cut = rng.choice((0, 0, 1, 1, 5, len(data)))
        data = data[:place] + bytes(rng.choices(range(256), k=rng.randrange(4))) + data[place + cut :]
    return data


@pytest.mark.slow
def test_fuzzed_files_are_answered_or_refused_in_one_line(
    run: Run, planner: Planner, tmp_path: Path, full: bool
) -> None:
    rng = random.Random(20260)
    codes = {0: 0, 2: 0}
    llama = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    seeds = ((MODEL, "model"), (llama, "model"), (CLUSTER, "cluster"))
    for _ in range(20_000 if full else 120):
        seed, kind = rng.choice(seeds)
        if rng.random() < 0.6:
            content: object = yaml.safe_dump(_mutated(seed, rng), allow_unicode=True)
        else:
            content = _mangled(yaml.safe_dump(seed).encode(), rng)
        path = put(tmp_path, "input.yaml", content)
        model, cluster = (path, "1x8xA100-80G") if kind == "model" else ("gpt2", path)
        ran = run("space", model, "--cluster", cluster, "--global-batch-size", "64", "--space", "core")
        codes[ran.code] += 1
        if ran.code == 2:
            refused(ran)
        assert [entry.name for entry in tmp_path.iterdir()] == ["input.yaml"]
    assert min(codes.values()) > 0


@pytest.mark.slow
def test_fuzzed_plans_are_refused_in_one_line(run: Run, planner: Planner, tmp_path: Path, full: bool) -> None:
    """Only changes that the hash leaves out (spelling, timings, provenance text) are accepted."""
    path = tmp_path / "plan.yaml"
    assert run(*PLAN, "--save", str(path)).code == 0
    data = path.read_bytes()
    expected = hash_of(data)
    rng = random.Random(7)
    refusals = 0
    for _ in range(5_000 if full else 60):
        mangled = _mangled(data, rng)
        path.write_bytes(mangled)
        ran = run("simulate", str(path))
        if ran.code == 0:
            assert hash_of(mangled) == expected
        else:
            refused(ran, str(path))
            refusals += 1
    assert refusals > 0


def hash_of(data: bytes) -> str:
    """The correct hash of the text, computed with a general YAML reader."""
    return document_hash(yaml.safe_load(data))
