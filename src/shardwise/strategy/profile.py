"""Software profiles, calibration files and the training job.

A `Profile` holds the numbers and features of one generation of training software (overlaps, host times, ZeRO
stages); `PROFILES` are the shipped ones. A `Calibration` holds measured devices and software that replace the
shipped ones. A `Job` is the request besides the model and the cluster: batch, sequence length, dtype,
optimizer, margins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise.cluster import ATTENTION_KERNELS, MEASURED, Device, device_of, find_device
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, join_key, read_mapping, short_repr
from shardwise.numbers import Number, most_specific, numbers_of


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
    of an unseen source: warm where its devices were fitted, cold where not.

    `reduce_in_fp32`: gradients are accumulated and reduced in fp32 (else in the dtype of the weights).
    `zero_stages` are the supported ZeRO stages, `recomputes` the supported values of recomputation. With
    `recompute_stops_early` recomputation ends with the last tensor that the backward pass needs, before the
    layer's last matmul. With `applies_dropout` a model that has dropout runs its passes and saves its masks.
    `sequence_parallel` is the default of that field. With `buffers_all_microbatches` stages keep their send
    and receive buffers of a whole step. With `keeps_gathered_inputs` tensor ranks save the gathered input of
    a matmul; else they save their shard and all-gather it again (Korthikanti et al. 2022). With
    `reduces_by_block` gradients exist for one block at a time, unless micro-batches accumulate them, and each
    rank has its shard of fp32 weights in addition to the full weights (PyTorch's fully_shard).
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

    def band(self, *, is_calibrated: bool) -> tuple[float, float]:
        """The factors on the step time for devices that were fitted (`is_calibrated`), or were not."""
        return self.warm_band if is_calibrated else self.cold_band

    def without_overlap(self) -> Profile:
        """The same software without any overlap of communication."""
        none: dict[str, Any] = {f"{kind}_overlap": 0.0 for kind in OVERLAPS}
        return replace(self, **none)


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
    return Profile(**values, name=name, provenance={field: number.source for field, number in found.items()})


def numbers_of_profile(name: str, numbers: Iterable[Number]) -> tuple[Number, ...]:
    """The numbers that apply to the software called `name`."""
    return tuple(most_specific(numbers, _lineage(name)).values())


def _lineage(name: str) -> list[str]:
    """The chain of software that `name` is `like`, most general first; `name` itself comes last."""
    lineage = [name]
    while like := _data()["software"][lineage[0]].get("like"):
        lineage.insert(0, like)
    return lineage


_OPTIONAL_FIELDS = ("state_overlap", "applies_dropout")
"""Fields that older files lack."""


def profile_from_record(fields: Fields) -> Profile:
    """The inverse of `dataclasses.asdict` for a Profile. Every field is required except `_OPTIONAL_FIELDS`.

    Raises ConfigError for a missing or unknown field and for values out of range.
    """
    values = {
        each.name: _value(fields, each.name, str(each.type))
        for each in dataclass_fields(Profile)
        if each.name not in _OPTIONAL_FIELDS or fields.has(each.name)
    }
    values.setdefault("state_overlap", values["data_overlap"])
    values.setdefault("applies_dropout", True)
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
        return fields.number(name, low=0.0, high=1.0 if name.endswith("_overlap") else 1e3)
    if kind == "bool":
        return fields.boolean(name)
    if kind == "str":
        return fields.text(name, max_length=1000)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured `devices` by the name of the known device that each replaces, and the measured software, or
    None. `machine` says where and when they were measured."""

    machine: str
    devices: Mapping[str, Device]
    profile: Profile | None

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
    if fields.has("measured"):  # source measurements: for people, not used
        fields.any("measured")
    fields.finish()
    return Calibration(machine=machine, devices=devices, profile=profile)


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

    `dtype` is a plain dtype (`fp32`, `fp16`, `bf16`) or a recipe (`fp8`, `fp8-current`, `fp8-block`, `mxfp8`,
    `nvfp4`). `memory_margin` is the fraction of the device memory that stays free. `expert_imbalance` is the
    load of the busiest expert rank over the mean. `profile` is the software that runs it.
    """

    seq_len: int
    global_batch_size: int
    dtype: str
    optimizer: Optimizer = "adamw"
    memory_margin: float = 0.05
    expert_imbalance: float = 1.1
    seed: int = 0
    profile: Profile = MEGATRON_2024
