"""Named modules that selective recomputation repeats (docs/concepts/cost-model.md, sections 10 and 14), by
the names of a layer's operators.

`module_parts` lists what each module of a layer repeats and which saved tensors it drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise_verify.reading import InputError, short
from shardwise_verify.records import LayerOperator, SavedRecord

MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""The modules, in the order in which a set is written: joined by `+`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A module in one half of a layer (`attention` or `mlp`): the operators that it repeats, and the saved
    tensors that it drops, each with its operator. `collectives` are the kinds of communication that it
    repeats: tensor, context, expert."""

    module: str
    half: str
    repeated: tuple[LayerOperator, ...]
    dropped: tuple[tuple[LayerOperator, SavedRecord], ...]
    drops_scores: bool = False
    collectives: tuple[str, ...] = ()


def is_set(text: str) -> bool:
    """Whether the text is a set of modules as it is written; the empty text is the set without modules."""
    names = text.split("+") if text else []
    return names == [module for module in MODULES if module in names]


def repeated_by_themselves(modules: str) -> tuple[str, ...]:
    """The modules of a set without those that `moe` contains, where it is in the set."""
    names = tuple(modules.split("+")) if modules else ()
    return tuple(name for name in names if "moe" not in names or name not in ("moe_act", "shared_experts"))


def module_parts(operators: Sequence[LayerOperator]) -> tuple[ModulePart, ...]:
    """All modules of a layer. InputError where it lacks an operator that belongs to one."""
    by_block: dict[str, dict[str, LayerOperator]] = {}
    for operator in operators:
        *_, block, name = ("", *operator.name.split("."))
        by_block.setdefault(block, {})[name] = operator
    try:
        return (*_of_attention(by_block.get("attention", {})), *_norms(by_block), *_of_mlp(by_block))
    except KeyError as error:
        raise InputError("lacks an operator", key="model.layers", found=short(error.args[0])) from None


_Block = dict[str, LayerOperator]


def _of_attention(attention: _Block) -> list[ModulePart]:
    if not attention:
        return []
    core = attention["core"]
    rows_of_scores = [(core, saved) for saved in core.saved if saved.dtype == "fp32"]
    found = [
        ModulePart(
            module="core_attn", half="attention", repeated=(core,), dropped=tuple(rows_of_scores),
            drops_scores=True, collectives=("context",),
        )
    ]  # fmt: skip
    if "kv_up" in attention:
        names = ("q_up" if "q_up" in attention else "q", "kv_up", "rotary")
        inputs = [(core, saved) for saved in core.saved if not saved.selective]
        repeated = _with_adapters(attention, names)
        found.append(
            ModulePart(
                module="mla_up_proj",
                half="attention",
                repeated=repeated,
                dropped=(*inputs, *_inside_adapters(repeated)),
            )
        )
    return found


def _matrix_of(name: str) -> str:
    """The operator, or that whose matrix an adapter's operator is for."""
    return name.partition("_lora_")[0]


def _with_adapters(block: _Block, names: Sequence[str]) -> tuple[LayerOperator, ...]:
    """These operators of a block with those of their adapters."""
    return tuple(operator for name, operator in block.items() if _matrix_of(name) in names)


def _inside_adapters(operators: Sequence[LayerOperator]) -> list[tuple[LayerOperator, SavedRecord]]:
    """The saved tensors between the two matrices of adapters."""
    return [
        (operator, saved)
        for operator in operators
        for saved in operator.saved
        if saved.name.endswith("_lora_a.output")
    ]


def _norms(by_block: dict[str, _Block]) -> list[ModulePart]:
    """Norms whose output is an operand of the first matmul of the same half. (After a block, a norm makes
    the residual stream, which is no operand.)"""
    first = {
        "attention": ("attention", ("q", "q_down", "k", "v", "q_k_v", "kv_down")),
        "mlp": ("router", ("logits",)) if "router" in by_block else ("mlp", ("up", "gate", "gate_up")),
    }
    found = []
    for half, (block, names) in first.items():
        norm = by_block.get(half, {}).get("norm")
        readers = _with_adapters(by_block.get(block, {}), names)
        outputs = [
            (reader, saved)
            for reader in readers
            for saved in reader.saved
            if saved.selective and saved.dtype == "operand"
        ]
        if norm is not None and outputs:
            found.append(ModulePart(module="layernorm", half=half, repeated=(norm,), dropped=tuple(outputs)))
    return found


def _of_mlp(by_block: dict[str, _Block]) -> list[ModulePart]:
    dense, shared, experts = (by_block.get(name, {}) for name in ("mlp", "shared", "experts"))

    def saved_by(block: _Block, *names: str) -> tuple[tuple[LayerOperator, SavedRecord], ...]:
        return tuple((block[name], saved) for name in names for saved in block[name].saved)

    found = []
    inner = ("activation", "down")
    if "up" in dense:
        repeated = _with_adapters(dense, ("gate", "up", "gate_up", *inner))
        # The input of the down projection, which an adapter of it saves where the projection is frozen.
        inputs = [(one, each) for one in _with_adapters(dense, inner) for each in one.saved]
        inputs = [pair for pair in inputs if not pair[1].name.endswith("_lora_a.output")]
        found.append(
            ModulePart(
                module="mlp", half="mlp", repeated=repeated,
                dropped=(*inputs, *_inside_adapters(repeated)), collectives=("tensor",),
            )
        )  # fmt: skip
    of_shared = saved_by(shared, *inner) if shared else ()
    if shared:
        found.append(
            ModulePart(
                module="shared_experts", half="mlp", repeated=tuple(shared.values()), dropped=of_shared,
                collectives=("tensor",),
            )
        )  # fmt: skip
    if experts:
        router = by_block["router"]
        dropped = (*saved_by(router, "top_k"), *saved_by(experts, "up", *inner), *of_shared)
        found.append(
            ModulePart(
                module="moe",
                half="mlp",
                repeated=(*router.values(), *experts.values(), *shared.values()),
                dropped=dropped,
                collectives=("expert", "tensor") if shared else ("expert",),
            )
        )
        found.append(
            ModulePart(
                module="moe_act",
                half="mlp",
                repeated=(experts["activation"],),
                dropped=saved_by(experts, "down"),
            )
        )
    return found
