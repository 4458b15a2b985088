"""Turns a measured row into a case: the problem (model, cluster, job, software) and its candidate strategies.

`layouts_of` lists the strategies that the row may have run, `model_of` builds its model, and `CaseBuilder`
joins them into a `Case`. Fixed rules fill blank fields, and `Case.assumed` lists each of them. The
micro-batch size, the recomputation and the sharding that a source does not state become several candidates.
The prediction takes the fastest candidate that fits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Final

from shardwise.accuracy.rows import Fault, Row
from shardwise.accuracy.spellings import (
    bytes_per_s_of_nodes,
    catalogue_model,
    counted_devices,
    device_named,
    dtype_named,
    inter_node_bytes_per_s,
    profile_named,
)
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.model import (
    Model,
    catalogue_entry,
    lora_of_text,
    model_from_config,
    parameters,
    with_lora,
)
from shardwise.search import default_job
from shardwise.strategy import (
    PROFILES,
    RECOMPUTES,
    RULES,
    SCHEDULES,
    Calibration,
    Job,
    Optimizer,
    Profile,
    Strategy,
    StrategyTable,
    TimeFactors,
    complete,
    first_broken,
    kind_of_profile,
)

Value = int | str | bool
Assumed = tuple[str, ...]
Choice = Mapping[str, Value]

# Candidate strategies of a row
MAX_STAGES: Final = 1024
"""Most pipeline stages (pp * vpp) of a row that is evaluated."""

MAX_MICRO_BATCH: Final = 32
"""Largest micro-batch size among the candidates of a row that states none."""

MICRO_BATCH, SHARDING, RECOMPUTE, VIRTUAL_STAGES = "micro_batch", "zero_stage", "recompute", "vpp"
INTERLEAVING: Final = "megatron"
"""Kind of software whose rows leave virtual stages open where they do not state them."""

FASTEST: Final = "the fastest that fits"


def layouts_of(row: Row, problem: Problem) -> tuple[StrategyTable, tuple[str, ...]]:
    """Every legal strategy that the row may have run, and the assumptions.

    Raises ConfigError where the row states something impossible."""
    assumed: list[str] = []
    fields = _stated(row, problem, assumed)
    choices = [
        _micro_batches(row, int(fields["dp"]), problem, assumed),
        _expert_degrees(row, problem, fields, assumed),
        _shardings(row, problem, fields, assumed),
    ]
    pipelines = _pipelines(row, problem, assumed)
    several = [
        (pipeline, *chosen)
        for pipeline in pipelines
        for chosen in itertools.product(*choices, _recomputes(row, problem, {**fields, **pipeline}))
    ]
    if not row.recompute.split():
        assumed.append(f"{RECOMPUTE}: {FASTEST}")
    table = StrategyTable.of(_possible(problem, fields, several))
    broken = first_broken(table, problem.limits, RULES)
    if (broken >= 0).all():
        rule = RULES[int(broken[0])]
        raise ConfigError(f"breaks the rule that {rule.text}", key="strategy")
    return table if (broken < 0).all() else table.take(broken < 0), tuple(assumed)


def _possible(problem: Problem, fields: Choice, several: Sequence[Sequence[Choice]]) -> list[Strategy]:
    """The strategies of these choices that are consistent. ConfigError where none is."""
    experts = problem.model.experts
    found: list[Strategy] = []
    fault = ConfigError("leaves no choice", key="strategy")
    for chosen in several:
        try:
            strategy = complete(
                {name: value for part in (fields, *chosen) for name, value in part.items()},
                devices=problem.cluster.devices,
                layers=problem.model.layers,
                experts=None if experts is None else experts.experts,
                global_batch_size=problem.job.global_batch_size,
            )
        except ConfigError as error:
            fault = error
        else:
            found.append(strategy)
    if not found:
        raise fault
    return found


def _stated(row: Row, problem: Problem, assumed: list[str]) -> dict[str, Value]:
    """The fields that all strategies of the row share."""
    degrees = {name: getattr(row, name) or 1 for name in ("tp", "pp", "cp")}
    devices, each = problem.cluster.devices, degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = row.dp or max(devices // each, 1)
    if each * dp != devices:
        found = " * ".join(str(degree) for degree in (*degrees.values(), dp))
        raise ConfigError(
            "tp * pp * cp * dp is not the number of devices", key="gpus", found=found, allowed=str(devices)
        )
    fields: dict[str, Value] = {**degrees, "dp": dp}
    if problem.model.experts is not None:
        fields["etp"] = 1
    elif (row.ep or 1) > 1:
        raise ConfigError("splits experts of a dense model", key="ep", found=str(row.ep))
    return {**fields, "sequence_parallel": _sequence_parallel(row, problem, assumed)}


def _pipelines(row: Row, problem: Problem, assumed: list[str]) -> Sequence[Choice]:
    """The schedules and the layers of the end stages that the row may have run.

    Virtual stages that a row leaves open, where its software interleaves, are every number that divides the
    layers evenly."""
    layers, pp = problem.model.layers, row.pp or 1
    if not _is_open(row, problem.profile):
        stated: list[str] = []
        found = {**_schedule(row, stated), **_stages(row, layers, stated)}
        assumed += stated
        return [found]
    assumed.append(f"{VIRTUAL_STAGES}: {FASTEST}")
    counts = [1, *(vpp for vpp in range(2, layers // pp + 1) if layers % (pp * vpp) == 0)]
    rows = [replace(row, vpp=vpp) for vpp in counts if pp * vpp <= MAX_STAGES]
    return [{**_schedule(each, []), **_stages(each, layers, [])} for each in rows]


def _is_open(row: Row, profile: Profile) -> bool:
    """Whether the row leaves the number of virtual stages open: it has neither `vpp` nor a schedule, and its
    level does not say that it is complete."""
    is_blank = row.vpp is None and row.schedule == "" and row.level.casefold() != "complete"
    return is_blank and (row.pp or 1) > 1 and kind_of_profile(profile.name) == INTERLEAVING


def _schedule(row: Row, assumed: list[str]) -> Choice:
    pp, vpp = row.pp or 1, row.vpp or 1
    if pp == 1:
        return {}
    if pp * vpp > MAX_STAGES:
        raise ConfigError(
            "has too many pipeline stages", key="pp", found=f"{pp} * {vpp}", allowed=f"at most {MAX_STAGES}"
        )
    if row.schedule in SCHEDULES:
        looped = row.schedule in ("zb_v", "dualpipe_v")
        return {"schedule": row.schedule, "vpp": row.vpp or 2 if looped else vpp}
    if row.schedule:
        raise unknown("is not a known schedule", row.schedule, SCHEDULES, key="schedule")
    name = "interleaved_1f1b" if vpp > 1 else "1f1b"
    assumed.append(f"schedule: {name}")
    return {"schedule": name, "vpp": vpp}


def _stages(row: Row, layers: int, assumed: list[str]) -> Choice:
    """Decoder layers of the first and the last stage.

    They follow from stated counts, or from more stages than layers: then an end stage has only the embedding
    or the head."""
    stages = (row.pp or 1) * (row.vpp or 1)
    if stages == 1:
        return {}
    if row.stage_layers:
        counts = _counts(row, stages, layers, assumed)
        return {"first_stage_layers": counts[0], "last_stage_layers": counts[-1]}
    if stages <= layers:
        return {}
    if stages > layers + 2:
        raise ConfigError("is more stages than layers", key="pp", found=f"{stages} of {layers} layers")
    assumed.append("stage_layers: one layer per stage, only the head on the last")
    if stages == layers + 2:
        assumed[-1] = "stage_layers: one layer per stage, only the embedding and the head on the end stages"
    return {"first_stage_layers": 0 if stages == layers + 2 else 1, "last_stage_layers": 0}


def _counts(row: Row, stages: int, layers: int, assumed: list[str]) -> list[int]:
    """Decoder layers per stage from counts joined by `/`: one for each stage, or for each rank of a pipeline.

    Where the counts have more units than layers, at most two extra units come before the layers (the
    embedding and the operator after it). The other extra units come after the layers."""
    text, ranks = row.stage_layers, row.pp or 1
    if not re.fullmatch(r"\d{1,5}(/\d{1,5})*", text):
        raise ConfigError("is not counts joined by /", key="stage_layers", found=short_repr(text))
    units = [int(unit) for unit in text.split("/")]
    total = sum(units)
    if len(units) not in (stages, ranks):
        raise ConfigError(
            "needs one count per stage", key="stage_layers", found=f"{len(units)}",
            allowed=f"{stages}, or {ranks}, one per rank" if ranks < stages else f"{stages}",
        )  # fmt: skip
    if len(units) < stages:
        assumed.append("stage_layers: those of the first and last rank differ in its outermost stage")
        return _of_ranks(units, stages // ranks, layers)
    if total < layers:
        raise ConfigError(
            "leaves out layers", key="stage_layers", found=f"{total}", allowed=f"{layers} or more"
        )
    counts = units
    if total > layers:
        before = min(2, total - layers)
        bounds = [min(max(bound - before, 0), layers) for bound in itertools.accumulate(units, initial=0)]
        counts = [after - start for start, after in itertools.pairwise(bounds)]
        assumed.append(f"stage_layers: layers {'/'.join(map(str, counts))} of {total} units")
    middle = counts[1:-1]
    if middle and max(middle) - min(middle) > 1:
        assumed.append("stage_layers: middle stages have equal layers")
    return counts


def _of_ranks(units: Sequence[int], vpp: int, layers: int) -> list[int]:
    """Decoder layers of the first stage, of every middle one, and of the last, from the counts of ranks with
    `vpp` stages each. ConfigError where such stages are not possible."""
    inner = units[1:-1] or units[:1]
    middle = -(-max(inner) // vpp)
    ends = [count - (vpp - 1) * middle for count in (units[0], units[-1])]
    if sum(units) != layers or min(ends) < 0 or max(inner) - min(inner) > 1:
        raise ConfigError(
            "are not layers of ranks with equal stages between the ends", key="stage_layers",
            found="/".join(map(str, units)), allowed=f"{layers} layers in all",
        )  # fmt: skip
    return [ends[0], middle, ends[1]]


def _sequence_parallel(row: Row, problem: Problem, assumed: list[str]) -> bool:
    if (row.tp or 1) == 1:
        return False
    notes = row.notes.casefold()
    if "no sequence parallel" in notes:
        return False
    if "sequence parallel" in notes:
        return True
    on = problem.profile.sequence_parallel
    assumed.append(f"sequence_parallel: {'on' if on else 'off'}, the default")
    return on


def _micro_batches(row: Row, dp: int, problem: Problem, assumed: list[str]) -> Sequence[Choice]:
    batch = problem.job.global_batch_size
    if batch % dp:
        raise ConfigError(
            "is not divisible by dp", key="global_batch", found=str(batch), allowed=f"multiples of {dp}"
        )
    if row.micro_batch is not None:
        return [{"micro_batch_size": row.micro_batch}]
    assumed.append(f"{MICRO_BATCH}: {FASTEST}")
    largest = min(batch // dp, MAX_MICRO_BATCH)
    return [{"micro_batch_size": size} for size in range(1, largest + 1) if batch // dp % size == 0]


def _expert_degrees(row: Row, problem: Problem, fields: Choice, assumed: list[str]) -> Sequence[Choice]:
    experts = problem.model.experts
    if experts is None:
        return [{}]
    if row.ep is not None:
        return [{"ep": row.ep}]
    ranks = int(fields["tp"]) * int(fields["cp"]) * int(fields["dp"])
    assumed.append(f"ep: {FASTEST}")
    powers = [2**power for power in range(11)]
    return [{"ep": ep} for ep in powers if ranks % ep == 0 and experts.experts % ep == 0]


def _shardings(row: Row, problem: Problem, fields: Choice, assumed: list[str]) -> Sequence[Choice]:
    text = row.zero_stage
    if not text:
        stages = problem.profile.zero_stages
        if len(stages) > 1:
            assumed.append(f"{SHARDING}: {FASTEST}")
        elif stages[0]:
            assumed.append(f"{SHARDING}: {stages[0]}, the default")
        return [{"zero_stage": stage} for stage in stages]
    stage = int(text[0]) if text[0] in "0123" else 3 if "FSDP" in text.upper() else None
    if stage is None:
        raise ConfigError(
            "is not a sharding", key="zero_stage", found=short_repr(text), allowed="0 to 3, or FSDP"
        )
    degree = re.search(r"FSDP\s+(\d{1,9})", text, re.IGNORECASE)
    ranks = int(fields["dp"]) * int(fields["cp"])
    if degree is None or int(degree.group(1)) == 0 or ranks % int(degree.group(1)):
        return [{"zero_stage": stage}]
    return [{"zero_stage": stage, "dp_shard": int(degree.group(1))}]


def _recomputes(row: Row, problem: Problem, fields: Choice) -> Sequence[Choice]:
    """The stated recomputation, else every kind that the software has.

    Candidates of full recomputation recompute 1/8, 2/8, ... 8/8 of the layers of a stage."""
    words = row.recompute.casefold().split()
    if not words:
        has = problem.profile.recomputes
        whole: list[Choice] = [{"recompute": choice} for choice in has if choice != "full"]
        if "full" not in has:
            return whole
        most = -(-problem.model.layers // (int(fields["pp"]) * int(fields.get("vpp", 1))))
        counts = sorted({max(most * eighths // 8, 1) for eighths in range(1, 9)})
        full: list[Choice] = [{"recompute": "full", "recompute_layers": count} for count in counts]
        return [*whole, *full]
    if words[0] not in RECOMPUTES:
        raise unknown("is not a recompute", row.recompute, RECOMPUTES, key="recompute")
    return [{"recompute": words[0]}]


# The model of a row
GATED: Final = ("llama", "qwen", "deepseek", "oss", "mistral", "mixtral", "gemma", "phi")
"""Families whose MLPs have three matrices, RMS norms, rotary positions, no biases and no dropout."""

MPT: Final = ("mpt",)
"""ALiBi, plain MLPs, no biases, no dropout, tied embeddings (MosaicML llm-foundry)."""

NEMOTRON: Final = ("nemotron",)
"""Squared-ReLU plain MLPs, rotary positions, grouped queries of 8, untied, no biases (Nemotron-4 report)."""

KIMI_K2: Final = {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Values of Kimi K2's public config that differ from DeepSeek-V3's; the architecture is the same."""

DEFAULT_VOCAB: Final = 51200
"""Size of GPT-2's vocabulary as Megatron-LM pads it for tensor parallelism of degree 8."""

SIZES: Final = (
    "model_name", "arch", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "experts",
    "topk",
)  # fmt: skip
"""Columns that determine the model."""

CONFIG_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "vocab": ("vocab_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "topk": ("num_experts_per_tok", "experts_per_token"),
}
"""Keys of public configs for the columns of a mixture of experts."""


def model_of(row: Row) -> tuple[Model, tuple[str, ...]]:
    """The model of a row, and the assumptions. ConfigError where the row does not determine a model."""
    if row.arch.casefold() == "moe" or (row.experts or 1) > 1:
        return _expert_model(row)
    if any(getattr(row, key) is None for key in ("layers", "hidden", "heads")):
        return _public_model(row)
    config, assumed = _plain_config(row)
    return model_from_config(config, name=_name(row)), tuple(assumed)


def _name(row: Row) -> str:
    return row.model_name or "model"


def _has(row: Row, words: tuple[str, ...]) -> bool:
    name = row.model_name.casefold()
    return any(word in name for word in words)


def _plain_config(row: Row) -> tuple[dict[str, Any], list[str]]:
    """The row's sizes as a config of plain dimensions, with the defaults of its family."""
    assumed = []
    if row.vocab is None:
        assumed.append(f"vocab: {DEFAULT_VOCAB}")
    is_gated = _has(row, GATED)
    ffn = row.ffn
    if ffn is None:
        if is_gated:
            raise ConfigError("is not given, and a gated MLP has no default width", key="ffn")
        ffn = 4 * int(row.hidden or 0)
        assumed.append("ffn: 4 * hidden")
    config: dict[str, Any] = {
        "layers": row.layers,
        "hidden": row.hidden,
        "ffn": ffn,
        "heads": row.heads,
        "kv_heads": row.kv_heads or row.heads,
        "vocab": row.vocab or DEFAULT_VOCAB,
        "seq_len": row.seq_len,
    }
    if is_gated:
        config |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
                   "dropout": 0.0, "qkv_bias": _has(row, ("qwen2",))}  # fmt: skip
    elif _has(row, NEMOTRON):
        if row.kv_heads is None:
            assumed.append("kv_heads: 8")
        config |= {"positions": "rope", "bias": False, "tied": False, "dropout": 0.0,
                   "kv_heads": row.kv_heads or 8}  # fmt: skip
    elif _has(row, MPT):
        config |= {"positions": "none", "bias": False, "dropout": 0.0}
    return config, assumed


def _public_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A dense model without sizes: the catalogue's model whose name the row's model name contains."""
    known = catalogue_model(row.model_name)
    if known is None:
        missing = [key for key in ("layers", "hidden", "heads") if getattr(row, key) is None]
        raise ConfigError(
            f"{', '.join(missing)} not given, and the model is not a known one", key="model_name",
            found=short_repr(row.model_name),
        )  # fmt: skip
    model = model_from_config(catalogue_entry(known).config, name=_name(row))
    return model, (f"model: sizes of {known}'s public config",)


def _expert_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A mixture of experts: the public config of a known model with the row's sizes, else the row's sizes
    alone."""
    name = row.model_name.casefold()
    is_kimi = "kimi" in name
    known = "deepseek-v3" if is_kimi else catalogue_model(row.model_name)
    if known is None:
        return _plain_expert_model(row)
    config: dict[str, Any] = dict(catalogue_entry(known).config)
    assumed = [f"model: fields without a column are from {known}'s public config"]
    if is_kimi:
        config |= KIMI_K2
    for column, keys in CONFIG_KEYS.items():
        value = getattr(row, column)
        config |= {key: value for key in keys if key in config and value is not None}
    if "w/o mtp" in name:
        config["num_nextn_predict_layers"] = 0
    if row.layers is not None and row.layers != config.get("num_hidden_layers"):
        config["num_hidden_layers"] = row.layers
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(int(config["first_k_dense_replace"]), 1)
            config["num_nextn_predict_layers"] = 0
            assumed.append("model: truncated, so one layer is dense and there is no extra prediction module")
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: row.layers]
    return model_from_config(config, name=_name(row)), tuple(assumed)


def _plain_expert_model(row: Row) -> tuple[Model, tuple[str, ...]]:
    """A mixture of experts that is not in the catalogue: every layer has routed experts."""
    needed = ("layers", "hidden", "heads", "ffn", "experts", "topk")
    missing = [key for key in needed if getattr(row, key) is None]
    if missing:
        raise ConfigError(
            f"is not a known mixture of experts, and {', '.join(missing)} not given", key="model_name",
            found=short_repr(row.model_name),
        )  # fmt: skip
    config, assumed = _plain_config(row)
    config |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
               "dropout": 0.0, "experts": row.experts, "top_k": row.topk}  # fmt: skip
    assumed.append("model: gated experts in every layer, none of them shared")
    return model_from_config(config, name=_name(row)), tuple(assumed)


# Adapters
ADAPTERS: Final[Mapping[str, str]] = {
    "bridge": "r=16,targets=linear_qkv",
    "automodel": "r=16,targets=all-linear",
    "nemo": "r=32,targets=linear_qkv",
    "": "r=16",
}
"""Adapters of a LoRA run that states none, by a word of its framework: those of its published recipes.

Megatron-Bridge: recipes/llama/llama3.py and scripts/performance/configs/llama; AutoModel: `match_all_linear`
of examples/benchmark/configs/peft; NeMo: `attention_qkv` and `adapter_dim` of its launcher. Else PEFT's own.
"""

_STATED_ADAPTERS: Final = re.compile(r"\blora (r=[\w=,+-]+)")


def trains_adapters(row: Row) -> bool:
    """Whether the row is a run that trained LoRA adapters alone."""
    return "lora" in (row.model_name + row.notes).casefold()


def _adapters(row: Row) -> str:
    """The adapters of a LoRA run, as its notes state them (`LoRA r=16,targets=q_proj+v_proj`) or as its
    framework has them; empty for a run that trained all weights."""
    if not trains_adapters(row):
        return ""
    stated = _STATED_ADAPTERS.search(row.notes.casefold())
    if stated:
        return stated.group(1).rstrip(",")
    framework = row.framework.casefold()
    return next(adapters for word, adapters in ADAPTERS.items() if word in framework)


def _trained_model(row: Row, adapters: str) -> tuple[Model, Assumed]:
    """The model of a row with these adapters, and the assumptions."""
    model, assumed = model_of(row)
    if not adapters:
        return model, assumed
    stated = _STATED_ADAPTERS.search(row.notes.casefold())
    own = () if stated else (f"lora: {adapters}, as the recipes of the framework",)
    return with_lora(model, lora_of_text(adapters)), (*assumed, *own)


# Cases
PEAK_RANKS: Final = ("max", "last", "first")
"""Pipeline ranks of which a peak can be: the fullest (the default), the last, the first."""

MAX_DEVICES: Final = 1_000_000
"""Most devices of a row that is evaluated."""

IMBALANCE: Final = 1.1
"""Load of the busiest expert over the mean load, where the source does not state balanced routing."""

PACKED_SAMPLE: Final = 200
"""Tokens of a sample of a run whose notes say packed sequences without a length. Assumption: such runs
fine-tune on SQuAD, a paragraph of about 120 words, a question and its answer. At a sequence length of 4,096
attention within 100 or within 400 tokens differs by less than 1 % of a step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDevices:
    """Devices of a run on a mixed cluster.

    `problems` has one problem per kind of device, with all nodes of that kind. `nodes` has the index of the
    kind of each node, in the order of ranks."""

    problems: tuple[Problem, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row ready for prediction: its problem, the strategies that it may have run, and the assumptions.

    Rows with the same model, cluster, job and software share one problem. For a run on unequal devices,
    `problem` is the problem of the first kind of device, and `mixed` has the problems of all kinds.
    """

    row: Row
    problem: Problem
    strategies: StrategyTable
    assumed: tuple[str, ...]
    mixed: MixedDevices | None = None


OUTCOMES: Final = frozenset(
    {"line", "id", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "hfu_pct",
     "peak_mem_gib", "tflops_convention"}
)  # fmt: skip
"""Fields of a row that say nothing about what ran: its place in the file, and what was measured."""

_configuration_of = attrgetter(*(one.name for one in fields(Row) if one.name not in OUTCOMES))

MAX_SHARED: Final = 20_000
"""Most parts of cases that a builder keeps for further rows, some kB each; then it begins anew."""


@dataclass(frozen=True, slots=True)
class CaseBuilder:
    """Builds cases from rows and caches the parts that several rows share. With a `calibration`, rows have
    its devices, and the numbers of its software where they ran that."""

    calibration: Calibration | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def of(self, row: Row) -> Case:
        """The case of a row. Rows that differ in their outcomes only share all of it but the row.

        Raises ConfigError, the reason to skip the row, where the row names something unknown, describes a
        step that is not modelled, or contradicts itself."""
        if len(self._made) > MAX_SHARED:
            self._made.clear()
        case: Case = self._once(("case", _configuration_of(row)), lambda: self._case(row))
        return case if case.row is row else replace(case, row=row)

    def _case(self, row: Row) -> Case:
        _refuse(row)
        kinds = counted_devices(row.gpu)
        if kinds:
            return self._mixed_case(row, kinds)
        profile, of_profile = _profile(row)
        device, of_device = self._once(("device", row.gpu), lambda: device_named(row.gpu))
        sizes = tuple(getattr(row, name) for name in SIZES)
        adapters = _adapters(row)
        sizes = (*sizes, adapters)
        model, of_model = self._once(sizes, lambda: _trained_model(row, adapters))
        place = (row.gpu, row.gpus, row.gpus_per_node, row.interconnect)
        cluster, of_cluster = self._once(place, lambda: _cluster(row, device))
        job, of_job = _job(row, model, cluster, profile)
        by = self.calibration
        if by is not None:
            cluster, job = self._once(
                ("calibrated", sizes, place, job), lambda: calibrated(cluster, job, model, by)
            )
        problem = self._once(("problem", sizes, place, job), lambda: bind(model, cluster, job))
        strategies, of_strategy = layouts_of(row, problem)
        assumed = (*of_profile, *of_device, *of_model, *of_cluster, *of_job, *of_strategy)
        return Case(row=row, problem=problem, strategies=strategies, assumed=assumed)

    def _mixed_case(self, row: Row, kinds: tuple[tuple[str, int], ...]) -> Case:
        """The case of a row with several kinds of devices.

        Nodes come in the order in which the row names their kinds. Traffic between nodes has the rate of the
        worst connected node."""
        nodes = _nodes_of(row, kinds)
        names = [name for name, _ in kinds]
        rates = bytes_per_s_of_nodes(row.interconnect, names)
        interconnects = [row.interconnect] * len(kinds) if rates is None else _at_one_pace(names, rates)
        cases = [
            self.of(replace(row, gpu=name, interconnect=link))
            for name, link in zip(names, interconnects, strict=True)
        ]
        problems = tuple(case.problem for case in cases)
        if len({problem.job.dtype for problem in problems}) > 1:
            raise ConfigError("is not given, and its devices have none in common", key="dtype")
        assumed = list(dict.fromkeys(text for case in cases for text in case.assumed))
        if rates is not None:
            assumed.append(
                "network: rate of the worst connected node, since all nodes reduce gradients together"
            )
        return Case(
            row=row,
            problem=problems[0],
            strategies=cases[0].strategies,
            assumed=(*assumed, "ranks fill the nodes in the order of gpu"),
            mixed=MixedDevices(problems=problems, nodes=nodes),
        )

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The cached result of `make` for this key; raises its ConfigError again where it raised one."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except ConfigError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, ConfigError):
            raise made.within()
        return made


def calibrated(cluster: Cluster, job: Job, model: Model, by: Calibration) -> tuple[Cluster, Job]:
    """The cluster with the devices of a calibration, and the job with the host times of its software; both
    with the factor of the model, where steps of it were measured. Other devices and software stay."""
    factor = by.time_factor(parameters(model), job.dtype)
    factors = TimeFactors(kernels=factor, node_links=factor, network=factor, host=factor)
    classes = {
        name: factors.of_device(_as_measured(device, by.devices[device.name]))
        for name, device in cluster.classes.items()
        if device.name in by.devices
    }
    profile, measured = job.profile, by.profile
    if classes and measured is not None and measured.name == profile.name:
        profile = factors.of_software(profile.with_costs(measured))
    return replace(cluster, classes={**cluster.classes, **classes}), replace(job, profile=profile)


def _as_measured(device: Device, measured: Device) -> Device:
    """A device, which may be a variant with another memory or power limit, with measured efficiency."""
    if device.name == "cpu":
        return measured
    return replace(device, efficiency=measured.efficiency)


def cases_of(rows: Iterable[Row], calibration: Calibration | None = None) -> tuple[list[Case], list[Fault]]:
    """The cases of all usable rows, on devices and software of `calibration`, and the faults of the
    others."""
    ready = CaseBuilder(calibration)
    cases: list[Case] = []
    faults: list[Fault] = []
    for row in rows:
        try:
            cases.append(ready.of(row))
        except ConfigError as error:
            faults.append(fault_of(row, error))
    return cases, faults


def fault_of(row: Row, error: ConfigError) -> Fault:
    """The fault of a skipped row, from its error."""
    reason = ": ".join(part for part in (error.key, error.message) if part)
    allowed = f"; allowed: {error.allowed}" if error.allowed else ""
    return Fault(
        line=row.line, id=row.id, reason=reason, found=f"{error.found}{allowed}" if error.found else ""
    )


def _refuse(row: Row) -> None:
    """Raises ConfigError for steps that the cost model does not cover and for rows without required
    columns."""
    _one_of("peak_rank", row.peak_rank or PEAK_RANKS[0], PEAK_RANKS)
    for name in ("gpu", "framework", "gpus", "global_batch", "seq_len"):
        if not getattr(row, name):
            raise ConfigError("is not given", key=name)
    if int(row.gpus or 0) > MAX_DEVICES:
        raise ConfigError(
            "is too many devices", key="gpus", found=str(row.gpus), allowed=f"at most {MAX_DEVICES}"
        )


def _nodes_of(row: Row, kinds: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """The index of the kind of every node. ConfigError where a kind does not fill whole nodes, or the counts
    do not sum to the devices of the row."""
    counts = [count for _, count in kinds]
    each = row.gpus_per_node
    if each is None or sum(counts) != row.gpus or any(count % each or not count for count in counts):
        raise ConfigError(
            "do not fill nodes", key="gpus",
            found=f"{' + '.join(map(str, counts))} of {row.gpus}, {each or 'not given'} per node",
        )  # fmt: skip
    return tuple(kind for kind, count in enumerate(counts) for _ in range(count // each))


def _at_one_pace(names: Sequence[str], rates: Sequence[float]) -> list[str]:
    """Interconnect texts of nodes of these devices, so that all reach the rate of the slowest.

    Devices reach different fractions of their network bandwidth. So the slowest node need not be the node
    with the least nominal bandwidth."""
    fractions = [device_named(name)[0].efficiency.scale_out.fraction for name in names]
    slowest = min(part * rate for part, rate in zip(fractions, rates, strict=True))
    return [f"{slowest / part * 8e-9:.6f} Gb/s inter-node" for part in fractions]


def _profile(row: Row) -> tuple[Profile, Assumed]:
    name = profile_named(row.framework, row.year, row.notes)
    if name is None:
        raise unknown("is not a known framework", row.framework, PROFILES, key="framework")
    profile = _with_stated(row, PROFILES[name])
    if "overlap off" in row.notes.casefold():
        return profile.without_overlap(), ("communication overlap off, as stated in the notes",)
    return profile, ()


ATTENTION: Final[Mapping[str, tuple[str, ...]]] = {
    "flash": ("cudnn", "flash-2"), "efficient": ("efficient",), "unfused": (),
}  # fmt: skip
"""Values of the column `attention`, with the kernels of each."""

_GRADIENTS: Final = ("fp32", "bf16", "fp16")


def _with_stated(row: Row, profile: Profile) -> Profile:
    """The software with the attention and the gradients that the row states."""
    if row.attention:
        kernels = ATTENTION[_one_of("attention", row.attention, ATTENTION)]
        profile = replace(profile, attention=kernels)
    if row.grad_dtype:
        is_fp32 = _one_of("grad_dtype", row.grad_dtype, _GRADIENTS) == "fp32"
        profile = replace(profile, reduce_in_fp32=is_fp32)
    return profile


def _one_of(key: str, text: str, allowed: Iterable[str]) -> str:
    """The value of a column with few values. ConfigError for any other."""
    if text.casefold() not in allowed:
        raise unknown("is not known", text, allowed, key=key)
    return text.casefold()


def _cluster(row: Row, device: Device) -> tuple[Cluster, Assumed]:
    devices = int(row.gpus or 0)
    assumed = []
    per_node = row.gpus_per_node
    if per_node is None:
        per_node = device.devices_per_node
        assumed.append(f"gpus_per_node: {per_node}, the default")
    per_node = min(per_node, devices)
    if devices % per_node:
        raise ConfigError("do not fill nodes", key="gpus", found=f"{devices}, {per_node} per node")
    rate = inter_node_bytes_per_s(row.interconnect, devices=per_node, cards=device.nics_per_node)
    nodes = devices // per_node
    inter_node = None
    if rate is not None:
        inter_node = f"{device.nics_per_node}x{rate * 8e-9 / device.nics_per_node:.6f}Gb/s"
    elif nodes > 1:
        assumed.append(f"network: {device.scale_out_name}, the default")
    cluster = load_cluster(f"{nodes}x{per_node}x{device.name}", inter_node=inter_node)
    return replace(cluster, classes={device.name: device}), tuple(assumed)


def _job(row: Row, model: Model, cluster: Cluster, profile: Profile) -> tuple[Job, Assumed]:
    dtype = dtype_named(row.dtype)
    if dtype is None and row.dtype:
        raise ConfigError("is not a known dtype", key="dtype", found=short_repr(row.dtype))
    assumed = []
    imbalance = 1.0 if "balanced" in row.notes.casefold() else IMBALANCE
    if model.experts is not None and imbalance > 1.0:
        assumed.append(f"expert_imbalance: {imbalance}")
    sample = row.mean_sample_len
    if sample is None and row.seq_len and "packed sequences" in row.notes.casefold():
        sample = min(PACKED_SAMPLE, row.seq_len)
        assumed.append(f"mean_sample_len: {sample}")
    job = default_job(
        model,
        cluster,
        seq_len=row.seq_len,
        mean_sample_len=sample,
        global_batch_size=int(row.global_batch or 0),
        dtype=dtype,
        optimizer=_optimizer(row.optimizer),
        expert_imbalance=imbalance,
    )
    if dtype is None:
        assumed.append(f"dtype: {job.dtype}")
    return replace(job, profile=profile), tuple(assumed)


def _optimizer(text: str) -> Optimizer:
    """The optimizer that a text names; AdamW where it names no known one."""
    folded = text.casefold()
    names: tuple[Optimizer, ...] = ("muon", "adafactor", "sgd")
    return next((name for name in names if name in folded), "adamw")
