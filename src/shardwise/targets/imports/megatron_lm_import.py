"""Import of Megatron-LM's arguments: the inverse of `megatron_lm.megatron_lm_flags`.

Logs have every argument as it was resolved; files of flags have the ones that were given, and the others have
Megatron-LM's defaults (`megatron/training/arguments.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardwise.cost import FP32_BYTES
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.model import (
    MODULES,
    OFFLOADED,
    Model,
    model_from_config,
    modules_of_layers,
    offloading_modules,
    set_text,
)
from shardwise.strategy import target_of
from shardwise.targets.imports.imported import (
    FileSection,
    ImportedRun,
    ReviewFinding,
    Supplied,
    assumed,
    chosen,
    ends_of,
    ignored,
    largest_of,
    require_devices,
    required,
)
from shardwise.targets.imports.megatron_bridge_text import bridge_values, is_bridge
from shardwise.targets.imports.megatron_lm_text import (
    flag_values,
    is_flags,
    is_log,
    layout_counts,
    log_values,
)
from shardwise.targets.megatron_fsdp import TARGET as FSDP
from shardwise.targets.megatron_lm import CP_COMM_TYPES, MAPPED_ORDER, OPTIMIZERS, OWN_ORDER
from shardwise.targets.megatron_lm_model import TARGET

NAMES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "optim_shard": "--use-distributed-optimizer",
    "param_shard": "--use-megatron-fsdp",
    "micro_batch_size": "--micro-batch-size",
    "sequence_parallel": "--sequence-parallel",
    "recompute": "--recompute-granularity",
    "recompute_modules": "--recompute-modules",
    "recompute_layers": "--recompute-num-layers",
    "offload": "--optimizer-cpu-offload",
    "first_stage_layers": "--pipeline-model-parallel-layout",
    "global_batch_size": "--global-batch-size",
    "seq_len": "--seq-length",
}
"""Fields of a strategy or a job, and the flag of each."""

FP8_RECIPES = {"delayed": "fp8", "tensorwise": "fp8-current", "blockwise": "fp8-block", "mxfp8": "mxfp8"}
"""Values of `--fp8-recipe` and our dtypes."""

_VOCAB_MULTIPLE = 128
"""Default of `--make-vocab-size-divisible-by`."""


def is_megatron_lm(text: str) -> bool:
    """Whether the text has arguments or flags of Megatron-LM, or a recipe, without Megatron-FSDP."""
    return (is_log(text) or is_flags(text) or is_bridge(text)) and not is_megatron_fsdp(text)


def is_megatron_fsdp(text: str) -> bool:
    """Whether the text has arguments or flags of Megatron-LM with Megatron-FSDP."""
    if is_log(text):
        return log_values(text).get("use_megatron_fsdp") is True
    if is_flags(text, "use-megatron-fsdp"):
        return True
    return not is_flags(text) and is_bridge(text) and bridge_values(text).get("use_megatron_fsdp") is True


def read_megatron_fsdp(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The same as `read_megatron_lm`, for the target with Megatron-FSDP."""
    return replace(read_megatron_lm(text, devices=devices, supplied=supplied), target=FSDP)


def read_megatron_lm(text: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that a log or flags describe, on `devices`. Raises ConfigError, with the name of the argument,
    for a value that cannot be used."""
    found, repeated = _values(text)
    arguments = FileSection(found)
    require_devices("world_size", arguments.integer("world_size"), devices)
    # The program follows the options of torchrun.
    processes = [str(found.get(name)).split()[0] for name in ("nnodes", "nproc_per_node")]
    if all(count.isdecimal() for count in processes):
        require_devices("--nnodes * --nproc-per-node", prod(map(int, processes)), devices)
    model = supplied.model or model_of(arguments)
    reading = _Reading(arguments, model, devices)
    fields, findings = reading.strategy()
    micro = arguments.integer("micro_batch_size")
    fields["micro_batch_size"] = required("--micro-batch-size", micro, "--micro-batch-size in the file")
    batch = arguments.integer("global_batch_size", fields["micro_batch_size"] * fields["dp"])
    findings += [
        ReviewFinding(
            code="repeated_key", severity="warning", field=flag, text="given twice: the last value counts"
        )
        for flag in repeated
    ]
    findings += _model_findings(arguments, supplied.model)
    moved = _moved_modules(arguments, model, fields)
    is_option = moved in target_of(TARGET).options["offload_modules"]
    return ImportedRun(
        target=TARGET,
        model=model,
        fields={**supplied.fields, **fields},
        seq_len=chosen("seq_length", arguments.integer("seq_length"), supplied.seq_len, "--seq-len"),
        global_batch_size=chosen(
            "global_batch_size", batch, supplied.global_batch_size, "--global-batch-size"
        ),
        dtype=_dtype(arguments),
        optimizer=_optimizer(arguments),
        profile={**_profile(arguments), **({"offload_modules": moved} if moved and not is_option else {})},
        options={**_options(arguments), **({"offload_modules": moved} if is_option else {})},
        names=NAMES,
        findings=(*findings, *_overlap_findings(arguments, fields), *arguments.misspelt()),
    )


def _values(text: str) -> tuple[dict[str, Any], list[str]]:
    """The values of arguments in the text, and flags that are repeated with another value."""
    if is_log(text):
        return log_values(text), []
    return flag_values(text) if is_flags(text) else (bridge_values(text), [])


@dataclass(frozen=True, slots=True)
class _Reading:
    """Arguments with the layers of the model, on a number of devices."""

    arguments: FileSection
    model: Model
    devices: int

    def strategy(self) -> tuple[dict[str, Any], list[ReviewFinding]]:
        """The fields of a strategy, without the micro-batch size."""
        read = self.arguments
        tp, pp = read.count("tensor_model_parallel_size"), read.count("pipeline_model_parallel_size")
        cp = read.count("context_parallel_size")
        if self.devices % (tp * pp * cp):
            raise ConfigError(
                "tp * pp * cp does not divide the devices", key=NAMES["tp"], found=f"{tp} * {pp} * {cp}",
                allowed=f"a divisor of the cluster's {self.devices} devices",
            )  # fmt: skip
        dp = self.devices // (tp * pp * cp)
        fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
        findings: list[ReviewFinding] = []
        for part in (
            self._pipeline,
            self._context,
            self._experts,
            self._states,
            self._recompute,
            self._offload,
        ):
            findings += part(fields)
        fields["sequence_parallel"] = tp > 1 and read.is_on("sequence_parallel")
        if tp == 1 and read.is_on("sequence_parallel"):
            findings.append(ignored("--sequence-parallel", "without tensor parallelism it is turned off"))
        fields["axis_order"] = MAPPED_ORDER if read.is_on("use_tp_pp_dp_mapping") else OWN_ORDER
        return fields, findings

    def _pipeline(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        read, layers, pp = self.arguments, self.model.layers, fields["pp"]
        layout = read.text("pipeline_model_parallel_layout")
        if layout:
            counts = layout_counts(layout, NAMES["first_stage_layers"])
            if len(counts) % pp:
                raise ConfigError(
                    "has a number of stages that is no multiple of the pipeline ranks",
                    key=NAMES["first_stage_layers"], found=str(len(counts)), allowed=f"multiples of {pp}",
                )  # fmt: skip
            vpp = len(counts) // pp
            ends, findings = ends_of(counts, layers, NAMES["first_stage_layers"])
            fields.update(ends if len(counts) > 1 else {})
            yield from findings
        else:
            vpp = self._chunks(pp)
            yield from self._uneven_ends(fields, pp, vpp)
        if pp > 1 and vpp > 1:
            fields.update(vpp=vpp, schedule="interleaved_1f1b")

    def _chunks(self, pp: int) -> int:
        """Model chunks of a pipeline rank."""
        read = self.arguments
        for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
            if (chunks := read.integer(name)) is not None:
                return chunks
        each = read.integer("num_layers_per_virtual_pipeline_stage")
        return 1 if each is None else max((self.model.layers + sum(self._ends_counted())) // (pp * each), 1)

    def _ends_counted(self) -> tuple[bool, bool]:
        """Whether the embedding and the loss each take the place of a layer."""
        first, last = (
            self.arguments.is_on(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")
        )
        return first, last

    def _uneven_ends(self, fields: dict[str, Any], pp: int, vpp: int) -> Iterator[ReviewFinding]:
        """Numbers of layers for the first and the last pipeline rank, where they are given."""
        read, layers = self.arguments, self.model.layers
        first = read.integer("decoder_first_pipeline_num_layers")
        last = read.integer("decoder_last_pipeline_num_layers")
        if first is None and last is None:
            ends = self._ends_counted()
            each, left = divmod(layers + sum(ends), pp * vpp)
            if pp > 1 and any(ends) and each and not left:
                fields.update(first_stage_layers=each - ends[0], last_stage_layers=each - ends[1])
            elif pp > 1 and left:
                yield ReviewFinding(
                    code="layers_lost", severity="error", field="--num-layers",
                    text=f"{layers} layers do not divide over {pp * vpp} stages: Megatron-LM refuses them "
                    "without --pipeline-model-parallel-layout; the prediction is of an even split",
                )  # fmt: skip
            return
        for name, value in (("first_stage_layers", first), ("last_stage_layers", last)):
            if value is not None:
                fields[name] = value // vpp

    def _context(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        found = self.arguments.values.get("cp_comm_type") or "p2p"
        name = str(found[0] if isinstance(found, list) and found else found)
        kinds = {theirs: ours for ours, theirs in CP_COMM_TYPES.items()}
        if fields["cp"] == 1:
            return
        fields["cp_kind"] = kinds.get(name, "ring")
        if name not in kinds:
            yield ReviewFinding(
                code="approximated", severity="info", field="--cp-comm-type",
                text=f"{name} is predicted as {CP_COMM_TYPES['ring']}",
            )  # fmt: skip

    def _experts(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        read = self.arguments
        ep = read.count("expert_model_parallel_size")
        if self.model.experts is None:
            if ep > 1:
                yield ignored(NAMES["ep"], "the model has no experts")
            return
        if fields["tp"] > 1 and not read.is_on("sequence_parallel"):
            yield ReviewFinding(
                code="refused", severity="error", field=NAMES["sequence_parallel"],
                text="missing: Megatron-LM does not train experts with tensor parallelism without it",
            )  # fmt: skip
        fields["ep"] = ep
        fields["etp"] = read.count("expert_tensor_parallel_size", fields["tp"])

    def _states(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        read, copies = self.arguments, fields["dp"] * fields["cp"]
        instances = read.count("num_distributed_optimizer_instances")
        if copies % instances:
            raise ConfigError(
                "does not divide dp * cp", key="--num-distributed-optimizer-instances",
                found=str(instances), allowed=f"divisors of {copies}",
            )  # fmt: skip
        shard = copies // instances
        if read.is_on("use_megatron_fsdp"):
            sharded = read.text("data_parallel_sharding_strategy", "optim_grads_params")
            whole = copies if read.text("outer_dp_sharding_strategy") == "optim" else shard
            fields["param_shard"] = shard if sharded == "optim_grads_params" else 1
            fields["grad_shard"] = shard if sharded.startswith("optim_grads") else 1
            fields["optim_shard"] = whole if sharded.startswith("optim") else 1
        elif read.is_on("use_torch_fsdp2"):
            fields["zero_stage"] = 3
        elif read.is_on("use_distributed_optimizer"):
            fields["optim_shard"] = shard
        elif instances > 1:
            yield ignored("--num-distributed-optimizer-instances", "needs --use-distributed-optimizer")

    def _recompute(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        read = self.arguments
        granularity = read.text("recompute_granularity")
        if granularity in ("", "None"):
            granularity = "selective" if read.is_on("recompute_activations") else "none"
        if granularity not in ("none", "selective", "full"):
            raise unknown("is unknown", granularity, ("selective", "full"), key=NAMES["recompute"])
        fields["recompute"] = granularity
        if granularity == "selective":
            yield from self._modules(fields)
        if granularity != "full":
            if read.integer("recompute_num_layers") is not None:
                yield ignored("--recompute-num-layers", "it counts only with --recompute-granularity full")
            return
        stages = fields["pp"] * fields.get("vpp", 1)
        largest = largest_of(self.model.layers, stages, fields)
        layers = read.integer("recompute_num_layers")
        if read.text("recompute_method") == "uniform" or layers is None:
            fields["recompute_layers"] = largest
            return
        fields["recompute_layers"] = min(layers, largest)
        if layers > largest:
            yield ignored(
                "--recompute-num-layers",
                f"{layers} layers, but a stage has {largest}; Megatron-LM accepts it",
            )

    def _modules(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        """The named modules that are recomputed: `core_attn` where none are named."""
        given = self.arguments.values.get("recompute_modules")
        names = ["core_attn"] if given is None else given if isinstance(given, list) else str(given).split()
        flag = NAMES["recompute_modules"]
        for name in names:
            if name not in MODULES:
                raise unknown("is unknown", name, MODULES, key=flag)
        if self.arguments.is_on("moe_layer_recompute"):
            names = [*names, "moe"]
        own = modules_of_layers(kind.operators for kind in self.model.kinds)
        for name in names:
            if name not in own:
                yield ignored(flag, f"the model has no {name}")
        is_fused = self.arguments.text("transformer_impl", "transformer_engine") != "local"
        if "layernorm" in names and "mla_up_proj" not in own and is_fused:
            yield ReviewFinding(
                code="approximated", severity="info", field=flag,
                text="Transformer Engine computes the norms before attention and before a dense MLP with the"
                " next product, and keeps their outputs; the prediction drops them",
            )  # fmt: skip
        fields["recompute_modules"] = set_text(name for name in names if name in own)
        if not fields["recompute_modules"]:
            fields["recompute"] = "none"

    def _offload(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        read = self.arguments
        states = read.is_on("optimizer_cpu_offload")
        activations = read.is_on("cpu_offloading")
        kinds = {(False, False): "none", (True, False): "optimizer", (False, True): "activations"}
        fields["offload"] = kinds.get((states, activations), "both")
        if activations:
            yield ReviewFinding(
                code="approximated", severity="info", field="--cpu-offloading-num-layers",
                text="the prediction offloads all activations that are saved",
            )  # fmt: skip
        yield from self._moved(fields)

    def _moved(self, fields: dict[str, Any]) -> Iterator[ReviewFinding]:
        """What is wrong with modules whose saved tensors go to the host."""
        if not self.arguments.is_on("fine_grained_activation_offloading"):
            if self.arguments.values.get("offload_modules"):
                yield ignored(OFFLOAD_FLAG, "--fine-grained-activation-offloading is off")
            return
        names = _offload_modules(self.arguments)
        if fields.get("recompute") == "full":
            yield ignored(OFFLOAD_FLAG, "layers that are recomputed save nothing that could be moved")
        own = offloading_modules(kind.operators for kind in self.model.kinds)
        for name in names:
            if name not in own:
                yield ignored(OFFLOAD_FLAG, f"{name} moves nothing of this model: it has no such module, or"
                              " Transformer Engine computes it with the next one")  # fmt: skip
        if "attn_proj" in names and "core_attn" not in names:
            yield _refused(OFFLOAD_FLAG, "Megatron-LM refuses attn_proj without core_attn")
        if "moe" in str(fields.get("recompute_modules", "")).split("+") and {"expert_fc1", "moe_act"} & set(
            names
        ):
            yield _refused(OFFLOAD_FLAG, "Megatron-LM refuses modules of experts that are recomputed")
        for name, default in (("min_offloaded_tensor_size", 1 << 20), ("activation_offload_fraction", 1),
                              ("delta_offload_bytes_across_pp_ranks", 0)):  # fmt: skip
            if self.arguments.values.get(name) not in (None, default, float(default)):
                yield ReviewFinding(
                    code="approximated", severity="info", field=f"--{name.replace('_', '-')}",
                    text=f"predicted as {default}",
                )  # fmt: skip


def model_of(read: FileSection) -> Model:
    """The model that the arguments describe. Raises ConfigError where they do not, or where `--model` is
    needed."""
    for name in ("multi_latent_attention", "mtp_num_layers"):
        if read.values.get(name):
            raise ConfigError(
                "is not read from flags", key=f"--{name.replace('_', '-')}", allowed="--model M"
            )
    hidden = required("--hidden-size", read.integer("hidden_size"), "--model M")
    heads = required("--num-attention-heads", read.integer("num_attention_heads"), "--model M")
    layers = required("--num-layers", read.integer("num_layers"), "--model M")
    gated = read.is_on("swiglu")
    bias = read.is_on("add_bias_linear", not read.is_on("disable_bias_linear"))
    positions = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
    kind = read.text("position_embedding_type", "learned_absolute")
    if read.is_on("use_rotary_position_embeddings"):
        kind = "rope"
    config: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "ffn": read.count("ffn_hidden_size", _ffn(hidden, gated=gated)),
        "heads": heads,
        "kv_heads": read.count("num_query_groups", heads) if _has_groups(read) else heads,
        "head_dim": read.count("kv_channels", max(hidden // heads, 1)),
        "vocab": _vocabulary(read),
        "seq_len": read.count("max_position_embeddings", read.count("seq_length")),
        "gated": gated,
        "bias": bias,
        "qkv_bias": bias or read.is_on("add_qkv_bias"),
        "norm": "rmsnorm" if read.text("normalization") == "RMSNorm" else "layernorm",
        "positions": positions.get(kind, "rope"),
        "tied": not read.is_on("untie_embeddings_and_output_weights"),
        "dropout": _share(read, "hidden_dropout"),
        **_window(read),
        **_experts_config(read, layers),
    }
    return model_from_config(config, name=f"{layers} layers of {hidden}")


def _ffn(hidden: int, *, gated: bool) -> int:
    """Megatron-LM's default width of the MLP."""
    return int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden


def _has_groups(read: FileSection) -> bool:
    return read.is_on("group_query_attention", read.integer("num_query_groups") is not None)


def _share(read: FileSection, name: str) -> float:
    found = read.values.get(name, 0.1)
    return float(found) if isinstance(found, int | float) else 0.1


def _vocabulary(read: FileSection) -> int:
    """The vocabulary as it is padded for tensor parallelism."""
    padded = read.integer("padded_vocab_size")
    if padded is not None:
        return padded
    vocab = required("--vocab-size", read.integer("vocab_size"), "--model M")
    multiple = read.count("make_vocab_size_divisible_by", _VOCAB_MULTIPLE)
    multiple *= read.count("tensor_model_parallel_size")
    return -(-vocab // multiple) * multiple


def _window(read: FileSection) -> dict[str, int]:
    found = read.values.get("window_size")
    if found is None:
        return {}
    if read.values.get("window_attn_skip_freq") is not None:
        raise ConfigError("is not read from flags", key="--window-attn-skip-freq", allowed="--model M")
    before = str(found).strip("()[]").split(",")[0]
    if not before.isdigit():
        raise ConfigError("is no window", key="--window-size", found=short_repr(found), allowed="4095,0")
    return {"window": int(before) + 1}


def _experts_config(read: FileSection, layers: int) -> dict[str, Any]:
    experts = read.integer("num_experts", read.integer("num_moe_experts"))
    if experts is None:
        return {}
    found: dict[str, Any] = {"experts": experts, "top_k": read.count("moe_router_topk", 2)}
    if (width := read.integer("moe_ffn_hidden_size")) is not None:
        found["expert_ffn"] = width
    if (shared := read.integer("moe_shared_expert_intermediate_size")) is not None:
        found["shared_ffn"] = shared
    pattern = _pattern(read.values.get("moe_layer_freq", 1), layers)
    leading = pattern.index(1) if 1 in pattern else layers
    if pattern != [0] * leading + [1] * (layers - leading):
        raise ConfigError("is not read from flags", key="--moe-layer-freq", allowed="--model M")
    return {**found, "dense_layers": leading}


def _pattern(found: object, layers: int) -> list[int]:
    """1 for layers with experts, from a frequency, a list or text such as `[0]*3+[1]*24`."""
    if isinstance(found, int):
        return [int(layer % max(found, 1) == 0) for layer in range(layers)]
    if isinstance(found, list):
        return [int(one) for one in found]
    pattern: list[int] = []
    for term in str(found).replace("(", "").replace(")", "").split("+"):
        value, _, times = term.strip().partition("*")
        inner = [one.strip() for one in value.strip().strip("[]").split(",")]
        if not all(one in ("0", "1") for one in inner) or not (times or "1").strip().isdigit():
            raise ConfigError(
                "is no pattern", key="--moe-layer-freq", found=short_repr(found), allowed="--model M"
            )
        pattern += [int(one) for one in inner] * min(int(times or "1"), layers)
    return pattern


def _model_findings(read: FileSection, model: Model | None) -> list[ReviewFinding]:
    """Sizes in which the supplied model differs from the file."""
    if model is None:
        return []
    sizes = (
        ("num_layers", model.layers),
        ("hidden_size", model.hidden),
        ("num_attention_heads", model.heads),
    )
    return [
        ReviewFinding(
            code="other_model", severity="warning", field=f"--{name.replace('_', '-')}",
            text=f"{found} in the file; --model has {size}, which the prediction is of",
        )
        for name, size in sizes
        if (found := read.integer(name)) is not None and found != size
    ]  # fmt: skip


def _dtype(read: FileSection) -> str:
    """The number format. Raises ConfigError for a recipe that is not predicted."""
    for kind, recipes, default in (("fp8", FP8_RECIPES, "delayed"), ("fp4", {"nvfp4": "nvfp4"}, "nvfp4")):
        found = read.text(f"{kind}_format") or read.text(kind)
        if found and found != "None":
            recipe = read.text(f"{kind}_recipe", default)
            if recipe not in recipes:
                allowed = ", ".join(recipes)
                raise ConfigError("is not predicted", key=f"--{kind}-recipe", found=recipe, allowed=allowed)
            return recipes[recipe]
    return "bf16" if read.is_on("bf16") else "fp16" if read.is_on("fp16") else "fp32"


def _optimizer(read: FileSection) -> str:
    found = read.text("optimizer", "adam")
    ours = {theirs: name for name, theirs in OPTIMIZERS.items()} | {"muon": "muon", "dist_muon": "muon"}
    if found not in ours:
        raise unknown("is not predicted", found, ours, key="--optimizer")
    return ours[found]


def _profile(read: FileSection) -> dict[str, Any]:
    """Fields of the software profile that the flags change."""
    changed: dict[str, Any] = {}
    if not _overlaps(read):
        changed |= {"data_overlap": 0.0, "state_overlap": 0.0}
    if _dtype(read) == "fp16" and not read.is_on("accumulate_allreduce_grads_in_fp32"):
        changed["reduce_in_fp32"] = False  # in the dtype of the parameters
    if _is_precise(read):
        moments = _moments(read)
        changed["moment_bytes"] = sum(_MOMENT_BYTES[dtype] for dtype in moments) / len(moments)
        has_remainders = _dtype(read) == "bf16" and not read.is_on("use_megatron_fsdp")
        changed["master_bytes"] = 2.0 if has_remainders else FP32_BYTES
    if read.text("attention_backend", "auto").removeprefix("AttnBackend.") in ("unfused", "local"):
        changed["attention"] = ()
    return changed


def _cuda_graph(read: FileSection) -> str:
    """The value of the option `cuda_graph`: graphs of the whole iteration, of modules of layers, or none."""
    kind = read.text("cuda_graph_impl", "none")
    if kind == "full_iteration":
        return kind
    # `cuda_graph_scope` is the name of before 0.18.
    given = read.values.get("cuda_graph_modules", read.values.get("cuda_graph_scope", ""))
    scope = re.findall(r"[a-z_]+", str(given))
    if kind == "local" and "full_iteration" in scope:
        return "full_iteration"
    return "modules" if kind in ("local", "transformer_engine") and "moe_router" in scope else "none"


def _options(read: FileSection) -> dict[str, str]:
    """The options that the flags set, but for moments of two sizes."""
    found = {"tp_comm_overlap": "on" if read.is_on("tp_comm_overlap") else "off"}
    if read.is_on("overlap_moe_expert_parallel_comm"):
        found["ep_overlap"] = "on"
    graphs = _cuda_graph(read)
    if graphs != "none":
        found["cuda_graph"] = graphs
    if _dtype(read) not in ("fp16", "fp32"):
        of_fsdp = read.text("megatron_fsdp_main_grads_dtype", "fp32") == "bf16"
        is_narrow = of_fsdp if read.is_on("use_megatron_fsdp") else read.is_on("grad_reduce_in_bf16")
        found["grad_reduce_dtype"] = "bf16" if is_narrow else "fp32"
    if read.is_on("fp8_param_gather") and _dtype(read) in FP8_RECIPES.values():
        found["fp8_param_gather"] = "on"
    has_narrow_moments = _is_precise(read) and set(_moments(read)) == {"bf16"}
    if has_narrow_moments and _dtype(read) == "bf16" and _optimizer(read) == "adamw":
        found["moment_dtype"] = "bf16"
    return found


OFFLOAD_FLAG = "--offload-modules"


def _offload_modules(read: FileSection) -> list[str]:
    """The modules of the flag. ConfigError for an unknown one."""
    given = read.values.get("offload_modules")
    names = [] if given is None else given if isinstance(given, list) else str(given).split()
    for name in names:
        if name not in OFFLOADED:
            raise unknown("is unknown", name, OFFLOADED, key=OFFLOAD_FLAG)
    return [str(name) for name in names]


def _moved_modules(read: FileSection, model: Model, fields: Mapping[str, Any]) -> str:
    """The modules that move tensors, as a set; empty where none do."""
    if not read.is_on("fine_grained_activation_offloading") or fields.get("recompute") == "full":
        return ""
    names = _offload_modules(read)
    own = offloading_modules(kind.operators for kind in model.kinds)
    return "+".join(name for name in own if name in names)


def _refused(field: str, text: str) -> ReviewFinding:
    return ReviewFinding(code="refused", severity="error", field=field, text=text)


_MOMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
"""Values of `--exp-avg-dtype` and their bytes."""

_LOGGED = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}


def _is_precise(read: FileSection) -> bool:
    """Whether states on the device have the dtypes of the flags."""
    return read.is_on("use_precision_aware_optimizer") and not read.is_on("optimizer_cpu_offload")


def _moments(read: FileSection) -> tuple[str, ...]:
    """The dtypes of both moments."""
    found = (read.text(f"exp_avg{kind}_dtype", "fp32") for kind in ("", "_sq"))
    named = (_LOGGED.get(dtype, dtype) for dtype in found)
    return tuple(dtype if dtype in _MOMENT_BYTES else "fp32" for dtype in named)


def _overlaps(read: FileSection) -> bool:
    """Whether gradients are reduced during the backward pass; Megatron-FSDP turns it on."""
    return read.is_on("overlap_grad_reduce") or read.is_on("use_megatron_fsdp")


def _overlap_findings(read: FileSection, fields: Mapping[str, Any]) -> Iterator[ReviewFinding]:
    if fields["dp"] * fields["cp"] > 1 and not _overlaps(read):
        yield ReviewFinding(
            code="no_overlap", severity="warning", field="--overlap-grad-reduce",
            text="missing: gradients are reduced after the backward pass, not during it",
        )  # fmt: skip
    if read.integer("global_batch_size") is None:
        yield assumed("--global-batch-size", "missing: one micro-batch for each data-parallel rank")
