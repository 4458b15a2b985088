"""A calibration file: devices and software with measured numbers, in the place of the shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster import ATTENTION_KERNELS, MEASURED, Device, device_of, find_device
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, join_key, read_mapping, short_repr
from shardwise.strategy.profile import OVERLAPS, PROFILES, Profile

CALIBRATION_SCHEMA = "shardwise.calibration"
CALIBRATION_VERSION = 1

OWN_PROFILE = "shardwise"
"""What software that `calibrate` measured, our own runtime, is called."""

_COSTS = ("pointwise_passes", "dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
_SWITCHES = ("recompute_stops_early", "applies_dropout")
_NUMBERS = (*_COSTS, *(f"{kind}_overlap" for kind in OVERLAPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured `devices` by the name of the known device that each replaces, and the software that runs on
    them, None where it was not measured; `machine` says where and when."""

    machine: str
    devices: Mapping[str, Device]
    profile: Profile | None

    def profile_of(self, dtype: str, *, has_experts: bool) -> Profile | None:
        """The software as it trains such a model: our own sums only the gradients of dense models in fp32
        beside a backward pass."""
        return self.profile if dtype == "fp32" and not has_experts else self.profile_without_data_overlap

    @property
    def profile_without_data_overlap(self) -> Profile | None:
        """The software where our own waits for its sums of gradients, as under plans of operator graphs."""
        if self.profile is None or self.profile.name != OWN_PROFILE:
            return self.profile
        return replace(self.profile, data_overlap=0.0)


def read_calibration(path: str) -> Calibration:
    """The calibration in the file at `path`; docs/reference/formats.md has its keys. ConfigError where it is
    not one."""
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
    if fields.has("measured"):  # what the numbers were found from: for people
        fields.any("measured")
    fields.finish()
    return Calibration(machine=machine, devices=devices, profile=profile)


def _known(part: Fields, name: str) -> Device:
    """The known device that a class says it is; its own name says so too."""
    text = part.text("device")
    try:
        known = find_device(text)
    except ConfigError as error:
        raise part.error("device", error.message, found=error.found, allowed=error.allowed) from None
    if known.name != name:
        raise part.error("device", "is not what the class is called", found=short_repr(text), allowed=name)
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
            "tensor_backward_overlap", "hides more than there is", allowed="at most 1 with tensor_overlap"
        )
    part.finish()
    return profile
