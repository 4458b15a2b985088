"""Judges recipes: is a recipe legal, does it fit, how fast is it, and which plan is ours for the same job?

`judged` returns a `Judgement`. Models are those of `recipes_models.json`: names of our catalogue, or sizes
with their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.recipes_facts import Recipe

import shardwise.model
from shardwise import search
from shardwise.accuracy import SHIPPED, read_rows
from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import RECIPES, Problem, bind
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import MODULES, Model, model_from_config, set_text
from shardwise.plans import Result
from shardwise.strategy import Job, Profile, Strategy, Target, complete, target_of
from shardwise.targets.imports.imported import largest_of

TARGET, FSDP_TARGET = "megatron-lm-0.19", "megatron-fsdp-0.19"

DEVICES = {"h100": "H100-SXM", "b200": "B200", "b300": "B300", "gb200": "GB200", "gb300": "GB300"}
PER_NODE = {"gb200": 4, "gb300": 4}
OPTIMIZERS: Mapping[str, Any] = {"adam": "adamw", "dist_muon": "muon", "muon": "muon"}

STATES = ("parameters", "gradients", "optimizer")
"""Parts of the memory that no recomputation or offload of activations changes."""

COPIES = 2.0
"""Low-precision copies of a weight: as it is and transposed."""

MARGIN = 0.05
"""Default share of the memory of a device that stays free."""

LARGE_GAIN = 0.15
"""Share of a recipe's predicted step time above which the gain of our plan is looked into."""

MOST_TIMES = (2, 4, 8, 16, 32, 64)
"""How many times the devices of a recipe that does not fit are tried."""

_MODELS = json.loads(Path(__file__).with_name("recipes_models.json").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What we say of one recipe.

    `skipped` is the reason why nothing can be said, else empty; `illegal` the rule that the recipe breaks.
    `refused` are values that the target does not run, `unsaid` settings that the prediction leaves out.
    `memory` is that of the fullest rank in bytes, by part; `device_bytes` the memory of the device.
    `fits_on` are the fewest devices on which a recipe fits that does not fit on its own (0: none of those
    tried). `saved` are seconds of the recipe's step that our plan saves, by part.
    `published_s` is a published step time of these degrees and this precision, None where there is none.
    """

    recipe: Recipe
    skipped: str = ""
    illegal: str = ""
    refused: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    device_bytes: float = 0.0
    fits_on: int = 0
    step_s: float = 0.0
    published_s: float | None = None
    ours: Strategy | None = None
    ours_s: float = 0.0
    saved: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether there is a prediction."""
        return not self.skipped and not self.illegal

    @property
    def needed_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def states_bytes(self) -> float:
        """Weights, gradients and optimizer states."""
        return sum(self.memory.get(part, 0.0) for part in STATES)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank needs at most the memory of its device."""
        return self.is_judged and self.needed_bytes <= self.device_bytes

    @property
    def fits_with_margin(self) -> bool:
        """Whether it leaves the default margin of the device free."""
        return self.is_judged and self.needed_bytes <= self.device_bytes * (1.0 - MARGIN)

    @property
    def gain(self) -> float | None:
        """Share of the recipe's predicted step time that our plan saves; None where the recipe does not
        fit, since then the two are not comparable, or where nothing of ours fits."""
        return None if self.ours is None or not self.fits else 1.0 - self.ours_s / self.step_s

    def agrees(self, axis: str) -> bool:
        """Whether our plan has the same degree."""
        return self.ours is not None and getattr(self.ours, axis) == getattr(self.recipe, axis)


@cache
def model_for(name: str, vocab: int | None, mtp_layers: int | None) -> Model | str:
    """The model of a recipe, with its vocabulary and layers of multi-token prediction replaced where they
    are not None; or the reason why we cannot express it."""
    known = _MODELS["models"].get(name)
    if known is None:
        reasons = (reason for prefix, reason in _MODELS["cannot"].items() if name.startswith(prefix))
        return next(reasons, "unknown")
    config = dict(known["config"] if "config" in known else _catalogue(known["catalogue"]))
    if vocab is not None:
        config["vocab_size" if "model_type" in config else "vocab"] = vocab
    if mtp_layers is not None and config.get("model_type") == "deepseek_v3":
        config["num_nextn_predict_layers"] = mtp_layers
    return model_from_config(config, name=name)


def _catalogue(name: str) -> Mapping[str, Any]:
    path = Path(shardwise.model.__path__[0]) / "catalogue" / f"{name}.json"
    config: Mapping[str, Any] = json.loads(path.read_text("utf-8"))["config"]
    return config


@cache
def cluster_for(device: str, devices: int) -> Cluster:
    """Nodes of the usual size with this many devices. Raises ConfigError where they fill no whole nodes."""
    per_node = min(PER_NODE.get(device, 8), devices)
    nodes, left = divmod(devices, per_node)
    if left:
        raise ConfigError(
            "fill no whole nodes", key="devices", found=str(devices), allowed=f"multiples of {per_node}"
        )
    return load_cluster(f"{nodes}x{per_node}x{DEVICES[device]}")


def target_for(recipe: Recipe) -> Target:
    """The target that a recipe is written for."""
    return target_of(FSDP_TARGET if recipe.sharding == "fsdp" else TARGET)


def job_for(recipe: Recipe, model: Model, cluster: Cluster) -> Job:
    """The job with the software of the target and its options as the recipe has them: overlap of tensor- and
    expert-parallel communication, precision of gradients and moments, CUDA graphs; and reductions that do
    not overlap."""
    target = target_for(recipe)
    profile = with_graphs(
        recipe,
        target.with_options(
            target.own_profile,
            {
                "tp_comm_overlap": "on" if recipe.tp_comm_overlap else "off",
                "ep_overlap": "on" if recipe.ep_overlap else "off",
                "grad_reduce_dtype": recipe.grad_reduce_dtype,
                "moment_dtype": recipe.moment_dtype,
            },
        ),
    )
    if recipe.moment_dtype != "fp32" and recipe.dtype != "bf16":
        # the 16 bits that a bf16 weight lacks are enough only where there is one
        profile = replace(profile, master_bytes=4.0)
    if not recipe.overlap_grad_reduce and recipe.sharding != "fsdp":
        profile = replace(profile, data_overlap=0.0, state_overlap=0.0)
    job = search.default_job(
        model,
        cluster,
        seq_len=recipe.seq_len,
        global_batch_size=recipe.global_batch_size,
        dtype=recipe.dtype,
        optimizer=OPTIMIZERS[recipe.optimizer],
        memory_margin=MARGIN,
        expert_imbalance=1.0 if recipe.is_balanced else 1.1,
    )
    return replace(job, profile=profile)


GRAPHS = {"transformer_engine": "modules", "full_iteration": "full_iteration"}
"""The values of the option `cuda_graph` of the target for the graphs of a recipe."""


def with_graphs(recipe: Recipe, profile: Profile) -> Profile:
    """The software with the CUDA graphs of the recipe. Its dispatchers of experts have fixed buffers, which
    the exported ones lack, so that the limits of the option do not apply."""
    value = GRAPHS.get(recipe.cuda_graphs)
    options = target_of(TARGET).options["cuda_graph"]
    return profile if value is None else replace(profile, **options[value].profile)


def strategy_for(recipe: Recipe, model: Model) -> Strategy:
    """The strategy of a recipe, as near as ours can say it (`unsaid_of` has the rest). Raises ConfigError
    for fields that contradict each other."""
    fields: dict[str, Any] = {
        "tp": recipe.tp, "pp": recipe.pp, "vpp": recipe.vpp, "cp": recipe.cp, "cp_kind": recipe.cp_kind,
        "dp": recipe.dp, "micro_batch_size": recipe.micro_batch_size, "axis_order": "tp-cp-dp-pp",
        "sequence_parallel": recipe.sequence_parallel, "recompute": recipe.recompute,
        "offload": "optimizer" if "optimizer" in recipe.offload else "none",
    }  # fmt: skip
    if recipe.recompute == "selective":
        fields["recompute_modules"] = set_text(recipe.recompute_modules)
        if not fields["recompute_modules"]:
            fields["recompute"] = "none"
    if model.experts is not None:
        fields |= {"ep": recipe.ep, "etp": recipe.etp}
    replicas = recipe.dp * recipe.cp
    shard = max(replicas // recipe.optimizer_instances, 1)
    if recipe.sharding == "fsdp":
        states = replicas if recipe.shards_states_outside else shard
        fields |= {"param_shard": shard, "grad_shard": shard, "optim_shard": states}
    elif recipe.sharding == "optimizer":
        fields["optim_shard"] = shard
    fields |= ends_of_stages(recipe, model.layers)
    if recipe.recompute == "full":
        largest = largest_of(model.layers, recipe.pp * recipe.vpp, fields)
        fields["recompute_layers"] = min(recipe.recompute_layers or largest, largest)
    return complete(
        fields,
        devices=recipe.devices,
        layers=model.layers,
        experts=None if model.experts is None else model.experts.experts,
        global_batch_size=recipe.global_batch_size,
    )


def ends_of_stages(recipe: Recipe, layers: int) -> dict[str, int]:
    """Decoder layers of the first and the last stage, where they are not the even split. Raises ConfigError
    where the layers do not divide over the stages, or stages lack some."""
    stages = recipe.pp * recipe.vpp
    if recipe.layers:
        if len(recipe.layers) != stages or sum(recipe.layers) != layers:
            raise ConfigError(
                f"a layout of {len(recipe.layers)} stages with {sum(recipe.layers)} layers",
                key="layers", found=f"{stages} stages, {layers} layers",
            )  # fmt: skip
        return {"first_stage_layers": recipe.layers[0], "last_stage_layers": recipe.layers[-1]}
    if recipe.ends_count_as_layers:
        each, left = divmod(layers + 2, stages)
        if left:
            raise ConfigError(
                "layers do not divide", key="layers", found=f"{layers} + 2 over {stages} stages"
            )
        return {"first_stage_layers": each - 1, "last_stage_layers": each - 1}
    given = {"first_stage_layers": recipe.first_rank_layers, "last_stage_layers": recipe.last_rank_layers}
    if not any(given.values()) and layers % stages:
        raise ConfigError("layers do not divide", key="layers", found=f"{layers} over {stages} stages")
    return {name: count // recipe.vpp for name, count in given.items() if count}


def unsaid_of(recipe: Recipe) -> Iterator[str]:
    """Settings of a recipe that its prediction leaves out, by kind."""
    unknown = set(recipe.recompute_modules) - set(MODULES)
    if unknown:
        yield f"recomputation of {' '.join(sorted(unknown))}"
    if recipe.master_dtype != "fp32":
        yield f"{recipe.master_dtype} main weights"
    if set(recipe.offload) - {"optimizer"}:
        yield "offload of named modules"
    if recipe.offloaded_layers:
        yield "time of offloading some layers"
    if recipe.dispatcher in ("deepep", "hybridep", "ncclep") and recipe.ep > 1:
        yield f"dispatcher {recipe.dispatcher}"
    if recipe.cuda_graphs and recipe.cuda_graphs not in GRAPHS:
        yield f"CUDA graphs ({recipe.cuda_graphs})"
    if recipe.capacity_factor:
        yield "expert capacity"


def judged(recipe: Recipe, *, is_compared: bool = True) -> Judgement:
    """What we say of a recipe; without the devices on which it fits and our plan unless `is_compared`."""
    model = model_for(recipe.model, recipe.vocab, recipe.mtp_layers)
    skipped = _skipped(recipe, model)
    if skipped or isinstance(model, str):
        return Judgement(recipe=recipe, skipped=skipped)
    cluster = cluster_for(recipe.device, recipe.devices)
    job = job_for(recipe, model, cluster)
    unsaid = tuple(unsaid_of(recipe))
    try:
        strategy = strategy_for(recipe, model)
        problem = bind(model, cluster, job)
        result = search.predicted(problem, strategy)
    except (ConfigError, Infeasible) as error:
        return Judgement(recipe=recipe, illegal=str(error), unsaid=unsaid)
    judgement = Judgement(
        recipe=recipe,
        refused=tuple(str(each) for each in target_for(recipe).for_job(model, job).refusals(strategy)),
        unsaid=unsaid,
        memory=_memory(recipe, problem, strategy, result),
        device_bytes=_memory_of(cluster),
        step_s=result.step_time_s,
        published_s=published_s(recipe, model),
    )
    if not is_compared:
        return judgement
    if not judgement.fits:
        return replace(judgement, fits_on=_devices_that_fit(recipe, model))
    own = _plan(recipe, problem)
    if own is None:
        return judgement
    parts = {*result.breakdown, *own.breakdown}
    saved = {part: result.breakdown.get(part, 0.0) - own.breakdown.get(part, 0.0) for part in parts}
    return replace(judgement, ours=own.strategy, ours_s=own.step_time_s, saved=saved)


def _skipped(recipe: Recipe, model: Model | str) -> str:
    """The reason why nothing can be said of a recipe, with its kind first; else empty."""
    if recipe.faults:
        return f"contradicts itself: {recipe.faults[0]}"
    if isinstance(model, str):
        return f"model: {model}"
    if recipe.device not in DEVICES:
        return f"device: {recipe.device.upper()}"
    if recipe.dtype == "nvfp4" and recipe.device == "h100":
        return "device: H100 without 4-bit arithmetic"
    try:
        ends_of_stages(recipe, model.layers)
    except ConfigError as error:
        return f"contradicts itself: {error.message}, {error.found}"
    return ""


_plans: dict[Any, Result | None] = {}


def _plan(recipe: Recipe, problem: Problem) -> Result | None:
    """The fastest strategy of the target on all devices with gradients and moments of the same precision,
    and optimizer states that are sharded only where the recipe shards them, with the same overlap of experts
    and the same CUDA graphs; None where nothing fits."""
    target = target_of(TARGET)
    chosen = {
        "tp_comm_overlap": "on",
        "ep_overlap": "on" if recipe.ep_overlap else "off",
        "grad_reduce_dtype": recipe.grad_reduce_dtype,
        "moment_dtype": recipe.moment_dtype,
    }
    own = with_graphs(recipe, target.with_options(target.own_profile, chosen))
    profile = replace(own, master_bytes=problem.profile.master_bytes)
    job = replace(problem.job, profile=profile)
    fixed = {"optim_shard": 1} if recipe.sharding == "none" else {}
    key = (recipe.model, recipe.vocab, recipe.mtp_layers, problem.cluster.name, tuple(fixed), job)
    if key not in _plans:
        question = search.Question(
            model=problem.model, cluster=problem.cluster, job=job, use_all=True, top=0, fixed=fixed
        )
        try:
            _plans[key] = search.plan_for(target_of(TARGET), question, search.plan).best
        except Infeasible:
            _plans[key] = None
    return _plans[key]


def _devices_that_fit(recipe: Recipe, model: Model) -> int:
    """The fewest devices on which a recipe fits with its degrees and more data-parallel ranks; 0 if none of
    those tried is enough."""
    for times in MOST_TIMES:
        # interleaved schedules need micro-batches divisible by pp
        rows = recipe.dp * times * recipe.micro_batch_size * (recipe.pp if recipe.vpp > 1 else 1)
        batch = -(-recipe.global_batch_size // rows) * rows
        wider = replace(recipe, devices=recipe.devices * times, global_batch_size=batch)
        cluster = cluster_for(recipe.device, wider.devices)
        problem = bind(model, cluster, job_for(wider, model, cluster))
        strategy = strategy_for(wider, model)
        needed = _memory(wider, problem, strategy, search.predicted(problem, strategy))
        if sum(needed.values()) <= _memory_of(cluster):
            return wider.devices
    return 0


def _memory(recipe: Recipe, problem: Problem, strategy: Strategy, result: Result) -> dict[str, float]:
    """The memory of the fullest rank by part. The prediction has all activations, and low-precision copies
    of weights next to 16 bits: without the activations of layers that the recipe offloads, and without the
    16 bits where it stores weights in the format of the products."""
    memory = dict(result.memory)
    memory["activations"] *= 1.0 - min(recipe.offloaded_layers / problem.model.layers, 1.0)
    if recipe.low_precision_weights:
        profile = replace(problem.profile, keeps_low_precision_weights=False)
        without = bind(problem.model, problem.cluster, replace(problem.job, profile=profile))
        copies = memory["parameters"] - search.predicted(without, strategy).memory["parameters"]
        memory["parameters"] -= 2.0 * copies / (COPIES * RECIPES[recipe.dtype].operand_bytes)
    changed = sum(memory.values()) - sum(result.memory.values())
    memory["fragmentation"] *= 1.0 + changed / (sum(result.memory.values()) - memory["fragmentation"])
    return memory


def _memory_of(cluster: Cluster) -> float:
    return min(float(one.memory_bytes) for one in cluster.classes.values())


SAME_DTYPE = {
    "bf16": ("bf16",), "fp8-current": ("fp8", "fp8-cs"), "mxfp8": ("mxfp8", "fp8-mx"), "nvfp4": ("nvfp4",)
}  # fmt: skip
"""Our dtypes, and their names in the published tables of Megatron-Bridge."""


@cache
def _published() -> tuple[Any, ...]:
    """Rows of measurements of Megatron-Bridge, newest release first as in its tables."""
    return tuple(row for row in read_rows(str(SHIPPED))[0] if row.framework.startswith("Megatron-Bridge"))


def published_s(recipe: Recipe, model: Model) -> float | None:
    """The newest published step time of this model, devices, batch, degrees and precision."""
    wanted = (
        model.layers, model.hidden, recipe.devices, recipe.tp, recipe.pp, recipe.vpp, recipe.cp, recipe.ep,
        recipe.seq_len, recipe.global_batch_size, recipe.micro_batch_size,
    )  # fmt: skip
    for row in _published():
        found = (
            row.layers, row.hidden, row.gpus, row.tp, row.pp, row.vpp or 1, row.cp, row.ep or 1,
            row.seq_len, row.global_batch, row.micro_batch,
        )  # fmt: skip
        same = row.gpu.lower() == recipe.device and row.dtype in SAME_DTYPE.get(recipe.dtype, ())
        if same and found == wanted and row.tokens_per_s_per_gpu:
            tokens = recipe.global_batch_size * recipe.seq_len
            return float(tokens / (row.tokens_per_s_per_gpu * recipe.devices))
    return None
