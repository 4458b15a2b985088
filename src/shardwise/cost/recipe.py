"""Number formats and optimizers as data: bytes per parameter and per activation, traffic of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.inputs import unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one dtype or low-precision recipe stores and computes.

    `matmul` names the dense peak of weight matmuls, `other` that of attention. Weights for computing have
    `weight_bytes` each, accumulated gradients `gradient_bytes`, those that a collective reduces
    `reduced_bytes`, and the optimizer's master copy `master_bytes`. A cast of a matmul's input has
    `cast_bytes` of traffic per element: read in 16 bits, written directly and transposed. A tensor that only
    a matmul needs again is saved with `operand_bytes` per element.
    """

    matmul: str
    other: str
    activation_bytes: float
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    cast_bytes: float = 0.0
    operand_bytes: float = 2.0
    reduced_bytes: float = 4.0


def _sixteen(dtype: str, matmul: str | None = None, operand_bytes: float = 2.0) -> Recipe:
    """16-bit weights and activations, fp32 gradients and master weights.

    (Micikevicius et al. 2018; Megatron-LM.)
    """
    return Recipe(
        matmul=matmul or dtype, other=dtype, activation_bytes=2.0, weight_bytes=2.0, gradient_bytes=4.0,
        master_bytes=4.0, cast_bytes=0.0 if matmul is None else 4.0, operand_bytes=operand_bytes,
    )  # fmt: skip


def _thirty_two(matmul: str) -> Recipe:
    """32-bit weights, activations and gradients, without a master copy. Attention is computed in fp32: with
    `allow_tf32` PyTorch's memory-efficient kernel still has three products where TF32 has one."""
    return Recipe(
        matmul=matmul, other="fp32", activation_bytes=4.0, weight_bytes=4.0, gradient_bytes=4.0,
        master_bytes=0.0, operand_bytes=4.0,
    )  # fmt: skip


RECIPES: Mapping[str, Recipe] = {
    "fp32": _thirty_two("fp32"),
    "tf32": _thirty_two("tf32"),
    "fp16": _sixteen("fp16"),
    "bf16": _sixteen("bf16"),
    "fp8": _sixteen("bf16", "fp8", 1.0),
    "fp8-current": _sixteen("bf16", "fp8", 1.0),
    "fp8-block": _sixteen("bf16", "fp8", 1.0 + 4.0 / 128),
    "mxfp8": _sixteen("bf16", "fp8", 1.0 + 1.0 / 32),
    "nvfp4": _sixteen("bf16", "fp4", 0.5 + 1.0 / 16),
}  # fmt: skip


FP32_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """State bytes per parameter, and flop per parameter in addition to the element-wise update.

    `work_flop_per_hidden` is per parameter and hidden unit (Newton-Schulz steps of Muon).
    """

    state_bytes: float
    work_flop_per_hidden: float = 0.0

    def with_moments(self, moment_bytes: float) -> OptimizerCost:
        """The same with moments of this size instead of fp32."""
        return replace(self, state_bytes=self.state_bytes * moment_bytes / FP32_BYTES)


OPTIMIZERS: Mapping[str, OptimizerCost] = {
    # Two fp32 moments (Kingma & Ba 2015; Loshchilov & Hutter 2019).
    "adamw": OptimizerCost(state_bytes=8.0),
    # Factored second moment, no first moment: its rows and columns are negligible (Shazeer & Stern 2018).
    "adafactor": OptimizerCost(state_bytes=0.0),
    # fp32 momentum.
    "sgd": OptimizerCost(state_bytes=4.0),
    # fp32 momentum; five Newton-Schulz steps of three products, each 2 * hidden flop per parameter (Jordan et
    # al. 2024).
    "muon": OptimizerCost(state_bytes=4.0, work_flop_per_hidden=30.0),
}


SPELLINGS: Mapping[str, str] = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "float32": "fp32", "float": "fp32", "single": "fp32", "tensorfloat32": "tf32", "tensorfloat-32": "tf32",
    "bf16-mixed": "bf16", "fp16-mixed": "fp16", "16-mixed": "fp16", "32-true": "fp32",
    "float8": "fp8", "fp8-delayed": "fp8", "fp8-tensorwise": "fp8-current", "fp8-blockwise": "fp8-block",
    "fp8-mx": "mxfp8", "mx-fp8": "mxfp8", "fp4-nv": "nvfp4",
}  # fmt: skip
"""Other usual names of number formats."""


def dtype_spelled(text: str) -> str:
    """The dtype or recipe that `text` names in any usual spelling; what it names no one of, as it is."""
    folded = text.strip().casefold().removeprefix("torch.").replace("_", "-")
    name = SPELLINGS.get(folded, folded)
    return name if name in RECIPES else text


def find_recipe(dtype: str) -> Recipe:
    """The recipe called `dtype`. ConfigError lists the known ones."""
    if dtype not in RECIPES:
        raise unknown("is not a known dtype", dtype, RECIPES, key="dtype")
    return RECIPES[dtype]
