"""Reads devices and efficiencies from files: complete ones, or changes to a known device.

`device_of` reads keys with units; `efficiency_from_record` reads the record that plan files embed.
docs/reference/formats.md describes the keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from shardwise.cluster.device import CURVES, MEASURED, NATIVE, AttentionCurve, Device, Efficiency
from shardwise.cluster.ranges import DEVICE, DEVICE_PRICE, PEAK
from shardwise.inputs import Fields, short_repr

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
"""Dtypes of dense matrix peaks."""

ATTENTION_KERNELS = ("flash-1", "flash-2", "flash-3", "cudnn", "efficient")
"""Generations of fused attention kernels."""

_GIVEN = "given"
_NAMES = ("vendor", "scale_up_name", "scale_out_name")

_Keys = Mapping[str, tuple[str, str]]
"""Figures of a device: the key of each, and its unit, `count` or `text`. `DEVICE` has their ranges."""

_OWN: _Keys = {
    "vendor": ("vendor", "text"),
    "memory_bytes": ("memory", "B"),
    "memory_bytes_per_s": ("memory_bandwidth", "B/s"),
    "devices_per_node": ("devices_per_node", "count"),
}
_PARTS: Mapping[str, _Keys] = {
    "scale_up": {
        "scale_up_name": ("name", "text"),
        "scale_up_domain": ("domain", "count"),
        "scale_up_bytes_per_s": ("bandwidth", "B/s"),
        "scale_up_latency_s": ("latency", "s"),
    },
    "scale_out": {
        "scale_out_name": ("name", "text"),
        "nics_per_node": ("cards_per_node", "count"),
        "scale_out_bytes_per_s": ("bandwidth", "B/s"),
        "scale_out_latency_s": ("latency", "s"),
    },
    "host": {"host_link_bytes_per_s": ("link", "B/s"), "host_memory_bytes": ("memory", "B")},
}


def device_of(
    fields: Fields,
    *,
    name: str,
    base: Device | None = None,
    efficiency: Efficiency | None = None,
    given: str = _GIVEN,
) -> Device:
    """The device that `fields` describe; absent keys keep the figures of `base`.

    Without a base every figure is required, and `fields.efficiency` changes `efficiency`. `given` is the
    source of figures that state none. Raises ConfigError for wrong and for unknown keys.
    """
    figures = _own_figures(fields, base)
    for key, keys in _PARTS.items():
        part = fields.mapping(key, default={}) if base else fields.mapping(key)
        figures |= _figures(part, base, keys)
        if key == "scale_up":
            figures |= _switch_and_links(part, base)
        part.finish()
    efficiency = efficiency_from_fields(fields, base.efficiency if base else efficiency, given)
    sources = {} if base is None else dict(base.sources)
    changed = {key for key in figures if figures[key] not in (getattr(base, key, None), ())}
    sources |= {key: given for key in figures if key in changed and key not in _NAMES}
    if fields.has("sources"):
        sources |= _texts(fields.mapping("sources"))
    fields.finish(allowed=("aliases", "architecture") if base is None else ())
    backend = NATIVE if base is None else base.backend
    return Device(name=name, efficiency=efficiency, sources=sources, backend=backend, **figures)


def _texts(fields: Fields) -> dict[str, str]:
    return {key: fields.text(key, max_length=400) for key in fields.names}


def _own_figures(fields: Fields, base: Device | None) -> dict[str, Any]:
    """Vendor, peaks, memory, devices of the default node, and price."""
    if fields.has("peak") or base is None:
        peaks = fields.mapping("peak")
        peak = {dtype: peaks.quantity(dtype, unit="FLOP/s", **PEAK) for dtype in DTYPES if peaks.has(dtype)}
        peaks.finish()
        if not peak:
            raise fields.error("peak", "has no dtype", allowed=", ".join(DTYPES))
    else:
        peak = dict(base.peak_flop_per_s)
    price = base.price_usd_per_hour if base else None
    if fields.has("price"):
        price = fields.quantity("price", unit="USD/h", **DEVICE_PRICE)
    own = _figures(fields, base, _OWN)
    own["memory_bytes"] = round(own["memory_bytes"])
    return {"peak_flop_per_s": peak, **own, "price_usd_per_hour": price}


def _figures(part: Fields, base: Device | None, keys: _Keys) -> dict[str, Any]:
    """The figures under `keys`: those of `base` where the file does not give them."""
    found: dict[str, Any] = {}
    for figure, (key, unit) in keys.items():
        known = getattr(base, figure, None)
        if known is not None and not part.has(key):
            found[figure] = known
        elif unit == "text":
            found[figure] = part.text(key)
        elif unit == "count":
            found[figure] = part.integer(key, low=DEVICE[figure]["low"], high=DEVICE[figure]["high"])
        else:
            found[figure] = part.quantity(key, unit=unit, **DEVICE[figure])
    return found


def _switch_and_links(part: Fields, base: Device | None) -> dict[str, Any]:
    reduces = base.scale_up_in_switch_reduction if base else False
    return {
        "scale_up_in_switch_reduction": part.boolean("in_switch_reduction", default=reduces),
        "scale_up_links": _links(part) if part.has("links") else base.scale_up_links if base else (),
    }


def _links(part: Fields) -> tuple[tuple[int, int], ...]:
    """`links: {devices: links}`: the links of a device inside a group of that many devices."""
    links = part.mapping("links")
    found = []
    for name in links.names:
        if not re.fullmatch(r"[1-9][0-9]{0,5}", name) or int(name) < 2:
            raise links.error(name, "is not a number of devices", allowed="2 or more devices")
        found.append((int(name), links.integer(name, low=1, high=1e6)))
    return checked_links(part, "links", sorted(found))


def checked_links(part: Fields, name: str, links: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The pairs (devices of a group, links of a device inside it), in ascending order.

    Raises ConfigError where there is no entry for 2 devices, or a larger group has fewer links."""
    counts = [count for _, count in links]
    if not links or links[0][0] > 2 or counts != sorted(counts):
        allowed = "those of 2 devices, and no fewer in larger groups"
        raise part.error(name, "are not links of groups", found=short_repr(dict(links)), allowed=allowed)
    return tuple(links)


# Efficiency
def efficiency_from_fields(fields: Fields, base: Efficiency | None, given: str = _GIVEN) -> Efficiency:
    """`base` with the values of `fields.efficiency`. ConfigError where `base` is None."""
    if base is None:
        raise fields.error("efficiency", "is unknown", allowed="a device class based on a known device")
    if not fields.has("efficiency"):
        return base
    part = fields.mapping("efficiency")
    changes, provenance = _curve_changes(part, base, given)
    if part.has("attention"):
        changes["attention"], of_attention = _attention_changes(part.mapping("attention"), base, given)
        provenance |= of_attention
    for name in _scalars():
        if part.has(name):
            changes[name] = _scalar(part, name)
            provenance[name] = given
    if part.has("is_calibrated"):
        changes["is_calibrated"] = part.boolean("is_calibrated")
    elif given.startswith(MEASURED) and "matmul" in changes:
        changes["is_calibrated"] = True
    if part.has("provenance"):
        provenance |= _texts(part.mapping("provenance"))
    part.finish()
    return replace(base, **changes, provenance={**base.provenance, **provenance})


def _curve_changes(part: Fields, base: Efficiency, given: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Curves with single fields replaced, and the provenance of the new values."""
    changes: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for name in CURVES:
        if not part.has(name):
            continue
        curve, values = part.mapping(name), {}
        for field in dataclass_fields(getattr(base, name)):
            if curve.has(field.name):
                values[field.name] = _curve_value(curve, field.name, str(field.type))
                provenance[f"{name}.{field.name}"] = given
        curve.finish()
        changes[name] = replace(getattr(base, name), **values)
    return changes, provenance


def _attention_changes(
    part: Fields, base: Efficiency, given: str
) -> tuple[dict[str, AttentionCurve], dict[str, str]]:
    """Attention kernels with single fields replaced or whole kernels added, and their provenance."""
    kernels, provenance = dict(base.attention), {}
    for name in part.names:
        if name not in ATTENTION_KERNELS:
            raise part.unknown(name, name, ATTENTION_KERNELS, "is not an attention kernel")
        curve, known = part.mapping(name), base.attention.get(name)
        values: dict[str, Any] = {}
        for field in dataclass_fields(AttentionCurve):
            if known is None or curve.has(field.name):
                values[field.name] = _curve_value(curve, field.name, str(field.type))
                provenance[f"attention.{name}.{field.name}"] = given
        curve.finish()
        kernels[name] = AttentionCurve(**values) if known is None else replace(known, **values)
    return kernels, provenance


def _curve_value(curve: Fields, name: str, kind: str) -> float | int | str:
    if kind == "str":
        return curve.text(name)
    if kind == "int":
        return curve.integer(name, low=1, high=1e6)
    if name in ("peak_fraction", "forward_fraction", "backward_fraction"):  # of the peak
        return curve.number(name, low=1e-6, high=1.0)
    if name.endswith("fraction"):
        return curve.number(name, low=1e-6, high=2.0)
    if name == "crowding":
        return curve.number(name, low=0.0, high=1.0)
    return curve.number(name, low=0.0, high=10.0 if name.endswith("_s") else 1e12)


def _scalar(part: Fields, name: str) -> float:
    """One cost or fraction, within its physical range."""
    if name.endswith("fraction"):
        return part.number(name, low=1e-6, high=1.0)
    if name == "overlap_slowdown":
        return part.number(name, low=1.0, high=10.0)
    return part.number(name, low=0.0, high=1e12 if name.endswith("bytes") else 10.0)


def _curve(part: Fields, kind: type[Any]) -> Any:
    """A curve from its record; fields with a default may be absent."""
    values = {
        field.name: _curve_value(part, field.name, str(field.type))
        for field in dataclass_fields(kind)
        if field.default is MISSING or part.has(field.name)
    }
    part.finish()
    return kind(**values)


def _scalars() -> dict[str, bool]:
    """The costs that are not per byte or flop; whether a record must have them."""
    return {
        field.name: field.default is MISSING
        for field in dataclass_fields(Efficiency)
        if str(field.type) == "float"
    }


def efficiency_from_record(fields: Fields) -> Efficiency:
    """The inverse of `dataclasses.asdict` for an Efficiency; fields with a default may be absent."""
    values: dict[str, Any] = {name: _curve(fields.mapping(name), kind) for name, kind in CURVES.items()}
    kernels = fields.mapping("attention")
    values["attention"] = {name: _curve(kernels.mapping(name), AttentionCurve) for name in kernels.names}
    for name, is_required in _scalars().items():
        if is_required or fields.has(name):
            values[name] = _scalar(fields, name)
    values["is_calibrated"] = fields.boolean("is_calibrated")
    values["provenance"] = _texts(fields.mapping("provenance"))
    fields.finish()
    return Efficiency(**values)
