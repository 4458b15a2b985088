"""Software profiles, calibration files and the training job.

A `Profile` holds the numbers and features of one generation of training software (overlaps, host times, ZeRO
stages); `PROFILES` are the shipped ones. A `Calibration` holds measured devices and software that replace the
shipped ones. A `Job` is the request besides the model and the cluster: batch, sequence length, dtype,
optimizer, margins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise.cluster import ATTENTION_KERNELS, MEASURED, Device, device_of, find_device
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, join_key, read_mapping, short_repr
from shardwise.numbers import Number, most_specific, numbers_of
from shardwise.strategy.peak_errors import PeakErrors, kind_of_software, peak_errors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one generation of training software runs a step.

    `attention` lists attention kernels in order of preference; a device without any of them computes
    attention unfused.

    `*_overlap` are shares, 0 to 1, of each communication that the software can overlap with computation:

    - `tensor`: with the matmuls of its layer; `tensor_backward`: further in the backward pass, with the
      weight gradients of the layer.
    - `context` (ring): with attention. `expert`: with the experts' matmuls.
    - `data`: gradient reduction with the last backward pass. `state`: the same where ranks share optimizer
      states, and the parameter all-gather with the first forward pass (default: as `data`).
    - `shard`: all-gathers and reduce-scatters of sharded parameters with the neighbouring layer.
    - `pipeline`: sends between stages with the next action.

    `pointwise_passes` is how often memory-bound operators move their tensors, relative to perfectly fused
    kernels.

    Host seconds: `dispatch_s` per kernel; `expert_dispatch_s` further per pass through routed experts
    (permutations, waits for counts); `host_action_s` per pipeline action; `host_step_s` per optimizer step.
    `warm_band` and `cold_band` are factors on the predicted step time that contain 80 % of the measured runs
    of an unseen source: warm where its devices were fitted, cold where not. `peak_errors` is the distribution
    of measured over predicted peak memory.

    `reduce_in_fp32`: gradients are accumulated and reduced in fp32 (else in the dtype of the weights). With
    `accumulates_in_fp32` those that are reduced in the dtype of the weights are cast to fp32 afterwards
    (PyTorch's fully_shard).
    `zero_stages` are the supported ZeRO stages, `recomputes` the supported values of recomputation. With
    `recompute_stops_early` recomputation ends with the last tensor that the backward pass needs, before the
    layer's last matmul. With `applies_dropout` a model that has dropout runs its passes and saves its masks.
    `sequence_parallel` is the default of that field. With `buffers_all_microbatches` stages keep their send
    and receive buffers of a whole step. With `keeps_gathered_inputs` tensor ranks save the gathered input of
    a matmul; else they save their shard and all-gather it again (Korthikanti et al. 2022). With
    `reduces_by_block` gradients exist for one block at a time, unless micro-batches accumulate them, and each
    rank has its shard of fp32 weights in addition to the full weights (PyTorch's fully_shard).

    `loss` is how the loss is computed, one of LOSSES: it decides the bytes per logit that exist at once. With
    `keeps_low_precision_weights` an 8- or 4-bit matmul has two low-precision copies of its weight, one
    transposed, for all micro-batches of a step (Transformer Engine). With `eager_modules` each operator of a
    module saves its own tensors (modules of Transformers without `torch.compile`). With
    `shards_experts_by_instance` the replicas of an expert form as many groups as those of dense weights, each
    with all of the expert's optimizer states (instances of Megatron-LM's distributed optimizer). With
    `whole_in_pipelines` a stage has whole parameters, and whole gradients from its first backward pass until
    its last one of a step, whatever is sharded (PyTorch's pipelining). With
    `keeps_split_graphs` all saved activations stay between the two passes of a split backward (PyTorch's
    pipelining keeps the graph); else only inputs of products and gradients of their outputs do.

    With `needs_sequence_parallel` tensor-parallel communication overlaps only under sequence parallelism.
    `linked_devices` are the devices with direct links inside which it must run to overlap as requested; 0
    where nothing was requested.
    With `has_wide_frozen_weights` frozen weights have a master copy as trained ones do (Accelerate casts the
    whole model to fp32 for fully_shard, which shards the weights of a block in one dtype); else they exist in
    the training dtype alone.
    Optimizer states have `moment_bytes` per moment, and at most `master_bytes` per master weight (2: the 16
    bits that a bf16 weight lacks).

    `accumulated_bytes` are moved per weight and micro-batch by kernels of their own: they add a gradient to
    those of other micro-batches, or copy weights and gradients out of and into the buffers of collectives.
    Software that reduces by block has such copies once per step instead. With `fuses_accumulation` the
    product that computes a weight gradient adds it to those of other micro-batches (Megatron-LM's
    gradient_accumulation_fusion): it reads and writes the accumulated gradient.

    `expert_bias_forward_bytes` and `expert_bias_backward_bytes` are moved per element of the experts' output,
    where the last product of experts has biases, by kernels of each expert that add them.

    With `has_fp8_parameters` the low-precision copies of weights replace those in 16 bits (8-bit formats).

    Software that reduces gradients in buckets of `bucket_elements` has one (two where the reduction overlaps)
    whole for all of a backward pass, and a copy of a bucket while it is reduced. It gathers sharded
    parameters ahead until `gathered_elements` are there, and casts gradients of `update_elements` to fp32 at
    a time for the optimizer. With `keeps_narrow_gradients` unsharded fp32 gradients exist in addition to
    those in the dtype of the weights. With `offloads_gradients` sharded gradients go to the host with the
    optimizer. The host then has `host_weight_bytes` per weight in addition to optimizer states (0: a master
    copy and the weight), and `host_process_bytes` per process.

    `offload_modules` are the modules of a layer whose saved tensors are on the host, joined by `+`
    (`shardwise.model.offloaded_tensors`).

    `options` are the options of the software that were set, or are on by default, with their values
    (`Target.with_options`); the other fields have what follows from them.
    """

    name: str
    described: str
    attention: tuple[str, ...]
    tensor_overlap: float
    tensor_backward_overlap: float
    context_overlap: float
    expert_overlap: float
    data_overlap: float
    state_overlap: float
    shard_overlap: float
    pipeline_overlap: float
    pointwise_passes: float
    dispatch_s: float
    expert_dispatch_s: float
    host_action_s: float
    host_step_s: float
    warm_band: tuple[float, float]
    cold_band: tuple[float, float]
    reduce_in_fp32: bool
    zero_stages: tuple[int, ...]
    recomputes: tuple[str, ...]
    recompute_stops_early: bool
    applies_dropout: bool
    sequence_parallel: bool
    buffers_all_microbatches: bool
    keeps_gathered_inputs: bool
    reduces_by_block: bool
    provenance: Mapping[str, str] = field(hash=False)
    peak_errors: PeakErrors = field(default_factory=lambda: peak_errors_of(()))
    loss: str = "in_place"
    keeps_low_precision_weights: bool = False
    eager_modules: bool = False
    shards_experts_by_instance: bool = False
    whole_in_pipelines: bool = False
    keeps_split_graphs: bool = False
    needs_sequence_parallel: bool = False
    linked_devices: int = 0
    accumulates_in_fp32: bool = False
    moment_bytes: float = 4.0
    master_bytes: float = 4.0
    accumulated_bytes: float = 0.0
    fuses_accumulation: bool = False
    expert_bias_forward_bytes: float = 0.0
    expert_bias_backward_bytes: float = 0.0
    has_fp8_parameters: bool = False
    bucket_elements: float = 0.0
    gathered_elements: float = 0.0
    update_elements: float = 0.0
    keeps_narrow_gradients: bool = False
    offloads_gradients: bool = False
    host_weight_bytes: float = 0.0
    host_process_bytes: float = 0.0
    offload_modules: str = ""
    has_wide_frozen_weights: bool = False
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def band(self, *, is_calibrated: bool) -> tuple[float, float]:
        """The factors on the step time for devices that were fitted (`is_calibrated`), or were not."""
        return self.warm_band if is_calibrated else self.cold_band

    def without_overlap(self) -> Profile:
        """The same software without any overlap of communication."""
        none: dict[str, Any] = {f"{kind}_overlap": 0.0 for kind in OVERLAPS}
        return replace(self, **none)

    def with_costs(self, other: Profile) -> Profile:
        """The same software with the memory-bound passes and the host times of `other`."""
        costs: dict[str, Any] = {name: getattr(other, name) for name in _COSTS}
        return replace(self, **costs)


LOSSES = ("in_place", "megatron", "eager", "compiled", "fused")
"""Implementations of the cross entropy of logits, by the tensors that exist at once.

`in_place`: fp32 logits, which their gradient overwrites. `megatron`: the head's output as well (Megatron-LM,
also with its fused loss). `eager`: log-probabilities and two gradients in fp32 (PyTorch, one kernel per
operator). `compiled`: the head's output and its gradient (torch.compile). `fused`: the head's output, which
its gradient overwrites (kernels of Transformer Engine and Liger)."""

OVERLAPS = ("tensor", "tensor_backward", "context", "expert", "data", "state", "shard", "pipeline")
"""Communications that software can overlap with computation; `*_overlap` of Profile."""


@cache
def _data() -> dict[str, Any]:
    """The package's own file, so it is read without the checks for users' files."""
    text = Path(__file__).with_name("data").joinpath("profiles.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def profile_numbers() -> tuple[Number, ...]:
    """Every number of the software profiles, once."""
    return numbers_of(_data()["numbers"])


def profile_of(name: str, numbers: Iterable[Number]) -> Profile:
    """The software called `name`, with these numbers. Fields that it does not set come from the software
    that it is `like`."""
    lineage = _lineage(name)
    words: dict[str, Any] = {}
    for ancestor in lineage:
        words |= _data()["software"][ancestor]
    words.pop("like", None)
    overlaps = words.pop("overlaps")
    found = most_specific(numbers, lineage)
    bands = _data()["bands"]
    words |= {f"{kind}_band": tuple(float(end) for end in bands[kind]) for kind in ("warm", "cold")}
    values: dict[str, Any] = {f"{kind}_overlap": 1.0 if kind in overlaps else 0.0 for kind in OVERLAPS}
    values |= {field: number.value for field, number in found.items()}
    if "state_overlap" not in found:
        values["state_overlap"] = values["data_overlap"]
    values |= {key: tuple(value) if isinstance(value, list) else value for key, value in words.items()}
    return Profile(
        **values,
        name=name,
        provenance={field: number.source for field, number in found.items()},
        peak_errors=peak_errors_of(lineage),
    )


def numbers_of_profile(name: str, numbers: Iterable[Number]) -> tuple[Number, ...]:
    """The numbers that apply to the software called `name`."""
    return tuple(most_specific(numbers, _lineage(name)).values())


def kind_of_profile(name: str) -> str:
    """The kind of software, such as `megatron`, whose runs share a distribution of peak memory."""
    return kind_of_software(_lineage(name))


def _lineage(name: str) -> list[str]:
    """The chain of software that `name` is `like`, most general first; `name` itself comes last."""
    lineage = [name]
    while like := _data()["software"][lineage[0]].get("like"):
        lineage.insert(0, like)
    return lineage


_RARE_FIELDS = (
    "needs_sequence_parallel",
    "linked_devices",
    "accumulates_in_fp32",
    "moment_bytes",
    "master_bytes",
    "accumulated_bytes",
    "fuses_accumulation",
    "expert_bias_forward_bytes",
    "expert_bias_backward_bytes",
    "has_fp8_parameters",
    "bucket_elements",
    "gathered_elements",
    "update_elements",
    "keeps_narrow_gradients",
    "offloads_gradients",
    "host_weight_bytes",
    "host_process_bytes",
    "offload_modules",
    "has_wide_frozen_weights",
    "options",
)
"""Fields that files have only where they differ from the default of Profile."""

_OPTIONAL_FIELDS = (
    "peak_errors",
    "state_overlap",
    "applies_dropout",
    "loss",
    "keeps_low_precision_weights",
    "eager_modules",
    "shards_experts_by_instance",
    "whole_in_pipelines",
    "keeps_split_graphs",
    *_RARE_FIELDS,
)
"""Fields that a file may lack."""


def job_record(job: Job) -> dict[str, Any]:
    """A job as plain values, with its whole profile; `mean_sample_len` only where samples are packed."""
    record = asdict(job)
    if job.mean_sample_len is None:
        del record["mean_sample_len"]
    for each in dataclass_fields(Profile):
        default = each.default if each.default is not MISSING else {}
        if each.name in _RARE_FIELDS and record["profile"][each.name] == default:
            del record["profile"][each.name]
    return record


def profile_from_record(fields: Fields) -> Profile:
    """The inverse of `dataclasses.asdict` for a Profile. Every field is required except `_OPTIONAL_FIELDS`.

    Raises ConfigError for a missing or unknown field and for values out of range.
    """
    values = {
        each.name: _value(fields, each.name, str(each.type))
        for each in dataclass_fields(Profile)
        if each.name not in _OPTIONAL_FIELDS or fields.has(each.name)
    }
    name = values["name"]
    values.setdefault("peak_errors", peak_errors_of(_lineage(name) if name in _data()["software"] else ()))
    values.setdefault("state_overlap", values["data_overlap"])
    values.setdefault("applies_dropout", True)
    values.setdefault("loss", "megatron" if values["reduces_by_block"] else "in_place")
    values.setdefault("keeps_low_precision_weights", False)
    values.setdefault("eager_modules", False)
    values.setdefault("shards_experts_by_instance", False)
    values.setdefault("whole_in_pipelines", False)
    values.setdefault("keeps_split_graphs", False)
    if values["loss"] not in LOSSES:
        raise fields.unknown("loss", values["loss"], LOSSES, "is not known")
    fields.finish()
    profile = Profile(**values)
    if profile.tensor_overlap + profile.tensor_backward_overlap > 1.0:
        raise fields.error(
            "tensor_backward_overlap", "is too large", allowed="at most 1 in sum with tensor_overlap"
        )
    return profile


def _value(fields: Fields, name: str, kind: str) -> Any:
    """One field of a profile's record, by its type."""
    if kind == "float":
        return fields.number(name, low=0.0, high=_highest(name))
    if kind == "int":
        return fields.integer(name, low=0, high=1e6)
    if kind == "bool":
        return fields.boolean(name)
    if name == "offload_modules" and fields.any(name) == "":
        return ""
    if kind == "str":
        return fields.text(name, max_length=1000)
    if kind == "PeakErrors":
        return _peak_errors(fields.mapping(name))
    if kind.startswith("Mapping"):
        sources = fields.mapping(name)
        texts = {key: sources.text(key, max_length=10_000) for key in sources.names}
        sources.finish()
        return texts
    is_band = kind == "tuple[float, float]"
    given = fields.sequence(name, low=2, high=2) if is_band else fields.sequence(name)
    listed = {str(place): item for place, item in enumerate(given)}
    items = Fields(listed, file=fields.file, key=join_key(fields.key, name))
    if kind == "tuple[int, ...]":
        return tuple(items.integer(place, low=0, high=3) for place in items.names)
    if is_band:
        return tuple(items.number(place, low=0.0, high=1e3) for place in items.names)
    return tuple(items.text(place) for place in items.names)


def _highest(name: str) -> float:
    """The largest value of a number."""
    if name.endswith("_overlap"):
        return 1.0
    return 1e15 if name.endswith("_elements") or name == "host_process_bytes" else 1e3


def _peak_errors(fields: Fields) -> PeakErrors:
    errors = PeakErrors(
        kind=fields.text("kind"),
        bias=fields.number("bias", low=-10.0, high=10.0),
        spread=fields.number("spread", low=0.0, high=10.0),
        sources=fields.integer("sources", low=0),
        rows=fields.integer("rows", low=0),
    )
    fields.finish()
    return errors


PROFILES: Mapping[str, Profile] = {name: profile_of(name, profile_numbers()) for name in _data()["software"]}
"""The shipped software profiles by name."""

MEGATRON_2024 = PROFILES["megatron-2024"]

NEWEST_MEGATRON_LM = PROFILES["megatron-lm-0.19"]
"""The profile of a question that names neither a target nor software."""


CALIBRATION_SCHEMA = "shardwise.calibration"
CALIBRATION_VERSION = 1

OWN_PROFILE = "shardwise"
"""Name of our own runtime as software, which `calibrate` measures."""

_COSTS = ("pointwise_passes", "dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
_SWITCHES = ("recompute_stops_early", "applies_dropout")
_NUMBERS = (*_COSTS, *(f"{kind}_overlap" for kind in OVERLAPS))

CALIBRATED_FIELDS = ("attention", *_SWITCHES, *_NUMBERS)
"""Fields of a profile that a calibration may have; all others are those of the known software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFactor:
    """How much longer than predicted steps of a workload take: of a model with this number of `parameters` in
    a number format. `model` is its name, for people."""

    model: str
    parameters: int
    dtype: str
    time_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured `devices` by the name of the known device that each replaces, and the measured software, or
    None. `workloads` have their own factors on the times of these devices and of this software. `machine`
    says where and when they were measured."""

    machine: str
    devices: Mapping[str, Device]
    profile: Profile | None
    workloads: tuple[WorkloadFactor, ...] = ()

    def time_factor(self, parameters: int, dtype: str) -> float:
        """The factor on the step time of a model with this number of parameters; 1 where it was not
        measured."""
        own = [each for each in self.workloads if (each.parameters, each.dtype) == (parameters, dtype)]
        return own[0].time_factor if own else 1.0

    def profile_of(self, dtype: str, *, has_experts: bool) -> Profile | None:
        """The profile for training such a model: our own runtime overlaps gradient reduction with the
        backward pass only for dense models in fp32."""
        return self.profile if dtype == "fp32" and not has_experts else self.profile_without_data_overlap

    @property
    def profile_without_data_overlap(self) -> Profile | None:
        """The profile without overlapped gradient reduction for our own runtime, as under plans of
        operator graphs."""
        if self.profile is None or self.profile.name != OWN_PROFILE:
            return self.profile
        return replace(self.profile, data_overlap=0.0)


def read_calibration(path: str) -> Calibration:
    """The calibration in the file at `path`; docs/reference/formats.md has its keys. Raises ConfigError
    where it is not one."""
    fields = Fields(read_mapping(path), file=path)
    if (schema := fields.any("schema", default=None)) != CALIBRATION_SCHEMA:
        raise fields.error(
            "schema", "is not a calibration", found=short_repr(schema), allowed=CALIBRATION_SCHEMA
        )
    version = fields.integer("version", low=1, high=10**9)
    if version > CALIBRATION_VERSION:
        raise fields.error(
            "version", "is newer", found=str(version), allowed=f"at most {CALIBRATION_VERSION}"
        )
    machine = fields.text("machine", max_length=300)
    source = MEASURED + machine
    devices = {}
    for name, part in fields.mapping("classes").items():
        known = _known(part, name)
        devices[known.name] = device_of(part, name=known.name, base=known, given=source)
    profile = _profile(fields.mapping("software"), source) if fields.has("software") else None
    workloads = tuple(_workloads(fields)) if fields.has("workloads") else ()
    if fields.has("measured"):  # source measurements: for people, not used
        fields.any("measured")
    fields.finish()
    return Calibration(machine=machine, devices=devices, profile=profile, workloads=workloads)


def _workloads(fields: Fields) -> Iterator[WorkloadFactor]:
    for part in fields.mappings("workloads"):
        yield WorkloadFactor(
            model=part.text("model", max_length=300),
            parameters=part.integer("parameters", low=1, high=1e15),
            dtype=part.text("dtype"),
            time_factor=part.number("time_factor", low=1e-3, high=1e3),
        )
        part.finish()


def _known(part: Fields, name: str) -> Device:
    """The known device that a class refers to; the name of the class must equal the device's name."""
    text = part.text("device")
    try:
        known = find_device(text)
    except ConfigError as error:
        raise part.error("device", error.message, found=error.found, allowed=error.allowed) from None
    if known.name != name:
        raise part.error("device", "differs from the name of its class", found=short_repr(text), allowed=name)
    return known


def _profile(part: Fields, source: str) -> Profile:
    """Known software with some of its numbers replaced."""
    like = part.choice("like", PROFILES)
    values: dict[str, Any] = {
        name: part.number(name, low=0.0, high=1.0 if name.endswith("_overlap") else 1e3)
        for name in _NUMBERS
        if part.has(name)
    }
    if "data_overlap" in values:
        values.setdefault("state_overlap", values["data_overlap"])
    if part.has("attention"):
        kernels = enumerate(part.sequence("attention"))
        listed = Fields(
            {str(place): kernel for place, kernel in kernels},
            file=part.file,
            key=join_key(part.key, "attention"),
        )
        values["attention"] = tuple(listed.choice(place, ATTENTION_KERNELS) for place in listed.names)
    values |= {name: part.boolean(name) for name in _SWITCHES if part.has(name)}
    profile = replace(
        PROFILES[like],
        name=part.text("name", default=like),
        provenance={**PROFILES[like].provenance, **dict.fromkeys(values, source)},
        **values,
    )
    if profile.tensor_overlap + profile.tensor_backward_overlap > 1.0:
        raise part.error(
            "tensor_backward_overlap", "is too large", allowed="at most 1 in sum with tensor_overlap"
        )
    part.finish()
    return profile


Optimizer = Literal["adamw", "adafactor", "sgd", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job: batch, precision, optimizer and margins.

    `dtype` is a plain dtype (`fp32`, `tf32`, `fp16`, `bf16`) or a recipe (`fp8`, `fp8-current`, `fp8-block`,
    `mxfp8`, `nvfp4`). `memory_margin` is the fraction of the device memory that stays free.
    `expert_imbalance` is the load of the busiest expert rank over the mean. `profile` is the software that
    runs it.

    `mean_sample_len` is the length in tokens of the samples that are packed into a sequence, 1 to `seq_len`;
    tokens attend within their sample. None: a sequence is one sample.
    """

    seq_len: int
    global_batch_size: int
    dtype: str
    optimizer: Optimizer = "adamw"
    memory_margin: float = 0.05
    expert_imbalance: float = 1.1
    seed: int = 0
    profile: Profile = MEGATRON_2024
    mean_sample_len: int | None = None

    @property
    def attention_len(self) -> int:
        """Tokens of the stretch within which attention is computed: of a packed sample, else of the
        sequence. Everything that prices or counts attention reads the length here."""
        return self.seq_len if self.mean_sample_len is None else self.mean_sample_len

    @property
    def is_packed(self) -> bool:
        """Whether a sequence has several samples."""
        return self.attention_len < self.seq_len

    def with_seq_len(self, seq_len: int) -> Job:
        """The job with sequences of this length; samples are no longer than they."""
        sample = self.mean_sample_len
        return replace(
            self, seq_len=seq_len, mean_sample_len=None if sample is None else min(sample, seq_len)
        )
