"""Import of TorchTitan's configurations: the JSON of `debug.save_config_file`, the TOML of older versions,
and the Python module that `torchtitan.torchtitan_files` writes, which is parsed and not run."""

from __future__ import annotations

import ast
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, unknown
from shardwise.model import Model, load_model
from shardwise.strategy import PROFILES
from shardwise.targets.imports.imported import (
    FileSection,
    ImportedRun,
    ReviewFinding,
    Supplied,
    chosen,
    ends_of,
    model_of_file,
)
from shardwise.targets.torchtitan import DTYPES, SCHEDULE_CLASSES
from shardwise.targets.torchtitan_model import TORCHTITAN

NAMES = {
    "dp": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "vpp": "parallelism.pipeline_parallel_schedule",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "optim_shard": "parallelism.data_parallel_shard_degree",
    "param_shard": "parallelism.fsdp_reshard_after_forward",
    "micro_batch_size": "training.local_batch_size",
    "recompute": "activation_checkpoint",
    "offload": "training.enable_cpu_offload",
    "first_stage_layers": "parallelism.module_fqns_per_model_part",
    "global_batch_size": "training.global_batch_size",
    "seq_len": "training.seq_len",
}
"""Fields of a strategy or a job, and the key of each."""

MODELS = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("deepseek_v3", "671b"): "deepseek-v3",
}
"""TorchTitan's names and flavors of models, and those of the catalogue."""

SECTIONS = ("parallelism", "training", "experimental")
"""Sections that have had the degrees of parallelism, newest first."""

_POLICIES = {"force_recompute_mm_shapes_by_fqns": "selective", "memory_budget": "memory_budget"}
"""Fields of policies of recomputation, other than the full one."""

MAX_JSON_BYTES, MAX_JSON_NODES = 1 << 25, 1 << 22
"""Largest JSON that is read: it lists every layer of the model."""

_EAGER = "fsdp2-eager"
"""The software profile of layers that are not compiled."""


def is_torchtitan(text: str) -> bool:
    """Whether the text is a configuration of TorchTitan."""
    if "Trainer.Config(" in text and "torchtitan" in text:
        return True
    is_json = text.lstrip().startswith("{") and '"training"' in text
    return is_json or any(line.strip() in ("[training]", "[parallelism]") for line in text.splitlines())


def read_torchtitan(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that a configuration of TorchTitan describes, on `devices`. Raises ConfigError, with the key,
    for a value that cannot be used."""
    read = FileSection(_values(text))
    model = supplied.model or _model(read)
    reading = _Reading(read, model, devices)
    fields, findings = reading.strategy()
    training = read.section("training")
    rows = fields["dp"]
    batch = training.integer("global_batch_size", -1, low=-1)
    local = training.count("local_batch_size", training.count("batch_size", 8))
    whole = local * rows if batch is None or batch < 1 else batch
    is_compiled = _is_compiled(read)
    return ImportedRun(
        target=TORCHTITAN,
        model=model,
        fields={**supplied.fields, **fields},
        seq_len=chosen("training.seq_len", training.integer("seq_len", 2048), supplied.seq_len, "--seq-len"),
        global_batch_size=chosen(
            "training.global_batch_size", whole, supplied.global_batch_size, "--global-batch-size"
        ),
        dtype=_dtype(training),
        optimizer="adamw",
        profile={} if is_compiled else {"pointwise_passes": PROFILES[_EAGER].pointwise_passes},
        names=NAMES,
        findings=(
            *findings,
            *reading.passes(fields, local, whole),
            *_reduction(training),
            *read.misspelt(),
        ),
        options=_options(read),
    )


def _values(text: str) -> Mapping[str, object]:
    if text.lstrip().startswith("{"):
        return parse_mapping(text, max_bytes=MAX_JSON_BYTES, max_nodes=MAX_JSON_NODES)
    if "Trainer.Config(" in text:
        return _python_values(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not valid TOML: {error}") from None


def _python_values(text: str) -> Mapping[str, object]:
    """The values of an exported module, from its syntax alone."""
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError("is not valid Python", allowed="a module that `shardwise export` wrote") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found: dict[str, dict[str, object]] = {}
    for section, name in (("parallelism", "ParallelismConfig"), ("training", "TrainingConfig"),
                          ("compile", "CompileConfig"), ("optimizer", "replace")):  # fmt: skip
        call = next((one for one in calls if ast.unparse(one.func) == name), None)
        found[section] = {} if call is None else dict(_literals(call))
    for name in ("FullAC.Config", "FirstLayersAC.Config"):
        call = next((one for one in calls if ast.unparse(one.func) == name), None)
        if call is not None:
            found["activation_checkpoint"] = {"mode": "full", **dict(_literals(call))}
    starts, ends = _assigned(tree, "starts"), _assigned(tree, "ends")
    if isinstance(starts, ast.List) and isinstance(ends, ast.List):
        first = [int(ast.literal_eval(one)) for one in starts.elts]
        last = [*first[1:], int(ast.literal_eval(ends.elts[-1]))]
        found["parallelism"]["module_fqns_per_model_part"] = [
            [f"layers.{index}" for index in range(*bounds)] for bounds in zip(first, last, strict=True)
        ]
    return found


def _assigned(tree: ast.AST, name: str) -> ast.expr | None:
    """The expression that is assigned to a variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return node.value
    return None


def _literals(call: ast.Call) -> Iterator[tuple[str, object]]:
    for keyword in call.keywords:
        if keyword.arg is not None and isinstance(keyword.value, ast.Constant):
            yield keyword.arg, keyword.value.value


def _model(read: FileSection) -> Model:
    for name in ("model_spec", "model"):
        section = read.section(name) if isinstance(read.values.get(name), Mapping) else FileSection({})
        found = MODELS.get((section.text("name"), section.text("flavor").lower()))
        if found is not None:
            return load_model(found)
    return model_of_file(None, "the configuration")


@dataclass(frozen=True, slots=True)
class _Reading:
    """A configuration with the layers of the model, on a number of devices."""

    read: FileSection
    model: Model
    devices: int

    def degree(self, name: str, default: int = 1, *, low: int = 1) -> int:
        """A degree of parallelism, from the section that has it."""
        for section in SECTIONS:
            found = self.read.section(section).integer(name, None, low=low)
            if found is not None:
                return found
        return default

    def text(self, name: str, default: str = "") -> str:
        for section in SECTIONS:
            if found := self.read.section(section).text(name):
                return found
        return default

    def strategy(self) -> tuple[dict[str, Any], list[ReviewFinding]]:
        tp, pp = self.degree("tensor_parallel_degree"), self.degree("pipeline_parallel_degree")
        cp, replicas = self.degree("context_parallel_degree"), self.degree("data_parallel_replicate_degree")
        shards = self.degree("data_parallel_shard_degree", -1, low=-1)
        others = tp * pp * cp * replicas
        if shards < 1:
            shards = max(self.devices // others, 1)
        if others * shards != self.devices:
            raise ConfigError(
                "the degrees do not multiply to the cluster's devices", key="parallelism",
                found=f"{replicas} * {shards} * {cp} * {tp} * {pp}", allowed=f"{self.devices}",
            )  # fmt: skip
        fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "dp": replicas * shards}
        is_sequence = self.read.section("parallelism").is_on("enable_sequence_parallel", True)
        fields["sequence_parallel"] = tp > 1 and is_sequence
        findings = list(self._stages(fields))
        fields |= self._states(shards * cp, pp)
        if self.model.experts is not None:
            fields["ep"] = self.degree("expert_parallel_degree")
            fields["etp"] = tp if fields["ep"] == 1 else self.degree("expert_tensor_parallel_degree")
        findings += self._recompute(fields)
        if self.read.section("training").is_on("enable_cpu_offload"):
            fields["offload"] = "optimizer"
            findings.append(
                ReviewFinding(
                    code="approximated", severity="info", field=NAMES["offload"],
                    text="only the offload of optimizer states is predicted",
                )
            )  # fmt: skip
        return fields, findings

    def _states(self, shards: int, pp: int) -> dict[str, Any]:
        policy = self.text("fsdp_reshard_after_forward", "default")
        is_resharded = policy == "always" or (policy == "default" and pp == 1)
        return {"param_shard": shards if is_resharded else 1, "grad_shard": shards, "optim_shard": shards}

    def _stages(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        """Micro-batch size, schedule and stages."""
        training, pp = self.read.section("training"), fields["pp"]
        local = training.count("local_batch_size", training.count("batch_size", 8))
        if pp == 1:
            fields["micro_batch_size"] = local
            return
        passes = self.degree("pipeline_parallel_microbatches", 0)
        fields["micro_batch_size"] = (
            max(local // passes, 1) if passes else self.degree("pipeline_parallel_microbatch_size")
        )
        name = self.text("pipeline_parallel_schedule", "1F1B")
        ours = {theirs.lower(): own for own, theirs in SCHEDULE_CLASSES.items()}
        counts = self._counts(pp, is_single=name.lower() in ("1f1b", "gpipe"))
        fields["vpp"] = max(len(counts) // pp, 1)
        schedule = ours.get(name.lower())
        if schedule is None:
            schedule = "interleaved_1f1b" if fields["vpp"] > 1 else "1f1b"
            yield ReviewFinding(
                code="approximated", severity="info", field="parallelism.pipeline_parallel_schedule",
                text=f"{name} is predicted as {schedule}",
            )  # fmt: skip
        if schedule in ("1f1b", "gpipe") and fields["vpp"] > 1:
            yield ReviewFinding(
                code="layers_lost", severity="error", field=NAMES["first_stage_layers"],
                text=f"{name} runs one of the {fields['vpp']} model parts of each rank, and the others do"
                " not train; the prediction is of interleaved_1f1b",
            )  # fmt: skip
            schedule = "interleaved_1f1b"
        fields["schedule"] = schedule
        ends, findings = ends_of(counts, self.model.layers, NAMES["first_stage_layers"])
        fields |= ends
        yield from findings

    def _counts(self, pp: int, *, is_single: bool) -> tuple[int, ...]:
        """Layers of each stage in model order: as listed, else as TorchTitan splits them."""
        section = self.read.section("parallelism")
        parts = section.values.get("module_fqns_per_model_part")
        if isinstance(parts, list) and parts:
            listed = [{str(name) for name in part if str(name).startswith("layers.")} for part in parts]
            return tuple(len(part) for part in listed)
        layers, each = self.model.layers, section.integer("pipeline_parallel_layers_per_stage")
        less = [
            section.count(f"pipeline_parallel_{end}_stage_less_layers", 1, low=0) for end in ("first", "last")
        ]
        whole = layers + sum(less)
        stages = -(-whole // each) if each is not None else pp if is_single else 2 * pp
        base, more = divmod(whole, stages)
        counts = [base + (place < more) for place in range(stages)]
        counts[0] -= less[0]
        counts[-1] -= less[1]
        return tuple(max(count, 0) for count in counts)

    def _recompute(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        found = self.read.values.get("activation_checkpoint")
        mode = "none"
        if isinstance(found, Mapping):
            # The JSON has no name of the class, but each class has fields of its own.
            own = next((kind for name, kind in _POLICIES.items() if name in found), "full")
            mode = str(found.get("mode") or own)
        if mode not in ("none", "full"):
            yield ReviewFinding(
                code="approximated", severity="info", field=NAMES["recompute"],
                text=f"{mode.replace('_', ' ')} recomputation is predicted as that of attention",
            )  # fmt: skip
            mode = "selective"
        fields["recompute"] = mode
        layers = found.get("layers") if isinstance(found, Mapping) else None
        if mode == "full" and isinstance(layers, int) and layers > 0:
            fields["recompute_layers"] = layers

    def passes(self, fields: Mapping[str, Any], local: int, batch: int) -> Iterator[ReviewFinding]:
        """A pipeline that is filled and drained several times in a step."""
        rows = local * fields["dp"]
        if fields["pp"] > 1 and 0 < rows < batch and batch % rows == 0:
            yield ReviewFinding(
                code="pipeline_restarts", severity="warning", field=NAMES["micro_batch_size"],
                text=f"a step fills and drains the pipeline {batch // rows} times; the prediction is of one"
                f" pass with local_batch_size {batch // fields['dp']}",
            )  # fmt: skip
        if batch % rows and batch % (fields["micro_batch_size"] * fields["dp"]) == 0:
            yield ReviewFinding(
                code="batch_does_not_divide", severity="error", field=NAMES["global_batch_size"],
                text=f"{batch} is no multiple of {local} sequences on each of {fields['dp']} ranks",
            )  # fmt: skip


def _dtype(training: FileSection) -> str:
    found = training.text("mixed_precision_param", "bfloat16")
    ours = {theirs: name for name, theirs in DTYPES.items()}
    if found not in ours:
        raise unknown("is not predicted", found, ours, key="training.mixed_precision_param")
    return ours[found]


def _reduction(training: FileSection) -> Iterator[ReviewFinding]:
    if (found := training.text("mixed_precision_reduce", "float32")) != "float32":
        yield ReviewFinding(
            code="refused", severity="error", field="training.mixed_precision_reduce",
            text=f"TorchTitan reduces gradients in float32 alone, and refuses {found}",
        )  # fmt: skip


def _options(read: FileSection) -> dict[str, str]:
    """Async tensor parallelism, which older versions had in `parallelism`; moments in 16 bits."""
    sections = (("compile", "enable_async_tensor_parallel"), ("parallelism", "enable_async_tensor_parallel"))
    is_async = any(read.section(section).is_on(name) for section, name in sections)
    is_narrow = read.section("optimizer").text("implementation", "") == "fused_opt_states_bf16"
    return {
        "tp_comm_overlap": "on" if is_async else "off",
        **({"moment_dtype": "bf16"} if is_narrow else {}),
    }


def _is_compiled(read: FileSection) -> bool:
    """Whether layers are compiled; older versions had the switch in `training`."""
    for section, name in (("compile", "enable"), ("training", "compile")):
        if read.section(section).values.get(name) is not None:
            return read.section(section).is_on(name)
    return False
