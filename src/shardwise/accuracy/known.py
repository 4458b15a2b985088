"""Software, number formats, models and networks as tables of measured runs spell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from shardwise.model import catalogue_names
from shardwise.units import parse_quantity

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
"""Words within a framework's name, the most particular first, with the profile by the year of the run."""


def profile_named(text: str, year: int | None, notes: str = "") -> str | None:
    """The software profile that a framework's name and year stand for; None for an unknown framework.

    Where the notes name a release by year and month (`container 26.06`), that is the date. Without a year it
    is the newest.
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
    ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("fp32", "fp32"),
    ("float32", "fp32"),
)  # fmt: skip


def dtype_named(text: str) -> str | None:
    """The recipe within a text such as `fp8(amp_fp8)`; None where there is none."""
    folded = text.casefold()
    return next((dtype for word, dtype in _DTYPES if word in folded), None)


def catalogue_model(text: str) -> str | None:
    """The catalogue's model whose name is within `text` (`Qwen3_30B_a3B`, `DeepSeek V3 671B`); None where
    none is. The size in active parameters may be left out (`Qwen3 MoE 30B`)."""
    spaced = re.sub(r"moe", " ", text, flags=re.IGNORECASE)
    found = [name for name in catalogue_names() if re.search(_spelled(name), spaced, re.IGNORECASE)]
    return max(found, key=len, default=None)


def _spelled(name: str) -> str:
    """A pattern of a model's name with any separators, without its size in active parameters."""
    tokens = re.findall(r"[a-z]+|\d+", re.sub(r"-a\d+b$", "", name))
    return r"[\s_.-]*".join(tokens) + r"(?!\d)"


def _plain(text: str) -> str:
    """Letters and digits alone, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.casefold())


FAMILIES: Final = (
    "gpt-oss", "mt-nlg", "deepseek", "qwen", "llama", "mixtral", "mistral", "gemma", "nemotron", "kimi",
    "mpt", "opt", "bloom", "falcon", "phi", "gpt",
)  # fmt: skip
"""Families of models; of several within a name, the first here."""


def family_named(text: str) -> str:
    """The family of models that `text` names: one of FAMILIES, else the letters that it begins with."""
    plain = _plain(text)
    for family in FAMILIES:
        if _plain(family) in plain:
            return family
    first = re.match(r"[a-z]+", plain)
    return first.group() if first else text or "unnamed"


_RATE = re.compile(r"(?:(\d{1,4})\s*x\s*)?(\d{1,6}(?:\.\d{1,6})?)\s*(Gb/s|Gbps|GB/s)", re.IGNORECASE)
_BETWEEN = re.compile(r"inter|infiniband|roce|ethernet|efa|network", re.IGNORECASE)


_OF_NODES = re.compile(_RATE.pattern + r"\s*\(([^()]*)\bnodes?\)", re.IGNORECASE)


def inter_node_bytes_per_s(text: str) -> float | None:
    """Bytes per second and node between nodes that a text such as `NVLink; 8x200 Gb/s InfiniBand` states;
    None where it states none."""
    for clause in re.split(r"[;,]", text):
        match = _RATE.search(clause) if _BETWEEN.search(clause) else None
        if match:
            return _bytes_per_s(match)
    return None


def bytes_per_s_of_nodes(text: str, kinds: Sequence[str]) -> tuple[float, ...] | None:
    """Bytes per second of a node of each of these kinds of devices, of a text such as `10 Gb/s (V100 nodes),
    50 Gb/s (T4 node)`: the least of all for a kind that it does not name; None where it states none so."""
    rates = [(match.group(4), _bytes_per_s(match)) for match in _OF_NODES.finditer(text)]
    if not rates:
        return None
    least = min(rate for _, rate in rates)
    return tuple(
        next((rate for named, rate in rates if _plain(kind) in _plain(named)), least) for kind in kinds
    )


def _bytes_per_s(match: re.Match[str]) -> float:
    return int(match.group(1) or 1) * parse_quantity(f"{match.group(2)}{match.group(3)}", "B/s")
