"""The strategies that a measured row may have run: what it states, and a choice of what it leaves open."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final

from shardwise.accuracy.rows import Row
from shardwise.cost import Problem
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.strategy import RECOMPUTES, RULES, SCHEDULES, Strategy, StrategyTable, complete, first_broken

Value = int | str | bool
Choice = Mapping[str, Value]

MAX_STAGES: Final = 1024
"""Pipeline stages beyond which a row is not evaluated."""

MAX_MICRO_BATCH: Final = 32
"""The largest micro-batch among those that a row without one may have run."""

MICRO_BATCH, SHARDING, RECOMPUTE = "micro_batch", "zero_stage", "recompute"
FASTEST: Final = "the fastest that fits"

_RULES: Final = tuple(rule for rule in RULES if rule.code != "layers_vpp")
"""What every run obeys; more stages than layers is refused with the stages."""


def layouts_of(row: Row, problem: Problem) -> tuple[StrategyTable, tuple[str, ...]]:
    """Every legal strategy that the row may have run, and what was assumed; ConfigError where it states
    something impossible."""
    assumed: list[str] = []
    fields = _stated(row, problem, assumed)
    choices = [
        _micro_batches(row, int(fields["dp"]), problem, assumed),
        _expert_degrees(row, problem, fields, assumed),
        _shardings(row, problem, fields, assumed),
        _recomputes(row, problem, fields, assumed),
    ]
    table = StrategyTable.of(_possible(problem, fields, list(itertools.product(*choices))))
    broken = first_broken(table, problem.limits, _RULES)
    if (broken >= 0).all():
        rule = _RULES[int(broken[0])]
        raise ConfigError(f"breaks the rule that {rule.text}", key="strategy")
    return table if (broken < 0).all() else table.take(broken < 0), tuple(assumed)


def _possible(problem: Problem, fields: Choice, several: Sequence[Sequence[Choice]]) -> list[Strategy]:
    """The strategies of these choices that do not contradict themselves; ConfigError where all do."""
    experts = problem.model.experts
    found: list[Strategy] = []
    fault = ConfigError("leaves no choice", key="strategy")
    for chosen in several:
        try:
            strategy = complete(
                {name: value for part in (fields, *chosen) for name, value in part.items()},
                devices=problem.cluster.devices,
                layers=problem.model.layers,
                experts=None if experts is None else experts.experts,
                global_batch_size=problem.job.global_batch_size,
            )
        except ConfigError as error:
            fault = error
        else:
            found.append(strategy)
    if not found:
        raise fault
    return found


def _stated(row: Row, problem: Problem, assumed: list[str]) -> dict[str, Value]:
    """The fields on which all strategies of the row agree."""
    degrees = {name: getattr(row, name) or 1 for name in ("tp", "pp", "cp")}
    devices, each = problem.cluster.devices, degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = row.dp or max(devices // each, 1)
    if each * dp != devices:
        found = " * ".join(str(degree) for degree in (*degrees.values(), dp))
        raise ConfigError(
            "tp * pp * cp * dp is not the number of devices", key="gpus", found=found, allowed=str(devices)
        )
    fields: dict[str, Value] = {**degrees, "dp": dp}
    if problem.model.experts is not None:
        fields["etp"] = 1
    elif (row.ep or 1) > 1:
        raise ConfigError("splits experts of a dense model", key="ep", found=str(row.ep))
    fields |= _schedule(row, assumed)
    fields |= _stages(row, problem.model.layers, assumed)
    return {**fields, "sequence_parallel": _sequence_parallel(row, problem, assumed)}


def _schedule(row: Row, assumed: list[str]) -> Choice:
    pp, vpp = row.pp or 1, row.vpp or 1
    if pp == 1:
        return {}
    if pp * vpp > MAX_STAGES:
        raise ConfigError(
            "has too many pipeline stages", key="pp", found=f"{pp} * {vpp}", allowed=f"at most {MAX_STAGES}"
        )
    if row.schedule in SCHEDULES:
        looped = row.schedule in ("zb_v", "dualpipe_v")
        return {"schedule": row.schedule, "vpp": row.vpp or 2 if looped else vpp}
    if row.schedule:
        raise ConfigError(
            "is not a known schedule",
            key="schedule",
            found=short_repr(row.schedule),
            allowed=", ".join(SCHEDULES),
        )
    name = "interleaved_1f1b" if vpp > 1 else "1f1b"
    assumed.append(f"schedule: {name}")
    return {"schedule": name, "vpp": vpp}


def _stages(row: Row, layers: int, assumed: list[str]) -> Choice:
    """Decoder layers of the first and last stage: from stated boundaries, or where stages hold the ends
    alone."""
    stages = (row.pp or 1) * (row.vpp or 1)
    if stages == 1:
        return {}
    if row.stage_layers:
        counts = _counts(row.stage_layers, stages, layers, assumed)
        return {"first_stage_layers": counts[0], "last_stage_layers": counts[-1]}
    if stages <= layers:
        return {}
    if stages > layers + 2:
        raise ConfigError("is more stages than layers", key="pp", found=f"{stages} of {layers} layers")
    assumed.append("stage_layers: one layer per stage, the last with the head alone")
    if stages == layers + 2:
        assumed[-1] = "stage_layers: one layer per stage, the ends with embedding and head alone"
    return {"first_stage_layers": 0 if stages == layers + 2 else 1, "last_stage_layers": 0}


def _counts(text: str, stages: int, layers: int, assumed: list[str]) -> list[int]:
    """Decoder layers per stage from counts joined by `/`; of counts that hold more units than layers, two
    lie before the layers (the embedding and what follows it) and the rest behind."""
    if not re.fullmatch(r"\d{1,5}(/\d{1,5})*", text):
        raise ConfigError("is not counts joined by /", key="stage_layers", found=short_repr(text))
    units = [int(unit) for unit in text.split("/")]
    total = sum(units)
    if len(units) != stages:
        raise ConfigError(
            "has not one count per stage", key="stage_layers", found=f"{len(units)}", allowed=f"{stages}"
        )
    if total < layers:
        raise ConfigError(
            "leaves out layers", key="stage_layers", found=f"{total}", allowed=f"{layers} or more"
        )
    counts = units
    if total > layers:
        before = min(2, total - layers)
        bounds = [min(max(bound - before, 0), layers) for bound in itertools.accumulate(units, initial=0)]
        counts = [after - start for start, after in itertools.pairwise(bounds)]
        assumed.append(f"stage_layers: layers {'/'.join(map(str, counts))} of {total} units")
    middle = counts[1:-1]
    if middle and max(middle) - min(middle) > 1:
        assumed.append("stage_layers: stages between the ends taken as even")
    return counts


def _sequence_parallel(row: Row, problem: Problem, assumed: list[str]) -> bool:
    if (row.tp or 1) == 1:
        return False
    notes = row.notes.casefold()
    if "no sequence parallel" in notes:
        return False
    if "sequence parallel" in notes:
        return True
    on = problem.profile.sequence_parallel
    assumed.append(f"sequence_parallel: {'on' if on else 'off'}, as is customary")
    return on


def _micro_batches(row: Row, dp: int, problem: Problem, assumed: list[str]) -> Sequence[Choice]:
    batch = problem.job.global_batch_size
    if batch % dp:
        raise ConfigError(
            "is not divisible by dp", key="global_batch", found=str(batch), allowed=f"multiples of {dp}"
        )
    if row.micro_batch is not None:
        return [{"micro_batch_size": row.micro_batch}]
    assumed.append(f"{MICRO_BATCH}: {FASTEST}")
    largest = min(batch // dp, MAX_MICRO_BATCH)
    return [{"micro_batch_size": size} for size in range(1, largest + 1) if batch // dp % size == 0]


def _expert_degrees(row: Row, problem: Problem, fields: Choice, assumed: list[str]) -> Sequence[Choice]:
    experts = problem.model.experts
    if experts is None:
        return [{}]
    if row.ep is not None:
        return [{"ep": row.ep}]
    ranks = int(fields["tp"]) * int(fields["cp"]) * int(fields["dp"])
    assumed.append(f"ep: {FASTEST}")
    powers = [2**power for power in range(11)]
    return [{"ep": ep} for ep in powers if ranks % ep == 0 and experts.experts % ep == 0]


def _shardings(row: Row, problem: Problem, fields: Choice, assumed: list[str]) -> Sequence[Choice]:
    text = row.zero_stage
    if not text:
        stages = problem.profile.zero_stages
        if len(stages) > 1:
            assumed.append(f"{SHARDING}: {FASTEST}")
        elif stages[0]:
            assumed.append(f"{SHARDING}: {stages[0]}, as is customary")
        return [{"zero_stage": stage} for stage in stages]
    stage = int(text[0]) if text[0] in "0123" else 3 if "FSDP" in text.upper() else None
    if stage is None:
        raise ConfigError(
            "is not a sharding", key="zero_stage", found=short_repr(text), allowed="0 to 3, or FSDP"
        )
    degree = re.search(r"FSDP\s+(\d{1,9})", text, re.IGNORECASE)
    ranks = int(fields["dp"]) * int(fields["cp"])
    if degree is None or int(degree.group(1)) == 0 or ranks % int(degree.group(1)):
        return [{"zero_stage": stage}]
    return [{"zero_stage": stage, "dp_shard": int(degree.group(1))}]


def _recomputes(row: Row, problem: Problem, fields: Choice, assumed: list[str]) -> Sequence[Choice]:
    """What the row states; else all that the software has, of full recomputation every eighth of a stage."""
    words = row.recompute.casefold().split()
    if not words:
        assumed.append(f"{RECOMPUTE}: {FASTEST}")
        has = problem.profile.recomputes
        whole: list[Choice] = [{"recompute": choice} for choice in has if choice != "full"]
        if "full" not in has:
            return whole
        most = -(-problem.model.layers // (int(fields["pp"]) * int(fields.get("vpp", 1))))
        counts = sorted({max(most * eighths // 8, 1) for eighths in range(1, 9)})
        full: list[Choice] = [{"recompute": "full", "recompute_layers": count} for count in counts]
        return [*whole, *full]
    if words[0] not in RECOMPUTES:
        raise ConfigError(
            "is not a recompute",
            key="recompute",
            found=short_repr(row.recompute),
            allowed=", ".join(RECOMPUTES),
        )
    return [{"recompute": words[0]}]
