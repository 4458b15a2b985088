"""Short texts for strategies, layouts and quantities, as the card and the tables show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from shardwise.plans import Layout, Result, UnevenResult
from shardwise.strategy import AXES, FIELDS, Job, Strategy, even_ends

GIB = 2.0**30
AXIS_ORDER = "-".join(AXES)


def degrees_text(strategy: Strategy) -> str:
    """The degrees larger than 1: `tp 8 · pp 4 · dp 2`; on one device `1 device`."""
    names = ("tp", "cp", "ep", "etp", "pp", "dp")
    shown = [f"{name} {value}" for name in names if (value := getattr(strategy, name)) > 1]
    return " · ".join(shown) or "no parallelism"


def sharding_text(strategy: Strategy) -> str:
    """What is sharded over how many data-parallel ranks, in the words of ZeRO where they fit."""
    degrees = (strategy.param_shard, strategy.grad_shard, strategy.optim_shard)
    ranks = strategy.dp * strategy.cp
    if max(degrees) == 1:
        return "states replicated" if ranks > 1 else ""
    stages = {(1, 1, ranks): 1, (1, ranks, ranks): 2, (ranks, ranks, ranks): 3}
    if degrees in stages:
        return f"ZeRO-{stages[degrees]} over {ranks}"
    return "parameters / gradients / optimizer over {} / {} / {}".format(*degrees)


def schedule_text(strategy: Strategy) -> str:
    """The pipeline schedule with its chunks per rank; empty without a pipeline."""
    if strategy.pp == 1:
        return ""
    return strategy.schedule + (f" × {strategy.vpp}" if strategy.vpp > 1 else "")


def batch_text(strategy: Strategy, job: Job) -> str:
    microbatches = job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    return f"micro-batch {strategy.micro_batch_size} × {microbatches:,}"


def option_texts(strategy: Strategy) -> list[str]:
    """Every other choice of a strategy (not degrees, shards, schedule, batch), unless it is off."""
    recompute = {
        "none": "no recompute",
        "selective": "recompute selective",
        "full": f"recompute {counted(strategy.recompute_layers, 'layer')} in full",
    }
    texts = [recompute[strategy.recompute]]
    if strategy.sequence_parallel:
        texts.append("sequence parallel")
    if strategy.cp > 1:
        texts.append(f"cp by {strategy.cp_kind}")
    if strategy.offload != "none":
        texts.append(f"offload {strategy.offload}")
    return texts


def value_text(value: object) -> str:
    """A field's value: yes and no for flags."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def stages_text(layout: Layout) -> list[str]:
    """One text per pipeline: its stages in runs of equal ones, `2 stages of 16 H100-SXM × 20 layers`."""
    return ["  ".join(_runs(pipeline.stages)) for pipeline in layout.pipelines]


def _runs(stages: Iterable[object]) -> Iterable[str]:
    for (devices, name, layers), run in groupby(
        stages,
        key=lambda stage: (stage.devices, stage.device_class, stage.layers),  # type: ignore[attr-defined]
    ):
        number = len(list(run))
        chunks = f" ({'+'.join(map(str, layers))})" if len(layers) > 1 else ""
        yield f"{number} × [{devices} {name}, {counted(sum(layers), 'layer')}{chunks}]"


def detail_texts(strategy: Strategy, job: Job, layers: int) -> list[str]:
    """Everything about a strategy that its degrees do not say, in words; `layers` are the model's."""
    texts = [
        batch_text(strategy, job),
        schedule_text(strategy),
        sharding_text(strategy),
        *option_texts(strategy),
        end_stages_text(strategy, layers),
        _axes_text(strategy),
    ]
    return [text for text in texts if text]


def _axes_text(strategy: Strategy) -> str:
    return "" if strategy.axis_order == AXIS_ORDER else f"axes {strategy.axis_order}"


def end_stages_text(strategy: Strategy, layers: int) -> str:
    """How many layers the first and last stages have, where that is not the even split."""
    end_layers = (strategy.first_stage_layers, strategy.last_stage_layers)
    if end_layers == tuple(map(int, even_ends(layers, strategy.pp * strategy.vpp))):
        return ""
    return f"ends of {end_layers[0]} and {end_layers[1]} layers"


def difference_text(strategy: Strategy, best: Strategy, layers: int) -> str:
    """What `strategy` chooses otherwise than `best`, beside the degrees and what follows from them."""
    known = _choices(best, layers)
    return ", ".join(text for text in _choices(strategy, layers) if text not in known)


def changed_fields(strategy: Strategy, best: Strategy, *, but: str) -> str:
    """Fields other than `but` in which `strategy` differs from `best`, at most three of them by name."""
    changed = [name for name in FIELDS if name != but and getattr(strategy, name) != getattr(best, name)]
    shown = [f"{name} {value_text(getattr(strategy, name))}" for name in changed[:3]]
    return ", ".join(shown + ([f"{len(changed) - 3} more"] if len(changed) > 3 else []))


def _choices(strategy: Strategy, layers: int) -> list[str]:
    texts = [
        f"micro-batch {strategy.micro_batch_size}",
        schedule_text(strategy),
        sharding_text(strategy).partition(" over ")[0],
        *option_texts(strategy),
        end_stages_text(strategy, layers),
        _axes_text(strategy),
    ]
    return [text for text in texts if text]


def gib(nbytes: float) -> str:
    """Bytes as a number of GiB, without the unit."""
    return f"{nbytes / GIB:.1f}"


def memory(nbytes: float, largest: float = 0.0) -> str:
    """Bytes in GiB with a tenth; in MiB where neither they nor the most shown `largest` them make one."""
    if max(nbytes, largest) >= GIB:
        return f"{gib(nbytes)} GiB"
    mib = nbytes / 2**20
    return f"{mib:.0f} MiB" if mib >= 100.0 else f"{mib:.1f} MiB"


def seconds(value: float) -> str:
    """A step or part of it, in seconds or milliseconds of four digits; less than 1 ps is rounding."""
    if value >= 1.0:
        return f"{value:,.3f} s" if value < 100 else f"{value:,.1f} s"
    return f"{value * 1e3 if abs(value) >= 1e-12 else 0.0:.4g} ms"


def pair(predicted_s: float | None, measured_s: float) -> tuple[str, str, str]:
    """Predicted and measured seconds, and their ratio where there is one."""
    if predicted_s is None:
        return "-", seconds(measured_s), "-"
    ratio = f"{predicted_s / measured_s:.2f}" if measured_s > 0 else "-"
    return seconds(predicted_s), seconds(measured_s), ratio


def digits(value: float, number: int) -> str:
    """A positive number with so many digits, and never fewer than stand before the point."""
    return f"{value:,.0f}" if value >= 10 ** (number - 1) else f"{value:#.{number}g}"


def hours(value_s: float) -> str:
    """A long time in whole hours, a short one with three digits."""
    value = value_s / 3600.0
    return f"{value:,.0f} h" if value >= 100 else f"{value:.3g} h"


def percent(fraction: float, digits: int = 1) -> str:
    return f"{fraction * 100:.{digits}f} %"


def bar(fraction: float, width: int) -> str:
    """A bar of `width` columns filled to `fraction`, in eighths of a column."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def wrapped(words: Sequence[str], separator: str, width: int) -> list[str]:
    """The words joined by `separator` into lines of at most `width` columns, where words allow it."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return lines


def tokens_per_s(result: Result | UnevenResult, devices: int) -> float:
    """Tokens per second of the whole cluster."""
    return result.tokens_per_s_per_device * devices
