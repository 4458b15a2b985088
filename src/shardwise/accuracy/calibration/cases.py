"""Small plans of one device whose steps tell what software costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import search
from shardwise.cluster import Cluster
from shardwise.model import model_from_config
from shardwise.plan import Plan
from shardwise.strategy import Job, Profile, complete, parse_fields


@dataclass(frozen=True, slots=True)
class _Case:
    """A small transformer, a strategy of one device, and a batch: one step that tells what software costs.
    It is a GPT, or, where it `is_gated`, a Llama."""

    layers: int
    hidden: int
    seq_len: int
    vocab: int
    micro_batch_size: int
    global_batch_size: int
    is_gated: bool = False

    def plan(self, cluster: Cluster, profile: Profile, dtype: str, *, head_dim: int, dropout: float) -> Plan:
        dims: dict[str, object] = {
            "layers": self.layers, "hidden": self.hidden, "ffn": 4 * self.hidden, "vocab": self.vocab,
            "heads": max(self.hidden // head_dim, 1), "seq_len": self.seq_len, "dropout": dropout,
        }  # fmt: skip
        if self.is_gated:
            dims |= {"gated": True, "norm": "rmsnorm", "positions": "rope", "bias": False}
        model = model_from_config(dims, name=f"{self.layers}x{self.hidden}")
        batch = self.global_batch_size
        job = Job(seq_len=self.seq_len, global_batch_size=batch, dtype=dtype, profile=profile)
        strategy = complete(
            parse_fields(f"micro_batch_size={self.micro_batch_size}"), devices=1, layers=self.layers,
            experts=None, global_batch_size=batch,
        )  # fmt: skip
        return search.plan_of_strategy(model, cluster, job, strategy)


_CPU_CASES = (
    _Case(4, 256, 128, 512, 4, 4),
    _Case(4, 256, 128, 512, 1, 4),
    _Case(2, 512, 256, 512, 1, 2),
    _Case(2, 128, 64, 512, 8, 8),
    _Case(8, 128, 64, 512, 2, 8),
    _Case(1, 768, 128, 2048, 2, 4),
    _Case(1, 128, 64, 512, 1, 32),
)
"""Few and many microbatches, narrow and wide layers, few and many parameters: a fraction of a second each.
The last has many actions and little in each: without it what an action takes is hardly told from what a step
and its kernels do."""

_ACCELERATOR_CASES = (
    _Case(2, 4096, 2048, 8192, 8, 8),
    _Case(2, 4096, 2048, 8192, 2, 8),
    _Case(4, 2048, 2048, 32768, 4, 8),
    _Case(8, 1024, 1024, 8192, 32, 32),
    _Case(2, 2048, 4096, 49152, 4, 8),
    _Case(1, 6144, 2048, 4096, 4, 8),
    _Case(6, 1536, 1024, 4096, 16, 64),
    _Case(4, 2048, 2048, 8192, 4, 8, is_gated=True),
    _Case(2, 4096, 4096, 16384, 2, 4, is_gated=True),
    _Case(8, 1024, 2048, 32768, 8, 16, is_gated=True),
    _Case(4, 2048, 2048, 32768, 8, 16, is_gated=True),
    _Case(1, 5120, 2048, 32768, 4, 8, is_gated=True),
)
"""The same at the sizes of accelerators: kernels that take longer than the host needs to hand them over."""

MEMORY_SHARE = 0.9
"""Of an accelerator's memory, which others may use too."""

_HOST_CASES = (
    _Case(4, 256, 128, 512, 4, 4),
    _Case(8, 128, 64, 512, 2, 8),
    _Case(12, 256, 64, 512, 2, 4),
)
"""Kernels that an accelerator is done with long before it gets the next."""


def calibration_plans(cluster: Cluster, profile: Profile) -> list[Plan]:
    """Plans for one processor of `cluster`, in fp32, without anything that is divided or recomputed."""
    return [case.plan(cluster, profile, "fp32", head_dim=64, dropout=0.1) for case in _CPU_CASES]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorPlans:
    """Plans for one accelerator: `large` ones, whose steps take what their kernels take, and `small` ones,
    whose steps take what the host does."""

    large: Sequence[Plan]
    small: Sequence[Plan]


def accelerator_plans(cluster: Cluster, profile: Profile, dtype: str) -> AcceleratorPlans:
    """Such plans for an accelerator of `cluster`, those that fit into its memory. Nothing is dropped out, as
    our runtime never does."""

    def fitting(cases: Sequence[_Case]) -> list[Plan]:
        plans = [case.plan(cluster, profile, dtype, head_dim=128, dropout=0.0) for case in cases]
        peaks = [plan.best.peak_memory for plan in plans]
        return [
            plan
            for plan, peak in zip(plans, peaks, strict=True)
            if peak.device < MEMORY_SHARE * peak.capacity
        ]

    return AcceleratorPlans(large=fitting(_ACCELERATOR_CASES), small=fitting(_HOST_CASES))
