"""Goals of the benchmarks' figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks import replanning, searches


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of one figure: a lower bound where `is_least`, else an upper bound."""

    figure: str
    bound: float
    is_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether the value meets the goal."""
        return value >= self.bound if self.is_least else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.is_least else 'most'} {self.bound:,g}"


EVERYWHERE = (Goal("drawn_better", 0.0), Goal("counted_apart", 0.0))
"""Goals of every benchmark with these figures: random candidates that are better than the search's result,
and the difference between the candidates that the search and the checker count."""

WHOLE_GRAPH = (Goal("search_cpu_s", 6.0), Goal("proven", 0.001))


def _mixed(cpu_s: float) -> tuple[Goal, ...]:
    return (Goal("answer_cpu_s", cpu_s), Goal("gap", 0.02))


BEATEN = (
    Goal("gain_over_uniform", 1.001, is_least=True),
    Goal("gain_over_proportional", 1.001, is_least=True),
    Goal("gap", 0.02),
)
"""Goals of shipped clusters: faster than the best uniform strategy and than the proportional split."""

NAMED = (
    "two_classes",
    "three_classes",
    "two_sites_10g",
    "two_sites_1g_llama70b",
    "fast_slow_racks",
    "spot_mix",
    "slow_node",
)

GOALS: Mapping[str, tuple[Goal, ...]] = {
    "blocks gpt3-175b": (Goal("times_bounded_per_cpu_s", 2e6, is_least=True),),
    "blocks llama-2-70b": (Goal("times_bounded_per_cpu_s", 2e6, is_least=True),),
    "search gpt3_core_64": (Goal("search_cpu_s", 0.5),),
    "search gpt3_64": (Goal("search_cpu_s", 1.5),),
    "search gpt3_4096": (Goal("search_cpu_s", 3.0),),
    "search llama70b_64": (Goal("search_cpu_s", 1.5),),
    "search llama405b_16384": (Goal("search_cpu_s", 8.0),),
    "search llama405b_131072": (Goal("search_cpu_s", 15.0),),
    "search deepseek_v3_2048": (Goal("search_cpu_s", 12.0),),
    "search qwen3_235b_512": (Goal("search_cpu_s", 8.0),),
    "search frontier_llama70b_64": (Goal("search_cpu_s", 8.0),),
    "frontier llama8b_1_to_64": (Goal("search_cpu_s", 25.0),),
    "graph llama_64": (*WHOLE_GRAPH, Goal("peak_memory_bytes", 2.0**30)),
    "graph vgg16_8": WHOLE_GRAPH,
    "graph vgg16_16": WHOLE_GRAPH,
    "graph resnet50_8": WHOLE_GRAPH,
    "graph resnet50_16": WHOLE_GRAPH,
    "graph wideresnet26_8": WHOLE_GRAPH,
    "graph wideresnet26_16": WHOLE_GRAPH,
    "graph lstm_8": WHOLE_GRAPH,
    "graph lstm_16": WHOLE_GRAPH,
    "graph transformer_8": WHOLE_GRAPH,
    "graph transformer_16": WHOLE_GRAPH,
    "mixed opt350m_128": _mixed(2.0),
    "mixed opt350m_320": _mixed(4.0),
    "mixed opt350m_512": _mixed(8.0),
    "mixed llama70b_64": _mixed(6.0),
    "mixed opt350m_three_classes_256": _mixed(60.0),
    "mixed gpt2xl_64": _mixed(6.0),
    **{f"mixed {name}": BEATEN for name in NAMED},
    "replan loss_1024": (Goal("patch_cpu_s", 0.3), Goal("all_cpu_s", 5.0)),
    "replay week_64": (Goal("cpu_s", 60.0),),
    **{f"replay {name}": (Goal("adaptive_share", 0.9, is_least=True),) for name in replanning.at_hand()},
    **{f"workers {name}": (Goal("speedup", 1.7, is_least=True),) for name in searches.OVER_TWO_SECONDS},
    **{f"overhead {name}": (Goal("overhead", 0.05),) for name in ("ddp", "fsdp2", "tensor", "pipeline")},
    "moving": (Goal("ratio", 1.5), Goal("back_ratio", 1.5)),
    "recovery": (Goal("seconds", 30.0),),
    "cold start": (Goal("wall_s", 0.6),),
    "validation": (Goal("cpu_s", 3.0),),
    "fit": (Goal("cpu_s", 300.0),),
}


def goals_of(name: str, figures: Mapping[str, float]) -> Iterator[Goal]:
    """The goals of a benchmark. KeyError where it does not measure a figure with a goal."""
    for goal in GOALS.get(name, ()):
        if goal.figure not in figures:
            raise KeyError(f"{name} measures no {goal.figure!r}, only {', '.join(figures)}")
        yield goal
    yield from (goal for goal in EVERYWHERE if goal.figure in figures)
