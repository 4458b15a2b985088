"""Strategies as text: `tp=8,pp=4,zero_stage=1,micro_batch_size=1`, in any order, without repeats.

`parse_fields` reads fields, `complete` fills in defaults and checks, `strategy_text` and `brief_text` write
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import unknown
from shardwise.model import MODULES, NO_MODULES, Model, modules_of_layers, names_of, set_text
from shardwise.strategy.strategy import (
    AXES,
    FIELD_VALUES,
    FIELDS,
    ORDERS,
    Strategy,
    even_ends,
    largest_stage,
    strategy_record,
)

ALIASES = ("zero_stage", "dp_replicate", "dp_shard")
"""Input names for combinations of sharding degrees."""

_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_LARGEST = 10_000_000
"""Largest number that a field may have; larger ones are typing errors."""


def parse_fields(text: str, *, key: str = "strategy") -> dict[str, int | str | bool]:
    """The fields that `text` names, with their values; aliases stay as they are.

    Raises ConfigError for an unknown or repeated field, a value that the field does not have, or text that is
    not `name=value` pairs joined by commas.
    """
    fields: dict[str, int | str | bool] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or not value:
            raise ConfigError("a field needs a value", key=key, found=repr(pair), allowed="name=value,...")
        if name not in FIELDS and name not in ALIASES:
            raise unknown("is not a field of a strategy", name, (*FIELDS, *ALIASES), key=key)
        if name in fields:
            raise ConfigError(f"field {name!r} is given twice", key=key)
        fields[name] = _parsed_value(name, value, key)
    return fields


def _parsed_value(name: str, value: str, key: str) -> int | str | bool:
    where = f"{key}.{name}"
    if name == "sequence_parallel":
        if value.lower() not in _FLAGS:
            raise ConfigError("not true or false", key=where, found=repr(value), allowed="true, false")
        return _FLAGS[value.lower()]
    if name == "axis_order":
        return _full_order(value, where)
    if name == "recompute_modules":
        return _module_set(value, where)
    if name in FIELD_VALUES:
        if value not in FIELD_VALUES[name]:
            raise unknown("is not a value of this field", value, FIELD_VALUES[name], key=where)
        return value
    if not (value.isascii() and value.isdigit()) or len(value) > 8 or int(value) > _LARGEST:
        raise ConfigError(
            "not a whole number in range", key=where, found=repr(value[:40]), allowed=f"0 to {_LARGEST}"
        )
    number = int(value)
    if name == "zero_stage" and number > 3:
        raise ConfigError("is not a stage", key=where, found=value, allowed="0 to 3")
    smallest = 0 if name.endswith("_layers") or name == "zero_stage" else 1
    if number < smallest:
        raise ConfigError("too small", key=where, found=value, allowed=f"at least {smallest}")
    return number


def is_value(name: str, value: object) -> bool:
    """Whether `value` has the type and the range of the field or alias `name`."""
    if name == "sequence_parallel":
        return isinstance(value, bool)
    if name in FIELD_VALUES:
        return value in FIELD_VALUES[name]
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    smallest = 0 if name.endswith("_layers") or name == "zero_stage" else 1
    return smallest <= value <= (3 if name == "zero_stage" else _LARGEST)


def _full_order(value: str, where: str) -> str:
    """The full order of axes: axes that are not named go to the end, in the default order."""
    named = value.split("-")
    order = "-".join((*named, *(axis for axis in AXES if axis not in named)))
    if order not in ORDERS:
        raise ConfigError(
            "not an order of the axes", key=where, found=repr(value), allowed="tp, cp, dp, pp joined by '-'"
        )
    return order


def _module_set(value: str, where: str) -> str:
    """The modules joined by `+`, in the order in which a set is written."""
    names = [name.strip() for name in value.split("+")]
    for name in names:
        if name not in MODULES:
            raise unknown("is not a module", name, MODULES, key=where)
    if len(set(names)) < len(names):
        raise ConfigError("a module is given twice", key=where, found=repr(value))
    return set_text(names)


def require_modules(model: Model, modules: str, key: str) -> None:
    """ConfigError for the first module of the set that no layer of the model has."""
    own = modules_of_layers(kind.operators for kind in model.kinds)
    for name in names_of(modules):
        if name not in own:
            raise unknown("is no module of the model's layers", name, own, key=key)


def shards_of(fields: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """The sharding degrees that the aliases among `fields` stand for, over `ranks` = dp * cp ranks.

    zero_stage 1 shards optimizer states, 2 also gradients, 3 also parameters, over dp_shard ranks (default:
    all). Raises ConfigError where they do not divide `ranks`.
    """
    if not any(alias in fields for alias in ALIASES):
        return {}
    degree = fields.get("dp_shard")
    if degree is None:
        replicate = fields.get("dp_replicate", 1)
        if ranks % replicate:
            raise ConfigError(
                "dp_replicate does not divide dp * cp",
                key="strategy.dp_replicate",
                found=str(replicate),
                allowed=f"divisors of {ranks}",
            )
        degree = ranks // replicate
    elif ranks % degree:
        raise ConfigError(
            "dp_shard does not divide dp * cp", key="strategy.dp_shard", found=str(degree),
            allowed=f"divisors of {ranks}",
        )  # fmt: skip
    elif "dp_replicate" in fields and fields["dp_replicate"] * degree != ranks:
        raise ConfigError(
            "dp_replicate * dp_shard is not dp * cp",
            key="strategy.dp_shard",
            found=f"{fields['dp_replicate']} * {degree}",
            allowed=str(ranks),
        )
    stage = fields.get("zero_stage", 3)
    return {
        "optim_shard": degree if stage >= 1 else 1,
        "grad_shard": degree if stage >= 2 else 1,
        "param_shard": degree if stage >= 3 else 1,
    }


def complete(
    fields: Mapping[str, Any], *, devices: int, layers: int, experts: int | None, global_batch_size: int
) -> Strategy:
    """The strategy that `fields` describe; fields that are not named take their defaults.

    dp defaults to the remaining devices, the ends to the even split, the schedule to 1f1b (interleaved_1f1b
    where vpp > 1). Raises ConfigError where the degrees do not multiply to `devices`, or values contradict
    each other.
    """
    tp, pp, cp = (int(fields.get(name, 1)) for name in ("tp", "pp", "cp"))
    rest, left = divmod(devices, tp * pp * cp)
    dp = int(fields.get("dp", max(rest, 1)))
    if left or tp * pp * cp * dp != devices:
        raise ConfigError(
            "tp * cp * pp * dp is not the number of devices",
            key="strategy",
            found=f"{tp} * {cp} * {pp} * {dp}",
            allowed=str(devices),
        )
    schedule = fields.get("schedule", "interleaved_1f1b" if int(fields.get("vpp", 1)) > 1 else "1f1b")
    vpp = int(fields.get("vpp", {"zb_v": 2, "dualpipe_v": 2, "interleaved_1f1b": 2}.get(schedule, 1)))
    stages = pp * vpp
    first, last = _ends(fields, layers, stages)
    modules = fields.get("recompute_modules", NO_MODULES)
    implied = "selective" if modules else "full" if fields.get("recompute_layers", 0) else "none"
    recompute = fields.get("recompute", implied)
    largest = _largest_stage(layers, stages, first, last)
    aliased = shards_of(fields, dp * cp)
    for name, degree in aliased.items():
        if fields.get(name, degree) != degree:
            raise ConfigError(
                f"{name} and zero_stage, dp_shard or dp_replicate contradict each other",
                key=f"strategy.{name}",
                found=str(fields[name]),
                allowed=f"{degree}, or omit one of the two",
            )
    shards = {"param_shard": 1, "grad_shard": 1, "optim_shard": 1} | aliased
    etp = int(fields.get("etp", _default_etp(tp, cp, dp, int(fields.get("ep", 1))) if experts else 1))
    strategy = Strategy(
        tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=int(fields.get("ep", 1)), etp=etp,
        cp_kind=fields.get("cp_kind", "ring"),
        param_shard=int(fields.get("param_shard", shards["param_shard"])),
        grad_shard=int(fields.get("grad_shard", max(shards["grad_shard"], fields.get("param_shard", 1)))),
        optim_shard=int(
            fields.get(
                "optim_shard",
                max(shards["optim_shard"], fields.get("grad_shard", 1), fields.get("param_shard", 1)),
            )
        ),
        micro_batch_size=int(fields.get("micro_batch_size", 1)),
        schedule=schedule,
        sequence_parallel=bool(fields.get("sequence_parallel", tp > 1)),
        recompute=recompute,
        recompute_modules=modules,
        recompute_layers=int(fields.get("recompute_layers", largest if recompute == "full" else 0)),
        offload=fields.get("offload", "none"),
        axis_order=fields.get("axis_order", ORDERS[0]),
        first_stage_layers=first,
        last_stage_layers=last,
    )  # fmt: skip
    _check_values(strategy, layers, experts, largest, global_batch_size)
    return strategy


def _default_etp(tp: int, cp: int, dp: int, ep: int) -> int:
    """tp where tp * ep divides tp * cp * dp; else 1, no tensor parallelism of experts."""
    return tp if (tp * cp * dp) % (tp * ep) == 0 else 1


@lru_cache(maxsize=1024)
def _even_ends(layers: int, stages: int) -> tuple[int, int]:
    first, last = even_ends(layers, stages)
    return int(first), int(last)


@lru_cache(maxsize=1024)
def _largest_stage(layers: int, stages: int, first: int, last: int) -> int:
    return int(largest_stage(layers, stages, first, last))


def _ends(fields: Mapping[str, Any], layers: int, stages: int) -> tuple[int, int]:
    first, last = _even_ends(layers, stages)
    if stages == 2:
        if "first_stage_layers" in fields:
            first = int(fields["first_stage_layers"])
            last = layers - first
        elif "last_stage_layers" in fields:
            first = layers - int(fields["last_stage_layers"])
    first = int(fields.get("first_stage_layers", first))
    return first, int(fields.get("last_stage_layers", last))


def _check_values(
    strategy: Strategy, layers: int, experts: int | None, largest: int, global_batch_size: int
) -> None:
    """Raise ConfigError where fields contradict each other so that no space has such a candidate."""
    for is_fault, message, found in (
        *_sharding_faults(strategy),
        *_stage_faults(strategy, layers, largest),
        *_axis_faults(strategy, experts, global_batch_size),
    ):
        if is_fault:
            raise ConfigError(message, key="strategy", found=found)


def strategy_text(strategy: Strategy) -> str:
    """Every field of the strategy as text that `parse_fields` reads back."""
    return ",".join(f"{name}={_shown(value)}" for name, value in strategy_record(strategy).items())


Fault = tuple[bool, str, str]
"""Whether it is a fault, the requirement, and the values found."""


def _sharding_faults(s: Strategy) -> list[Fault]:
    chain = (s.param_shard, s.grad_shard, s.optim_shard, s.dp * s.cp)
    is_broken = any(b % a for a, b in pairwise(chain))
    demand = "param_shard divides grad_shard divides optim_shard divides dp * cp"
    return [(is_broken, demand, " | ".join(map(str, chain)))]


def _stage_faults(s: Strategy, layers: int, largest: int) -> list[Fault]:
    stages, first, last = s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers
    whole = {1: first == last == layers, 2: first + last == layers}.get(stages, first + last <= layers)
    looped = s.schedule in ("zb_v", "dualpipe_v")
    plain = s.schedule in ("1f1b", "gpipe", "zb_h1", "zb_h2")
    wrong_recompute = s.recompute == "full" and not 1 <= s.recompute_layers <= largest
    return [
        (s.pp == 1 and s.schedule != "1f1b", "a pipeline schedule needs pp > 1", s.schedule),
        (s.vpp > 1 and plain, "vpp > 1 needs interleaved_1f1b", s.schedule),
        (looped and s.vpp != 2, "zb_v and dualpipe_v have vpp = 2", str(s.vpp)),
        (s.schedule == "interleaved_1f1b" and s.vpp == 1, "interleaved_1f1b has vpp of at least 2", "1"),
        (
            not whole or min(first, last) < 0,
            "the stages have all layers exactly once",
            f"{first} first, {last} last of {layers}",
        ),
        (s.recompute != "full" and s.recompute_layers > 0, "recompute_layers needs full", s.recompute),
        (
            bool(s.recompute_modules) and s.recompute != "selective",
            "recompute_modules needs selective",
            s.recompute,
        ),
        (wrong_recompute, f"recompute_layers is 1 to {largest}", str(s.recompute_layers)),
    ]


def _axis_faults(s: Strategy, experts: int | None, global_batch_size: int) -> list[Fault]:
    each, left = divmod(global_batch_size, s.dp)
    splits_batch = left != 0 or each % s.micro_batch_size == 0
    has_grid = (s.tp * s.cp * s.dp) % (s.ep * s.etp) == 0
    return [
        (not splits_batch, "micro_batch_size divides a replica's batch", f"{s.micro_batch_size} in {each}"),
        (s.sequence_parallel and s.tp == 1, "sequence_parallel needs tp > 1", "tp=1"),
        (s.cp == 1 and s.cp_kind != "ring", "cp_kind needs cp > 1", s.cp_kind),
        (
            not experts and (s.ep, s.etp) != (1, 1),
            "a dense model has ep = etp = 1",
            f"ep={s.ep}, etp={s.etp}",
        ),
        (bool(experts) and not has_grid, "etp * ep divides tp * cp * dp", f"{s.etp} * {s.ep}"),
    ]


def brief_text(
    strategy: Strategy, *, devices: int, layers: int, experts: int | None, global_batch_size: int
) -> str:
    """The strategy with as few fields as possible; `complete` restores the others."""

    def completed(fields: Mapping[str, Any]) -> Strategy | None:
        try:
            return complete(
                fields, devices=devices, layers=layers, experts=experts, global_batch_size=global_batch_size
            )
        except ConfigError:
            return None

    fields = strategy_record(strategy)
    for name in tuple(fields):
        fewer = {key: value for key, value in fields.items() if key != name}
        if completed(fewer) == strategy:
            fields = fewer
    return ",".join(f"{name}={_shown(value)}" for name, value in fields.items())


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
