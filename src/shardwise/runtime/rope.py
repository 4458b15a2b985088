"""Rotary position embeddings (RoPE) with the scalings llama3, linear and YaRN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.inputs import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, and those with `low` to `high` rotations
    over the original context of `length` tokens are interpolated."""

    factor: float
    low: float
    high: float
    length: float

    def scale_frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies of all pairs (radians per token), scaled."""
        rotations = self.length * frequencies / (2 * torch.pi)  # within the original context
        blend = ((rotations - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequencies * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation: all frequencies are divided by `factor` (Chen et al. 2023, arXiv
    2306.15595)."""

    factor: float

    def scale_frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies of all pairs (radians per token), scaled."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071).

    Frequencies with at most `slow` rotations over the original context of `length` tokens are divided by
    `factor`. Those with `fast` rotations or more are unchanged, with a linear ramp over the pairs in between.
    `truncates` rounds the ends of the ramp to whole pairs.
    """

    factor: float
    fast: float
    slow: float
    length: float
    truncates: bool

    def scale_frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies of all pairs (radians per token) for base `theta`, scaled."""
        pairs = len(frequencies)
        first, last = (
            pairs * math.log(self.length / (rotations * 2 * math.pi)) / math.log(theta)
            for rotations in (self.fast, self.slow)
        )
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first if last != first else 0.001
        numbers = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        ramp = ((numbers - first) / width).clamp(0.0, 1.0)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of the first `dims` elements of a head: pair i rotates by position * theta^(-2i/dims).

    A pair is elements i and i + dims/2, or two neighbours (`interleaved`). `scaling` adapts the frequencies
    to contexts longer than the original. `length` multiplies the rotated elements (YaRN's attention factor).
    """

    dims: int
    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    length: float = 1.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of shape (tokens, rotated elements / 2), for interleaved pairs or halves."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotation_of(rope: Rope, positions: Tensor) -> Rotation:
    """Cosines and sines at `positions` (tokens,), in fp32 (Su et al. 2021, arXiv 2104.09864)."""
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.float32, device=positions.device) / rope.dims
    frequencies = rope.theta**-exponents
    if rope.scaling is not None:
        frequencies = rope.scaling.scale_frequencies(frequencies, rope.theta)
    angles = positions.float()[:, None] * frequencies
    return Rotation(angles.cos() * rope.length, angles.sin() * rope.length, rope.interleaved)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` (batch, tokens, heads, elements) with the rotary embedding applied to its first elements."""
    cos, sin = (part[:, None, :].to(x.dtype) for part in (rotation.cos, rotation.sin))
    result: Tensor = _Rotated.apply(x, cos, sin, rotation.interleaved)
    return result


class _Rotated(Function):
    """Rotation whose backward pass rotates the gradient back. Autograd's own would pad each half's gradient
    with zeros and add both, with three times the memory traffic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x[..., first], cos, out=result[..., first]).addcmul_(x[..., second], sin, value=-1.0)
    torch.mul(x[..., second], cos, out=result[..., second]).addcmul_(x[..., first], sin)
    result[..., 2 * half :] = x[..., 2 * half :]
    return result


def rope_fields(fields: Fields, default: Mapping[str, object]) -> Fields:
    """The config of rotary embeddings: `rope_parameters`, or `rope_scaling` in older files, else
    `default`."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.any(key, default=None), Mapping):
            return fields.mapping(key)
    return Fields(default)


SCALINGS = ("linear", "llama3", "yarn")
"""Supported kinds of scaling."""


def scaling_of(rope: Fields, *, known: tuple[str, ...]) -> Scaling | None:
    """The scaling in a config of `rope_fields`. ConfigError if its kind is not in `known`."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind not in known:
        raise rope.error(
            "rope_type", "is not supported by the runtime", found=kind, allowed=", ".join(("default", *known))
        )
    return _SCALINGS[kind](rope)


def yarn_attention_factors(rope: Fields) -> tuple[float, float]:
    """Factor of the rotated elements under YaRN, and factor of all scores (DeepSeek-V2)."""
    factor = _factor(rope)
    of_pairs, of_scores = (
        rope.number(key, low=0.0, high=1e3, default=0.0) for key in ("mscale", "mscale_all_dim")
    )
    length = _yarn_length(factor, 1.0)
    if of_pairs and of_scores:
        length = _yarn_length(factor, of_pairs) / _yarn_length(factor, of_scores)
    length = rope.number("attention_factor", high=1e6, default=length)
    return length, _yarn_length(factor, of_scores) ** 2


def _yarn_length(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _factor(rope: Fields) -> float:
    return rope.number("factor", low=1e-3, high=1e6)


def _llama3(rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=_factor(rope),
        low=rope.number("low_freq_factor", high=1e6),
        high=rope.number("high_freq_factor", high=1e6),
        length=rope.number("original_max_position_embeddings", high=1e9),
    )


def _linear(rope: Fields) -> LinearScaling:
    return LinearScaling(factor=_factor(rope))


def _yarn(rope: Fields) -> YarnScaling:
    return YarnScaling(
        factor=_factor(rope),
        fast=rope.number("beta_fast", high=1e6, default=32.0),
        slow=rope.number("beta_slow", high=1e6, default=1.0),
        length=rope.number("original_max_position_embeddings", high=1e9),
        truncates=rope.boolean("truncate", default=True),
    )


_SCALINGS: Mapping[str, Callable[[Fields], Scaling]] = {"llama3": _llama3, "linear": _linear, "yarn": _yarn}
