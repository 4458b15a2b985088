"""Records of a plan file of schema 2, as far as the checker reads them (docs/reference/formats.md).

Sizes are elements, times are seconds, memory is bytes. A record has the keys of the file that some check
reads. Those that no check reads are `Anything`, or are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from math import prod
from typing import Annotated, Any, Literal

from shardwise_verify.reading import (
    Amount,
    Anything,
    Bounds,
    Count,
    InputError,
    Positive,
    Share,
    Whole,
    short,
)

# Strategies

AXES = ("tp", "cp", "dp", "pp")
CP_KINDS = ("ring", "all_to_all")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer", "activations", "both")

Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
Layers = Annotated[int, Bounds(0, 10**6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRecord:
    """One candidate of the search space (docs/reference/space.md)."""

    tp: Count
    pp: Count
    vpp: Count
    cp: Count
    cp_kind: Literal["ring", "all_to_all"]
    ep: Count
    etp: Count
    dp: Count
    param_shard: Count
    grad_shard: Count
    optim_shard: Count
    micro_batch_size: Count
    schedule: ScheduleName
    sequence_parallel: bool
    recompute: Recompute
    recompute_modules: str = ""
    recompute_layers: Layers
    offload: Literal["none", "optimizer", "activations", "both"]
    axis_order: str
    first_stage_layers: Layers
    last_stage_layers: Layers
    options: Mapping[str, str] = field(default_factory=dict, compare=False)


FIELDS = tuple(each.name for each in fields(StrategyRecord) if each.compare)

Value = int | str | bool
Fixed = Mapping[str, Anything]
Restricted = Mapping[str, tuple[Anything, ...]]

# Models

Rows = Literal["tokens", "sequence", "routed", "head", "patches", "images"]
Size = Annotated[int, Bounds(0, 10**12)]


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """A size and the role by which it may be sharded; in a file [size, role], or a size that is never
    sharded."""

    size: int
    role: str = "whole"

    @staticmethod
    def from_plain(value: Any, key: str) -> ExtentRecord:
        parts = value if isinstance(value, list) else [value, "whole"]
        roles = ("whole", "heads", "kv_heads", "ffn", "vocab", "expert_ffn")
        if (
            len(parts) != 2
            or not isinstance(parts[0], int)
            or isinstance(parts[0], bool)
            or not 1 <= parts[0] <= 10**12
            or parts[1] not in roles
        ):
            raise InputError("is not an extent", key=key, found=short(value), allowed="size or [size, role]")
        return ExtentRecord(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """A weight tensor; `experts` that each have one, 0 outside of experts."""

    shape: tuple[ExtentRecord, ...]
    experts: Whole = 0

    @property
    def parameters(self) -> int:
        """Elements over all ranks and experts."""
        return prod(extent.size for extent in self.shape) * max(self.experts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRecord:
    """A saved activation per row; `selective` ones are recomputed under selective recomputation."""

    width: ExtentRecord
    rows: Rows = "tokens"
    dtype: Literal["compute", "operand", "fp32", "mask"] = "compute"
    selective: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOperator:
    """What all operators have; subclasses are the kinds of operators of the cost model, section 6. Only
    weights of `trained` operators have gradients. An operator runs `repeats` times, with weights and saved
    tensors of all times; with `forward_only` it has no backward pass."""

    name: str
    rows: Rows = "tokens"
    weights: tuple[WeightRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    trained: bool = True
    repeats: Count = 1
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulOperator(NamedOperator):
    """[rows, k] x [k, n]."""

    kind: Literal["matmul"] = "matmul"
    k: ExtentRecord
    n: ExtentRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulOperator(NamedOperator):
    """The same for each expert of a rank."""

    kind: Literal["grouped_matmul"] = "grouped_matmul"
    experts: Count
    k: ExtentRecord
    n: ExtentRecord
    rows: Rows = "routed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperator(NamedOperator):
    """Attention over `window` keys (None: all), or over all keys of a `block` of rows; values of no elements
    are scores alone."""

    kind: Literal["attention"] = "attention"
    heads: ExtentRecord
    kv_heads: ExtentRecord
    qk_dim: Count
    v_dim: Annotated[int, Bounds(0, 10**9)]
    window: Count | None = None
    causal: bool = True
    block: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOperator(NamedOperator):
    """A recurrence over the sequence: `flop` per row over all heads, elements moved per row, and those that
    context parallelism exchanges."""

    kind: Literal["scan"] = "scan"
    heads: ExtentRecord
    key_heads: ExtentRecord
    flop: Annotated[int, Bounds(0, 10**15)]
    forward: tuple[ExtentRecord, ...]
    backward: tuple[ExtentRecord, ...]
    exchanged: tuple[ExtentRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseOperator(NamedOperator):
    """Memory-bound work: elements read and written per row."""

    kind: Literal["pointwise"] = "pointwise"
    forward: tuple[ExtentRecord, ...]
    backward: tuple[ExtentRecord, ...]
    eager: tuple[ExtentRecord, ...] = ()
    selective: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOperator(NamedOperator):
    """A lookup in a table per row."""

    kind: Literal["lookup"] = "lookup"
    width: ExtentRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOperator(NamedOperator):
    """Softmax cross entropy over `classes`."""

    kind: Literal["loss"] = "loss"
    classes: ExtentRecord
    rows: Rows = "head"


LayerOperator = (
    MatmulOperator
    | GroupedMatmulOperator
    | AttentionOperator
    | ScanOperator
    | PointwiseOperator
    | LookupOperator
    | LossOperator
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """Routing of a layer with experts."""

    experts: Count
    top_k: Count
    groups: Count = 1
    groups_per_token: Count = 1
    capacity_factor: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A part of a layer: attention, MLP or experts."""

    operators: tuple[LayerOperator, ...]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One kind of decoder layer."""

    tensor_syncs: Annotated[int, Bounds(0, 100)]
    experts: RoutingRecord | None
    parts: tuple[PartRecord, ...]

    @cached_property
    def operators(self) -> tuple[LayerOperator, ...]:
        return tuple(chain.from_iterable(part.operators for part in self.parts))


@dataclass(frozen=True, kw_only=True)
class LayersRecord:
    """The resolved layers; `pattern` has runs of [index into `kinds`, number of layers]. A sequence has
    `patches` of images, and `image_tokens` that come from them."""

    pattern: tuple[tuple[Layers, Layers], ...]
    kinds: tuple[LayerKind, ...]
    embedding: tuple[LayerOperator, ...]
    head: tuple[LayerOperator, ...]
    head_experts: RoutingRecord | None
    head_layers: Layers
    head_tensor_syncs: Annotated[int, Bounds(0, 10**6)]
    tied_embeddings: bool
    hidden: Count
    vocab: Count
    heads: Count
    kv_heads: Count
    patches: Annotated[int, Bounds(0, 10**12)] = 0
    image_tokens: Annotated[int, Bounds(0, 10**12)] = 0

    def __post_init__(self) -> None:
        count = sum(number for _, number in self.pattern)
        if not 1 <= count <= 10**6 or any(kind >= len(self.kinds) for kind, _ in self.pattern):
            raise InputError(
                "is not a pattern of the kinds", key="model.layers.pattern", found=f"{count} layers"
            )

    @property
    def embedding_copies(self) -> int:
        """Copies of the embedding that a head on another rank has: as its output weights, and for the tokens
        of prediction modules."""
        return int(self.tied_embeddings) + int(self.head_layers > 0)

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each decoder layer."""
        return tuple(chain.from_iterable([kind] * number for kind, number in self.pattern))

    @cached_property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained, and all other weights are frozen."""
        of_layers = chain.from_iterable(kind.operators for kind in self.kinds)
        return any(operator.name.endswith("_lora_a") for operator in of_layers)

    @property
    def experts(self) -> RoutingRecord | None:
        """Routing of the first kind with experts."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """`model`: its family, its resolved layers, and how many parameters it has according to the file."""

    family: str
    parameters: Whole
    active_parameters: Whole
    layers: LayersRecord


# Clusters

Rate = Annotated[float, Bounds(1e-30, 1e20)]
Members = Annotated[int, Bounds(1, 10**7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulFigures:
    """Share of the peak that matmuls reach."""

    peak_fraction: Positive
    tile_m: Count
    tile_n: Count
    units: Count
    k_half: Amount
    small_tile_fraction: Positive
    fp8_fraction: Positive
    fp4_fraction: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulFigures:
    """The same relative to a plain matmul."""

    fraction: Positive
    tokens_half: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures:
    """Share of the peak that a fused kernel reaches."""

    forward_fraction: Positive
    backward_fraction: Positive
    seq_half: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Share of the memory bandwidth that kernels reach."""

    fraction: Positive
    half_bytes: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """Share of the bandwidth that collectives reach, and seconds before the first byte."""

    fraction: Positive
    startup_s: Amount
    partial_fraction: Positive
    crowding: Annotated[float, Bounds(0.0, 100.0)]
    exchange_fraction: Positive
    lockstep_s: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyRecord:
    """Figures of kernels and collectives on one device class."""

    matmul: MatmulFigures
    grouped_matmul: GroupedMatmulFigures
    attention: Mapping[str, AttentionFigures]
    memory: MemoryFigures
    scale_up: CollectiveFigures
    scale_out: CollectiveFigures
    launch_s: Amount
    overlap_slowdown: Positive
    context_bytes: Amount
    communicator_bytes: Amount
    fragmentation_ratio: Amount
    is_calibrated: bool
    speed_spread: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRecord:
    """The library of collectives; `instead` has the substitutes of those that it lacks."""

    instead: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One device class."""

    peak_flop_per_s: Mapping[str, Positive]
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    efficiency: EfficiencyRecord
    backend: LibraryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """`count` equal nodes in a row."""

    count: Members
    name: str
    device_class: str
    devices: Members
    speed: Positive
    nics: Amount
    nic_bytes_per_s: Rate
    host_memory_bytes: Amount
    host_link_bytes_per_s: Rate
    price_usd_per_hour: Amount | None
    scale_up_bytes_per_s: Rate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecord:
    """One tier of the fabric."""

    span: Members
    bytes_per_s: Rate
    flow_bytes_per_s: Rate
    latency_s: Amount
    in_switch_reduction: bool
    is_network: bool
    part_shares: tuple[tuple[Members, Positive], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """The cluster: rank r is the r-th device, counted through `nodes` in order."""

    classes: Mapping[str, DeviceRecord]
    nodes: tuple[NodeRecord, ...]
    tiers: tuple[TierRecord, ...]
    links: tuple[Anything, ...]
    is_without_links: bool = False
    devices: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", sum(node.count * node.devices for node in self.nodes))
        spans = [tier.span for tier in self.tiers]
        if not 1 <= self.devices <= 10**7:
            raise InputError("is not a number of devices", key="cluster.nodes", found=short(self.devices))
        if sorted(set(spans)) != spans or spans[-1:] != [self.devices]:
            raise InputError("do not span the cluster", key="cluster.tiers", found=short(spans[:8]))
        for node in self.nodes:
            if node.device_class not in self.classes:
                raise InputError("is no class", key="cluster.nodes", found=short(node.device_class))

    @property
    def is_approximated(self) -> bool:
        """Whether its file gave links, which the cost model estimates as tiers."""
        return self.is_without_links or (bool(self.links) and self.devices > 1)


# Jobs

Band = tuple[Amount, Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakErrorsRecord:
    """The normal distribution of log(measured / predicted) of peak memory."""

    kind: str
    bias: Annotated[float, Bounds(-10.0, 10.0)]
    spread: Annotated[float, Bounds(0.0, 10.0)]
    sources: Whole
    rows: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRecord:
    """The software profile (docs/concepts/cost-model.md)."""

    attention: tuple[str, ...]
    tensor_overlap: Share
    tensor_backward_overlap: Share
    context_overlap: Share
    expert_overlap: Share
    data_overlap: Share
    state_overlap: Share
    shard_overlap: Share
    pipeline_overlap: Share
    pointwise_passes: Amount
    dispatch_s: Amount
    expert_dispatch_s: Amount
    host_action_s: Amount
    host_step_s: Amount
    warm_band: Band
    cold_band: Band
    reduce_in_fp32: bool
    recompute_stops_early: bool
    applies_dropout: bool
    buffers_all_microbatches: bool
    keeps_gathered_inputs: bool
    reduces_by_block: bool
    peak_errors: PeakErrorsRecord | None = None
    """None in files of before it was known."""
    loss: Literal["in_place", "megatron", "eager", "compiled", "fused"] | None = None
    """None in files of before it was known: fp32 logits in place, or with a copy where blocks are reduced."""
    keeps_low_precision_weights: bool = False
    eager_modules: bool = False
    shards_experts_by_instance: bool = False
    whole_in_pipelines: bool = False
    keeps_split_graphs: bool = False
    needs_sequence_parallel: bool = False
    linked_devices: Whole = 0
    accumulates_in_fp32: bool = False
    moment_bytes: Amount = 4.0
    master_bytes: Amount = 4.0
    accumulated_bytes: Amount = 0.0
    fuses_accumulation: bool = False
    expert_bias_forward_bytes: Amount = 0.0
    expert_bias_backward_bytes: Amount = 0.0
    has_fp8_parameters: bool = False
    bucket_elements: Amount = 0.0
    gathered_elements: Amount = 0.0
    update_elements: Amount = 0.0
    keeps_narrow_gradients: bool = False
    offloads_gradients: bool = False
    host_weight_bytes: Amount = 0.0
    host_process_bytes: Amount = 0.0
    offload_modules: str = ""
    has_wide_frozen_weights: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Batch, precision, optimizer and margins."""

    seq_len: Count
    global_batch_size: Count
    dtype: str
    optimizer: Literal["adamw", "adafactor", "sgd", "muon"]
    memory_margin: Share
    expert_imbalance: Annotated[float, Bounds(1.0, 1e6)]
    profile: SoftwareRecord
    mean_sample_len: Count | None = None


# Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartRecord:
    """A part of a stage that lies in two pools."""

    ranks: str
    device_class: str
    tp: Count
    rows: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One pipeline rank; `ranks` as ranges, `chunks` the layers of each chunk."""

    devices: Count
    ranks: str
    device_class: str
    tp: Count
    cp: Count
    dp: Count
    layers: Layers
    chunks: tuple[Layers, ...]
    share: Share
    recompute: Recompute
    parts: tuple[StagePartRecord, ...] = ()
    operators: Anything = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """A pipeline by its stages in order."""

    micro_batch_size: Count
    microbatches: Count
    rows: Count
    makespan_s: Positive
    stages: tuple[StageRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """Pipelines that run in parallel; `mesh` of each stage of an operator graph."""

    schedule: ScheduleName
    pipelines: tuple[PipelineRecord, ...]
    mesh: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise InputError("is empty", key="best.layout.pipelines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRecord:
    """Bytes on the tightest rank."""

    allocated: Amount
    reserved: Amount
    device: Amount
    capacity: Amount


Signed = Annotated[float, Bounds(-1e30, 1e30)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRecord:
    """The best result; `strategy` is None where stages are not alike."""

    strategy: StrategyRecord | None
    layout: LayoutRecord
    step_time_s: Positive
    band_s: Band
    tokens_per_s_per_device: Amount | None
    mfu: Amount | None
    mfu_full_attention: Amount | None
    peak_memory_bytes: PeakRecord
    memory_band_bytes: Band | None = None
    fits_probability: Share | None = None
    breakdown: Mapping[str, Signed]
    memory: Mapping[str, Signed]
    evaluator: str
    pools: Anything = None
    is_alike: Anything = None

    @property
    def memory_parts(self) -> Mapping[str, float]:
        """The parts of the bytes of the tightest rank."""
        return {name: nbytes for name, nbytes in self.memory.items() if name != "tightest_rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUpRecord:
    """A runner-up with its figures."""

    strategy: StrategyRecord
    step_time_s: Positive
    device_bytes: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRecord:
    """The outcomes of all candidates."""

    space: str
    fixed: Fixed = field(default_factory=dict)
    axes: Restricted = field(default_factory=dict)
    empty_ends: bool | None = None
    own_set: bool | None = None
    enumerated: Whole
    unexplored: Whole = 0
    rejected: Mapping[str, Whole]
    cut_by_bound: Whole
    simulated: Whole
    best_s: Amount
    lower_bound_s: Amount
    gap: Annotated[float, Bounds(-1.0, 1.0)] | None = None
    priced_as: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    other_options: tuple[CertificateRecord, ...] = ()

    def __post_init__(self) -> None:
        if any(not one.options or one.other_options for one in self.other_options):
            raise InputError("is not one search", key="certificate.other_options", allowed="options of each")
        for name, values in self.axes.items():
            if len(set(map(repr, values))) < len(values):
                raise InputError("has a value twice", key=f"certificate.axes.{name}")
        for name in ("empty_ends", "own_set"):
            if getattr(self, name) is False:
                raise InputError("is not true", key=f"certificate.{name}", allowed="true, or left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """The table of actions; each rank's actions are one line of text."""

    name: ScheduleName
    microbatches: Count
    stage_rank: tuple[Whole, ...]
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRecord:
    """Step times that a plan on a mixed cluster is compared with; None: nothing fits."""

    uniform_step_time_s: Amount | None
    fastest_class_step_time_s: Amount | None
    fastest_class: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimumRecord:
    """The fastest strategy, where another one is recommended."""

    strategy: StrategyRecord
    step_time_s: Positive
    given_up: Amount
    fits_probability: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRecord:
    """What was asked, as far as the checks need it."""

    objective: Literal["time", "memory", "devices", "cost"]
    space: str
    fixed: Fixed
    axes: Restricted
    tolerance: Amount = 0.0
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan file of schema 2."""

    schema: Literal["shardwise.plan"]
    version: Count
    hash: str
    target: str
    question: QuestionRecord
    model: ModelRecord | None = None
    graph: Anything = None
    job: JobRecord
    best: BestRecord
    idle: Anything
    cluster: ClusterRecord
    certificate: CertificateRecord | None = None
    runners_up: tuple[RunnerUpRecord, ...] = ()
    epsilon: Anything = None
    mixed: MixedRecord | None = None
    schedule: ScheduleRecord | None = None
    for_trace: Anything = None
    optimum: OptimumRecord | None = None
    targets: Anything = None

    @property
    def fastest(self) -> tuple[StrategyRecord, float]:
        """The strategy of the optimum and its step time in seconds: those of `best` unless another one is
        recommended."""
        if self.optimum is None:
            return self.strategy, self.best.step_time_s
        return self.optimum.strategy, self.optimum.step_time_s

    @property
    def strategy(self) -> StrategyRecord:
        """The strategy of all stages. Raises InputError where there is none."""
        if self.best.strategy is None:
            raise InputError("is missing", key="best.strategy")
        return self.best.strategy

    @property
    def proof(self) -> CertificateRecord:
        """The certificate. Raises InputError where there is none."""
        if self.certificate is None:
            raise InputError("is missing", key="certificate")
        return self.certificate

    @property
    def kind(self) -> Literal["uniform", "uneven", "graph"]:
        """Uniform where one strategy holds for all stages."""
        if self.model is None:
            return "graph"
        return "uneven" if self.best.strategy is None else "uniform"
