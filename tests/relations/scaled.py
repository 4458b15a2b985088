"""(g) If all times are scaled, all answers are scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.relations.clusters import Nodes, Tier, number
from tests.relations.commands import Commands, File, Words
from tests.relations.questions import Question
from tests.relations.relation import EFFORT, TEXTS, difference, relation, require, require_equivalent

from shardwise.cluster import find_device
from shardwise.strategy import MEGATRON_2024

FACTOR = 2.0
"""A power of two, so that nothing is rounded."""


@relation(lambda _: True)
def all_times_scaled(question: Question, shardwise: Commands) -> None:
    """Where everything takes twice as long, the same plan takes twice as long.

    Peaks and bandwidths are halved; latencies, start-up times and host seconds are doubled. A calibration
    does this for devices and software, the cluster file for network cards and tiers. Prices are left out. The
    frontier of a graph only scales to within its proven epsilon: labels are merged on a grid of log time
    (`frontier.reduce`), where scaled times fall into other cells.
    """
    one, other = (shardwise.answer(_scaled_words(question, factor)) for factor in (1.0, FACTOR))
    if question.is_graph:
        twice = [{**point, "time_s": FACTOR * point["time_s"]} for point in one.document.get("points", ())]
        require_equivalent(
            replace(one, document={**one.document, "points": twice} if one.fits else {}),
            other,
            what="all times scaled",
        )
    else:
        found = difference(_scaled(one.document, FACTOR), _scaled(other.document, 1.0))
        require(found is None, f"all times scaled: {found}", one, other)


def _scaled_words(question: Question, factor: float) -> Words:
    cluster = question.cluster.with_explicit_cards()

    def slower(run: Nodes) -> Nodes:
        return replace(
            run,
            card_bytes_per_s=(run.card_bytes_per_s or 0.0) / factor,
            price_usd_per_hour=None,
        )

    def later(tier: Tier) -> Tier:
        rate = None if tier.bytes_per_s is None else tier.bytes_per_s / factor
        return replace(tier, latency_s=tier.latency_s * factor, bytes_per_s=rate)

    scaled = replace(cluster.changed(slower), tiers=tuple(map(later, cluster.tiers)))
    document = {
        "schema": "shardwise.calibration",
        "version": 1,
        "machine": "a relation",
        "classes": {name: _device(name, factor) for name in {run.device: None for run in cluster.nodes}},
        "software": {
            "like": MEGATRON_2024.name,
            **{
                name: factor * getattr(MEGATRON_2024, name)
                for name in ("dispatch_s", "expert_dispatch_s", "host_action_s", "host_step_s")
            },
        },
    }
    return (*question.on(scaled).words(), "--calibration", File("calibration", document))


def _device(name: str, factor: float) -> dict[str, Any]:
    """A known device on which everything takes `factor` times as long."""
    known = find_device(name)

    def rate(value: float, unit: str = "B/s") -> str:
        return f"{number(value / factor)}{unit}"

    def curve(each: Any) -> dict[str, float]:
        return {"startup_s": factor * each.startup_s, "lockstep_s": factor * each.lockstep_s}

    efficiency = known.efficiency
    return {
        "device": name,
        "peak": {dtype: rate(peak, "FLOP/s") for dtype, peak in known.peak_flop_per_s.items()},
        "memory_bandwidth": rate(known.memory_bytes_per_s),
        "scale_up": {
            "bandwidth": rate(known.scale_up_bytes_per_s),
            "latency": f"{factor * known.scale_up_latency_s!r}s",
        },
        "scale_out": {
            "bandwidth": rate(known.scale_out_bytes_per_s),
            "latency": f"{factor * known.scale_out_latency_s!r}s",
        },
        "host": {"link": rate(known.host_link_bytes_per_s)},
        "efficiency": {
            "launch_s": factor * efficiency.launch_s,
            "scale_up": curve(efficiency.scale_up),
            "scale_out": curve(efficiency.scale_out),
        },
    }


_TIMES = frozenset({"breakdown", "pipeline_s", "band_s"})
_IGNORED = EFFORT | TEXTS | {
    "cluster", "job", "usd_per_step", "usd_per_billion_tokens", "cost_usd", "layout", "references", "profile"
}  # fmt: skip
_RATES = frozenset({"tokens_per_s_per_device"})


def _scaled(value: Any, factor: float, *, is_time: bool = False) -> Any:
    """A document with all times multiplied, and all rates divided."""
    if isinstance(value, dict):
        return {
            key: each / factor
            if key in _RATES
            else _scaled(each, factor, is_time=is_time or key in _TIMES or key.endswith("_s"))
            for key, each in value.items()
            if key not in _IGNORED
        }
    if isinstance(value, list):
        return [_scaled(each, factor, is_time=is_time) for each in value]
    return value * factor if is_time and isinstance(value, float) else value
