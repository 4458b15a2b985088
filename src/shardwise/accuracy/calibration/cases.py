"""Small plans of one device whose steps tell what software costs."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise import search
from shardwise.cluster import Cluster
from shardwise.model import model_from_config
from shardwise.plan import Plan
from shardwise.strategy import Job, Profile, complete, parse_fields


@dataclass(frozen=True, slots=True)
class _Case:
    """A small GPT, a strategy of one device, and a batch: one step that tells what software costs."""

    layers: int
    hidden: int
    seq_len: int
    vocab: int
    micro_batch_size: int
    global_batch_size: int

    def plan(self, cluster: Cluster, profile: Profile) -> Plan:
        dims = {"layers": self.layers, "hidden": self.hidden, "ffn": 4 * self.hidden,
                "heads": max(self.hidden // 64, 1), "vocab": self.vocab, "seq_len": self.seq_len}  # fmt: skip
        model = model_from_config(dims, name=f"{self.layers}x{self.hidden}")
        batch = self.global_batch_size
        job = Job(seq_len=self.seq_len, global_batch_size=batch, dtype="fp32", profile=profile)
        strategy = complete(
            parse_fields(f"micro_batch_size={self.micro_batch_size}"), devices=1, layers=self.layers,
            experts=None, global_batch_size=batch,
        )  # fmt: skip
        return search.plan_of_strategy(model, cluster, job, strategy)


_CASES = (
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


def calibration_plans(cluster: Cluster, profile: Profile) -> list[Plan]:
    """Plans for one device of `cluster`, in fp32, without anything that is divided or recomputed."""
    return [case.plan(cluster, profile) for case in _CASES]
