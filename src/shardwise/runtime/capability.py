"""Which plans this runtime runs."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.errors import ConfigError
from shardwise.model import decoder_of
from shardwise.plan import Plan
from shardwise.strategy import Strategy

_SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules with backward passes in two halves, which pass by the hooks that reduce gradients."""

_LIMITS: tuple[tuple[str, Callable[[Strategy], bool], str], ...] = (
    (
        "recompute",
        lambda s: s.recompute == "selective" and s.schedule in _SPLIT,
        "none or full where backward passes are split",
    ),
    ("ep", lambda s: s.ep > 1, "1"),
    ("etp", lambda s: s.etp > 1, "1"),
    ("offload", lambda s: s.offload != "none", "none"),
    ("grad_shard", lambda s: s.grad_shard > 1 and s.schedule in _SPLIT, "1 where backward passes are split"),
    ("grad_shard", lambda s: s.grad_shard not in (1, s.optim_shard), "1 or optim_shard"),
)
"""Field, whether a strategy is beyond what the runtime does with it, and what it does."""

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "sgd")


def check_runnable(plan: Plan) -> None:
    """ConfigError, by the first thing in the way, where this runtime cannot run `plan`."""
    strategy = plan.best.strategy
    for field, is_beyond, allowed in _LIMITS:
        if is_beyond(strategy):
            raise _refusal(f"best.strategy.{field}", getattr(strategy, field), allowed)
    if plan.job.dtype not in DTYPES:
        raise _refusal("job.dtype", plan.job.dtype, ", ".join(DTYPES))
    if set(plan.cluster.classes) != {"cpu"}:
        raise _refusal("cluster", ", ".join(plan.cluster.classes), "cpu")
    if plan.job.optimizer not in OPTIMIZERS:
        raise _refusal("job.optimizer", plan.job.optimizer, ", ".join(OPTIMIZERS))
    windows = {getattr(shape.attention, "window", None) for shape in decoder_of(plan.model).layers}
    if strategy.cp > 1 and any(window and window < plan.job.seq_len for window in windows):
        raise _refusal("best.strategy.cp", strategy.cp, "1 where attention has windows")
    if (
        len(plan.best.layout.pipelines) > 1
        or len({s.device_class for p in plan.best.layout.pipelines for s in p.stages}) > 1
    ):
        raise _refusal("best.layout", "a mixed layout", "one pipeline of alike stages")


def _refusal(key: str, found: object, allowed: str) -> ConfigError:
    return ConfigError("is not run by this runtime", key=key, found=str(found), allowed=allowed)
