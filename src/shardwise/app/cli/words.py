"""Short texts for strategies, layouts and quantities, as cards and tables show them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.app.cli.output import LABEL, Line, Span, columns, row
from shardwise.plans import Result
from shardwise.strategy import (
    AXES,
    FIELDS,
    HOST_MEMORY,
    MEMORY,
    RULES,
    TARGET_LIMIT,
    Job,
    Strategy,
    even_ends,
)

GIB = 2.0**30
AXIS_ORDER = "-".join(AXES)

_DEGREES = ("tp", "cp", "ep", "etp", "pp", "dp")

_REASON_TEXTS = {
    **{rule.code: f"not met: {rule.text}" for rule in RULES},
    TARGET_LIMIT: "not run by the target",
    MEMORY: "too large for the memory of the device",
    HOST_MEMORY: "too large for the memory of the host",
}

TERM_LABELS = {
    "memory_bound": "memory-bound operators",
    "context_and_communicators": "context, communicators",
}
"""Labels of terms whose key, with spaces for underscores, does not name the thing."""


def degrees_text(strategy: Strategy) -> str:
    """The degrees larger than 1: `tp 8 · pp 4 · dp 2`; `no parallelism` where all are 1."""
    shown = [f"{name} {value}" for name in _DEGREES if (value := getattr(strategy, name)) > 1]
    return " · ".join(shown) or "no parallelism"


def sharding_text(strategy: Strategy) -> str:
    """The ZeRO stage with its sharding degree, or the three sharding degrees where no stage has them; empty
    on one data-parallel rank."""
    degrees = (strategy.param_shard, strategy.grad_shard, strategy.optim_shard)
    ranks = strategy.dp * strategy.cp
    if max(degrees) == 1:
        return "states replicated" if ranks > 1 else ""
    stages = {(1, 1, ranks): 1, (1, ranks, ranks): 2, (ranks, ranks, ranks): 3}
    if degrees in stages:
        return f"ZeRO-{stages[degrees]} over {ranks} ranks"
    return "ZeRO: parameters / gradients / optimizer sharded over {} / {} / {}".format(*degrees)


def brief_division_text(strategy: Strategy) -> str:
    """The degrees and the ZeRO stage, for narrow columns: `tp 8 pp 4, ZeRO-1`. Where no stage has them, the
    sharding degrees of parameters, gradients and optimizer: `ZeRO 1/4/8`."""
    sharding = sharding_text(strategy).partition(" over ")[0]
    if sharding.startswith("ZeRO: "):
        sharding = f"ZeRO {strategy.param_shard}/{strategy.grad_shard}/{strategy.optim_shard}"
    degrees = degrees_text(strategy).replace(" · ", " ")
    return f"{degrees}, {sharding}" if sharding else degrees


def schedule_text(strategy: Strategy) -> str:
    """The pipeline schedule with its virtual stages per rank; empty without pipeline parallelism."""
    if strategy.pp == 1:
        return ""
    return strategy.schedule + (f" × {strategy.vpp}" if strategy.vpp > 1 else "")


def batch_text(strategy: Strategy, job: Job) -> str:
    """Micro-batch size, and micro-batches per replica."""
    microbatches = job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    return microbatches_text(strategy.micro_batch_size, microbatches)


def microbatches_text(micro_batch_size: int, microbatches: int) -> str:
    """`micro-batch size 2, 16 micro-batches`."""
    return f"micro-batch size {micro_batch_size}, {counted(microbatches, 'micro-batch')}"


def recompute_text(strategy: Strategy) -> str:
    """Activation recomputation."""
    if strategy.recompute == "none":
        return "no recompute"
    if strategy.recompute == "selective":
        return f"recompute {strategy.recompute_modules.replace('+', ' + ') or 'selective'}"
    return f"recompute {counted(strategy.recompute_layers, 'layer')} in full"


def offload_text(strategy: Strategy) -> str:
    """What is offloaded to the host; empty for nothing."""
    return "" if strategy.offload == "none" else f"offload {strategy.offload}"


def context_text(strategy: Strategy) -> str:
    """The kind of context parallelism; empty without."""
    return f"cp by {strategy.cp_kind}" if strategy.cp > 1 else ""


def option_texts(strategy: Strategy) -> list[str]:
    """Recomputation, sequence parallelism, kind of context parallelism, offload; what is off is left out,
    except for recomputation."""
    sequence = "sequence parallel" if strategy.sequence_parallel else ""
    texts = [recompute_text(strategy), sequence, context_text(strategy), offload_text(strategy)]
    return [text for text in texts if text]


def value_text(value: object) -> str:
    """A field's value; `yes` and `no` for flags."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value) or "none"


def reason_text(code: str) -> str:
    """Why a candidate was rejected, for the code of a reason."""
    return _REASON_TEXTS.get(code, code)


def term_text(name: str) -> str:
    """The label of a term of the step time or of memory: its key with spaces for underscores."""
    return TERM_LABELS.get(name, name.replace("_", " "))


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `3 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def detail_texts(strategy: Strategy, job: Job, layers: int) -> list[str]:
    """All choices of a strategy except its degrees, a few words each; `layers` are the model's."""
    return [text for text in (batch_text(strategy, job), *choice_texts(strategy, layers)) if text]


def choice_texts(strategy: Strategy, layers: int) -> list[str]:
    """All choices of a strategy except its degrees and its batch, a few words each."""
    texts = [
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
    """Layers of the first and last stage; empty where the split is even."""
    end_layers = (strategy.first_stage_layers, strategy.last_stage_layers)
    if end_layers == tuple(map(int, even_ends(layers, strategy.pp * strategy.vpp))):
        return ""
    return f"ends of {end_layers[0]} and {end_layers[1]} layers"


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of a strategy of a model with so many layers: the `fields` that make it, the words of the
    card, and the words where the card has none."""

    fields: tuple[str, ...]
    text: Callable[[Strategy, int], str]
    lacking: str = ""


_CHOICES = (
    _Choice(("param_shard", "grad_shard", "optim_shard"), lambda one, _: sharding_text(one), "ZeRO-0"),
    _Choice(("recompute", "recompute_modules", "recompute_layers"), lambda one, _: recompute_text(one)),
    _Choice(("offload",), lambda one, _: offload_text(one), "no offload"),
    _Choice(
        ("sequence_parallel",),
        lambda one, _: "sequence parallel" if one.sequence_parallel else "",
        "no sequence parallelism",
    ),
    _Choice(("cp_kind",), lambda one, _: context_text(one), "no context parallelism"),
    _Choice(("schedule", "vpp"), lambda one, _: schedule_text(one), "no pipeline"),
    _Choice(("micro_batch_size",), lambda one, _: f"micro-batch size {one.micro_batch_size}"),
    _Choice(
        ("first_stage_layers", "last_stage_layers"),
        lambda one, layers: end_stages_text(one, layers),
        "even stages",
    ),
    _Choice(("axis_order",), lambda one, _: f"axes {one.axis_order}"),
)
"""All choices but the degrees, which stand next to the differences."""

_NAMED = {*_DEGREES, *(name for choice in _CHOICES for name in choice.fields)}


def difference_texts(strategy: Strategy, best: Strategy, layers: int) -> Iterator[str]:
    """Every choice in which `strategy` differs from `best`, except degrees, in the words of the card; also
    what it lacks, such as `no offload`. A field without words of its own has its name."""
    for choice in _CHOICES:
        text = choice.text(strategy, layers)
        if text != choice.text(best, layers):
            yield text or choice.lacking
    for name in FIELDS:
        value = getattr(strategy, name)
        if name not in _NAMED and value != getattr(best, name):
            yield f"{name} {value_text(value)}"


def difference_text(strategy: Strategy, best: Strategy, layers: int) -> str:
    """The same, joined by commas."""
    return ", ".join(difference_texts(strategy, best, layers))


def short_difference_text(strategy: Strategy, best: Strategy, layers: int) -> str:
    """The same for narrow columns: without the ranks that states are sharded over."""
    return ", ".join(text.partition(" over ")[0] for text in difference_texts(strategy, best, layers))


def changed_fields(strategy: Strategy, best: Strategy, *, but: str) -> str:
    """Fields other than `but` in which `strategy` differs from `best`, at most three of them by name."""
    changed = [name for name in FIELDS if name != but and getattr(strategy, name) != getattr(best, name)]
    shown = [f"{name} {value_text(getattr(strategy, name))}" for name in changed[:3]]
    return ", ".join(shown + ([f"{len(changed) - 3} more"] if len(changed) > 3 else []))


def gib(nbytes: float) -> str:
    """Bytes as a number of GiB, without the unit."""
    return f"{nbytes / GIB:.1f}"


def memory(nbytes: float, largest: float = 0.0) -> str:
    """Bytes in GiB with one decimal; in MiB where both they and `largest`, the largest value shown with them,
    are below 1 GiB."""
    if max(nbytes, largest) >= GIB:
        return f"{gib(nbytes)} GiB"
    mib = nbytes / 2**20
    return f"{mib:.0f} MiB" if mib >= 100.0 else f"{mib:.1f} MiB"


def rounded_gib(nbytes: float) -> str:
    """Bytes in whole GiB, from 10 GiB on; with one decimal below that, and two below 1 GiB."""
    amount = nbytes / GIB
    return f"{amount:,.{0 if amount >= 10.0 else 1 if amount >= 1.0 else 2}f}"


def rounded_band(band: tuple[float, float], nbytes: float) -> tuple[str, str]:
    """Both ends of the band of `nbytes`, in GiB, or with their unit where these are shown in MiB."""
    low, high = band
    if nbytes >= GIB:
        return rounded_gib(low), rounded_gib(high)
    return f"{low / 2**20:.0f}", f"{high / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """A step time or a part of it, in s or ms with four digits; below 1 ps, which is rounding, 0."""
    if value >= 1.0:
        return f"{value:,.3f} s" if value < 100 else f"{value:,.1f} s"
    return f"{value * 1e3 if abs(value) >= 1e-12 else 0.0:.4g} ms"


def rounded_seconds(value: float) -> str:
    """An uncertain time: three digits."""
    return f"{digits(value, 3)} s" if value >= 1.0 else f"{digits(value * 1e3, 3)} ms"


def pair(predicted_s: float | None, measured_s: float) -> tuple[str, str, str]:
    """Predicted and measured seconds, and their ratio; a dash where one does not exist."""
    if predicted_s is None:
        return "-", seconds(measured_s), "-"
    ratio = f"{predicted_s / measured_s:.2f}" if measured_s > 0 else "-"
    return seconds(predicted_s), seconds(measured_s), ratio


def digits(value: float, number: int) -> str:
    """A positive number with `number` significant digits, and all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10 ** (number - 1) else f"{value:#.{number}g}"


def hours(value_s: float) -> str:
    """Whole hours from 100 h on, three digits below."""
    value = value_s / 3600.0
    return f"{value:,.0f} h" if value >= 100 else f"{value:.3g} h"


def percent(fraction: float, digits: int = 1) -> str:
    return f"{fraction * 100:.{digits}f} %"


def slower_text(fraction: float) -> str:
    """How much slower a plan is, with a sign: `+4.0 %`."""
    return f"{fraction * 100:+.1f} %"


def bar(fraction: float, width: int) -> str:
    """A bar of `width` columns filled to `fraction`, in eighths of a column."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def wrapped(words: Sequence[str], separator: str, width: int) -> list[str]:
    """The words joined by `separator` into lines of at most `width` columns; a longer word gets its own
    line."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return lines


def wrapped_rows(
    label: str, texts: Sequence[str], style: str = "", *, separator: str = " · "
) -> Iterator[Line]:
    """`texts`, joined by `separator`, as lines of a card; the first has the label."""
    for place, line in enumerate(wrapped(texts, separator, columns() - LABEL)):
        yield row("" if place else label, (line, style))


def span_rows(label: str, *spans: Span) -> Iterator[Line]:
    """Spans as a line of a card, continued on the next line where the card is too narrow."""
    line: list[Span] = []
    used = LABEL
    for text, style in spans:
        if line and used + len(text.rstrip()) > columns():
            yield row(label, *line)
            label, line, used, text = "", [], LABEL, text.lstrip()
        line.append((text, style))
        used += len(text)
    yield row(label, *line)


def wrapped_text(text: str, width: int) -> list[str]:
    """A sentence in lines of at most `width` columns; a longer word, such as an address, gets its own."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def text_rows(label: str, text: str, style: str = "") -> Iterator[Line]:
    """A sentence as lines of a card; the first has the label."""
    for place, line in enumerate(wrapped_text(text, columns() - LABEL)):
        yield row("" if place else label, (line, style))


def tokens_per_s(result: Result, devices: int) -> float:
    """Tokens per second of the whole cluster; 0 where samples have no tokens."""
    return (result.tokens_per_s_per_device or 0.0) * devices
