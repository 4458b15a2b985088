"""Maps spellings in tables of measured runs to devices, software profiles, dtypes, models and networks.

`device_named` reads texts such as `H100-80GB`, `A100 (DGX A100)` or `H100-SXM 500W`. The other functions are
`profile_named`, `dtype_named`, `catalogue_model`, `family_named` and `inter_node_bytes_per_s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

from shardwise.cluster import Device, device_names, find_device
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.model import catalogue_names
from shardwise.units import parse_quantity

# Devices
FORM_FACTORS: Final = {"sxm": "SXM", "pcie": "PCIe", "nvl": "NVL"}
"""Form factors of a part; each is a device of its own where the catalogue has it."""

BOARD_POWER_W: Final[Mapping[str, float]] = {
    "V100-16G": 300.0, "V100-32G": 300.0, "T4": 70.0, "A30": 165.0, "A40": 300.0, "A16": 62.5,
    "RTX-A5000": 230.0, "RTX-A6000": 300.0, "L20": 275.0, "L40": 300.0, "H100-HBM2e": 700.0, "MI210": 300.0,
    "A100-40G": 400.0,
    "A100-80G": 400.0, "A800-80G": 400.0, "L4": 72.0, "L40S": 350.0, "RTX3090": 350.0, "RTX4090": 450.0,
    "RTX5090": 575.0, "RTX6000-Ada": 300.0, "RTX-PRO-6000": 600.0, "H20": 400.0, "H100-PCIe": 350.0,
    "H100-SXM": 700.0, "H100-NVL": 400.0, "H800": 700.0, "H200": 700.0, "B200": 1000.0, "GB200": 1200.0,
    "MI300X": 750.0, "MI325X": 1000.0, "MI355X": 1400.0, "Gaudi2": 600.0, "Gaudi3": 900.0,
}  # fmt: skip
"""Board power of each device in watts, from its data sheet."""

POWER_EXPONENT: Final = 1.0 / 3.0
"""Clock as a power of board power: dynamic power is clock times voltage squared, and voltage is proportional
to the clock."""

SAME_MEMORY: Final = 0.08
"""Largest relative difference of nominal memory and memory that the driver reports for the same part."""

REPORTED_GIB: Final = 0.985
"""GiB that drivers report per nominal gigabyte; the same for parts of 40, 80 and 141 GB."""

_MEMORY = re.compile(r"(?<![a-z0-9.])(\d{2,3})\s*gi?b?(?![a-z0-9])", re.IGNORECASE)
_POWER = re.compile(r"(?<![a-z0-9.])(\d{2,4})\s*w(?:atts?)?(?![a-z0-9])", re.IGNORECASE)
_COUNTED = re.compile(r"([^()+]{1,80})\((\d{1,7})\)")
_WITHIN = re.compile(r"\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class _Part:
    """A device of the catalogue: its name, its form factor ("" where the name has none), and the pattern that
    finds its part in a text."""

    name: str
    form_factor: str
    pattern: re.Pattern[str]


@lru_cache(maxsize=256)
def device_named(text: str) -> tuple[Device, tuple[str, ...]]:
    """The device that `text` names, and the assumptions.

    A variant of a known part is that part with another memory size or a power limit. A power limit lowers the
    peak by the cube root of the power. Where the text states no memory size and the part comes with several,
    the largest is taken, since the run did fit. Raises ConfigError where the text names no known device or
    several kinds.
    """
    power = _POWER.search(text)
    without_power = _POWER.sub(" ", text)
    device, assumed = _device(without_power, text)
    if power is not None:
        device, how = _limited(device, float(power.group(1)))
        assumed += how
    return device, tuple(assumed)


def counted_devices(text: str) -> tuple[tuple[str, int], ...]:
    """The kinds of devices in a text such as `V100(12)+T4(4)`, with their counts, in their order; empty for
    other texts."""
    parts = [_COUNTED.fullmatch(part.strip()) for part in text.split("+")]
    if len(parts) < 2 or not all(parts):
        return ()
    return tuple((part.group(1).strip(), int(part.group(2))) for part in parts if part is not None)


def _device(without_power: str, text: str) -> tuple[Device, list[str]]:
    plain = _WITHIN.sub(" ", without_power).strip()
    parts = _parts()
    for spelling in (plain, *_WITHIN.findall(without_power)):
        found = _found(parts, spelling)
        if len({part.pattern for part in found}) > 1:
            raise ConfigError(
                "names several kinds of devices",
                key="gpu",
                found=short_repr(text),
                allowed="one, or how many of each, as in V100(12)+T4(4)",
            )
        exact = _exact_device(spelling)
        if exact is not None:
            return exact, []
        if found:
            return _variant(found, spelling, text)
    raise ConfigError("is not a known device", key="gpu", found=short_repr(text))


def _found(parts: Sequence[_Part], spelling: str) -> list[_Part]:
    """The parts that a text names; `H100` within `H100-HBM2e` is none."""
    matches = [(part, match.span()) for part in parts if (match := part.pattern.search(spelling))]
    return [
        part
        for part, (start, end) in matches
        if not any(s <= start and end <= e and (s, e) != (start, end) for _, (s, e) in matches)
    ]


@cache
def _parts() -> tuple[_Part, ...]:
    return tuple(_part(name) for name in device_names())


def _part(name: str) -> _Part:
    """The part of a device, without memory and form factor: A100 for A100-80G, H100 for H100-PCIe."""
    words = name.casefold().split("-")
    form_factor = next((word for word in words if word in FORM_FACTORS), "")
    part_words = [word for word in words if word not in FORM_FACTORS and not _MEMORY.fullmatch(word)]
    tokens = re.findall(r"[a-z]+|\d+", " ".join(part_words))
    spelled = r"[\s_-]*".join(tokens)
    pattern = rf"(?:(?<![a-z0-9])|(?<=\dx)){spelled}(?:(?![a-z0-9])|(?=sxm|pcie|nvl))"
    return _Part(name, form_factor, re.compile(pattern, re.IGNORECASE))


def _exact_device(spelling: str) -> Device | None:
    """The device with exactly this name or a known alias; None where there is none."""
    try:
        return find_device(spelling)
    except ConfigError:
        return None


def _variant(found: Sequence[_Part], spelling: str, text: str) -> tuple[Device, list[str]]:
    """The closest device of a part, with the stated memory size, and the assumptions."""
    folded = spelling.casefold()
    form_factor = next(
        (form_factor for form_factor in FORM_FACTORS if re.search(rf"{form_factor}(?![a-z])", folded)), ""
    )
    candidates = [part for part in found if part.form_factor == (form_factor or "sxm")] or list(found)
    devices = [find_device(part.name) for part in candidates]
    memory = _MEMORY.search(spelling)
    nominal_bytes = 0 if memory is None else int(memory.group(1)) * 10**9
    if memory is None:
        device = max(devices, key=lambda device: device.memory_bytes)
    else:
        device = min(devices, key=lambda device: abs(device.memory_bytes / nominal_bytes - 1))
    assumed = [f"gpu: {short_repr(text)} taken as {device.name}"]
    if memory is None and len(devices) > 1:
        assumed[0] += ", with its larger memory"
    if memory is not None and abs(device.memory_bytes / nominal_bytes - 1) > SAME_MEMORY:
        device = replace(device, memory_bytes=round(int(memory.group(1)) * 2**30 * REPORTED_GIB))
        assumed.append(f"gpu: memory of {memory.group(1)} GB instead of the catalogue's")
    has_form_factor = any(part.form_factor == form_factor for part in found)
    if form_factor in ("pcie", "nvl") and not has_form_factor:
        assumed.append(
            f"gpu: the {FORM_FACTORS[form_factor]} form factor is not modelled; clock and links are those of "
            f"{device.name}"
        )
    return device, assumed


def _limited(device: Device, limit_w: float) -> tuple[Device, list[str]]:
    """The device under a power limit, which lowers its peaks by the cube root of the power."""
    whole_w = BOARD_POWER_W.get(device.name)
    if whole_w is None:
        return device, [f"gpu: a power limit of {limit_w:g} W is not modelled for {device.name}"]
    factor = min(limit_w / whole_w, 1.0) ** POWER_EXPONENT
    if factor == 1.0:
        return device, []
    peaks = {dtype: peak * factor for dtype, peak in device.peak_flop_per_s.items()}
    return replace(device, peak_flop_per_s=peaks), [
        f"gpu: peaks times {factor:.3f}, the cube root of {limit_w:g} W of {whole_w:g} W"
    ]


# Software, dtypes and models
_FRAMEWORKS: Final[tuple[tuple[str, tuple[tuple[float, str], ...]], ...]] = (
    ("megatron-bridge", ((2026.06, "megatron-2026-06"), (2026, "megatron-2026"), (0, "megatron-2025"))),
    ("automodel", ((0, "fsdp2"),)),
    ("nemo", ((0, "megatron-2024"),)),
    ("megatron-deepspeed", ((2023, "deepspeed"), (0, "deepspeed-2022"))),
    ("deepspeed", ((2023, "deepspeed"), (0, "deepspeed-2022"))),
    ("torchtitan", ((0, "fsdp2"),)),
    ("fsdp2", ((0, "fsdp2"),)),
    ("fsdp", ((0, "fsdp"),)),
    ("llm-foundry", ((0, "fsdp"),)),
    (
        "megatron",
        (
            (2026.06, "megatron-2026-06"),
            (2026, "megatron-2026"),
            (2025, "megatron-2025"),
            (2023, "megatron-2024"),
            (2022, "megatron-2022"),
            (0, "megatron-2021"),
        ),
    ),
    ("oneflow", ((0, "oneflow"),)),
    ("maxtext", ((0, "maxtext"),)),
)
"""Words of framework names, the most specific first, with the profiles by year of the run, newest first."""


def profile_named(text: str, year: int | None, notes: str = "") -> str | None:
    """The software profile for a framework's name and year; None for an unknown framework.

    A container release in the notes (`container 26.06`: year and month) takes precedence over the year.
    Without a date the newest profile is taken.
    """
    folded = text.casefold()
    release = re.search(r"container (\d\d)\.(\d\d)", notes)
    date = 2000 + int(release.group(1)) + int(release.group(2)) / 100 if release else year
    for word, by_year in _FRAMEWORKS:
        if word in folded:
            return next(name for since, name in by_year if (date or 9999) >= since)
    return None


_DTYPES: Final = (
    ("mxfp8", "mxfp8"), ("fp8-mx", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8-cs", "fp8-current"),
    ("fp8-current", "fp8-current"), ("fp8-block", "fp8-block"), ("fp8-sc", "fp8-block"), ("fp8", "fp8"),
    ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("tf32", "tf32"),
    ("fp32", "fp32"), ("float32", "fp32"), ("float8", "fp8"), ("half", "fp16"),
)  # fmt: skip


_OTHER_DTYPES: Final = re.compile(r"u?int\d|mxfp[46]|fp6|hfp8|msfp")
"""Formats without a recipe."""


def dtype_named(text: str) -> str | None:
    """The dtype that a text such as `fp8(amp_fp8)` names; None where it names none, or also another format
    that has no recipe."""
    folded = text.casefold()
    if _OTHER_DTYPES.search(folded):
        return None
    return next((dtype for word, dtype in _DTYPES if word in folded), None)


def catalogue_model(text: str) -> str | None:
    """The catalogue's model that `text` names (`Qwen3_30B_a3B`, `DeepSeek V3 671B`), or None.

    The text may omit the number of active parameters (`Qwen3 MoE 30B`)."""
    spaced = re.sub(r"moe", " ", text, flags=re.IGNORECASE)
    found = [name for name in catalogue_names() if re.search(_spelled(name), spaced, re.IGNORECASE)]
    return max(found, key=len, default=None)


def _spelled(name: str) -> str:
    """A pattern for a model's name with any separators, without the number of active parameters."""
    tokens = re.findall(r"[a-z]+|\d+", re.sub(r"-a\d+b$", "", name))
    return r"[\s_.-]*".join(tokens) + r"(?!\d)"


def _plain(text: str) -> str:
    """The letters and digits of a text, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.casefold())


FAMILIES: Final = (
    "gpt-oss", "mt-nlg", "deepseek", "qwen", "llama", "mixtral", "mistral", "gemma", "nemotron", "kimi",
    "mpt", "opt", "bloom", "falcon", "phi", "gpt",
)  # fmt: skip
"""Families of models; where a name contains several, the first here counts."""


def family_named(text: str) -> str:
    """The family of models that `text` names: one of FAMILIES, else its leading letters."""
    plain = _plain(text)
    for family in FAMILIES:
        if _plain(family) in plain:
            return family
    first = re.match(r"[a-z]+", plain)
    return first.group() if first else text or "unnamed"


# Networks
_RATE = re.compile(r"(?:(\d{1,4})\s*x\s*)?(\d{1,6}(?:\.\d{1,6})?)\s*(Gb/s|Gbps|GB/s)", re.IGNORECASE)
_BETWEEN = re.compile(r"inter|infiniband|roce|ethernet|efa|network", re.IGNORECASE)


_OF_NODES = re.compile(_RATE.pattern + r"\s*\(([^()]*)\bnodes?\)", re.IGNORECASE)


_EACH_DEVICE = re.compile(r"(?:\bper|\beach|\ba|/)\s*(?:gpu|device|accelerator|chip|rank)s?\b", re.IGNORECASE)
_EACH_CARD = re.compile(r"(?:\bper|\beach|\ba|/)\s*(?:nic|hca|card|port|rail)s?\b", re.IGNORECASE)


def inter_node_bytes_per_s(text: str, *, devices: int = 1, cards: int = 1) -> float | None:
    """Bandwidth between nodes in bytes per second and node, from a text such as
    `NVLink; 8x200 Gb/s InfiniBand`; None where it states none.

    A rate `per GPU` or `/GPU` counts for each of the `devices` of a node, a rate `per NIC` for each of its
    network `cards`."""
    for clause in re.split(r"[;,]", text):
        match = _RATE.search(clause) if _BETWEEN.search(clause) else None
        if match:
            each = devices if _EACH_DEVICE.search(clause) else cards if _EACH_CARD.search(clause) else 1
            return each * _bytes_per_s(match)
    return None


def bytes_per_s_of_nodes(text: str, kinds: Sequence[str]) -> tuple[float, ...] | None:
    """Bandwidth of the nodes of each kind of device in bytes per second, from a text such as
    `10 Gb/s (V100 nodes), 50 Gb/s (T4 node)`.

    A kind that the text does not name gets the least of its rates. None where the text has no such rates."""
    rates = [(match.group(4), _bytes_per_s(match)) for match in _OF_NODES.finditer(text)]
    if not rates:
        return None
    least = min(rate for _, rate in rates)
    return tuple(
        next((rate for named, rate in rates if _plain(kind) in _plain(named)), least) for kind in kinds
    )


def _bytes_per_s(match: re.Match[str]) -> float:
    return int(match.group(1) or 1) * parse_quantity(f"{match.group(2)}{match.group(3)}", "B/s")
