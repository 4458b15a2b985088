"""The generated part of docs/reference/operators.md, which describes each kind.

    python -m tests.unit.graph.operators_page

writes it below the heading "Kinds".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.unit.graph.operators import operator

from shardwise.graph import (
    CollectiveCall,
    KernelWork,
    OpNode,
    SavedTensors,
    ShardingRule,
    check_op,
    rules_of,
    saved_of,
    work_of,
)
from shardwise.graph import placement_text as place
from shardwise.graph.kinds import KINDS, Attribute
from shardwise.graph.record import Moved

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "operators.md"
HEADING = "## Kinds\n"

SIZES = {
    "b": 8, "s": 16, "t": 16, "k": 32, "n": 64, "h": 8, "g": 4, "d": 8, "e": 8, "v": 128, "c": 32, "o": 64,
    "x": 16, "y": 16, "i": 3, "j": 3, "z": 8, "w": 8, "f": 4, "r": 64, "u": 3, "kn": 96, "m": 64, "two": 2,
}  # fmt: skip


def _example(kind: str, text: str, parameters: str = "", **attributes: int | str | bool) -> OpNode:
    op = operator(kind, text, SIZES, parameters=parameters)
    return OpNode(
        name=op.name, kind=kind, dims=op.dims, inputs=op.inputs, output=op.output, parameters=op.parameters,
        attributes=attributes,
    )  # fmt: skip


EXAMPLES = (
    _example("einsum", "b s k, b n -> b s n", "k n"),
    _example("matmul", "b s k, b k n -> b s n"),
    _example("linear", "b s k -> b s n", "n k, n"),
    _example("convolution", "b c x y -> b o x y", "o c i j, o", padding=1),
    _example("pool", "b c x y -> b c z w", function="maximum", kernel=2),
    _example("lstm", "b s k -> b s n", "f n k, f n r, f n", time="s"),
    _example("gru", "b s k -> b s n", "u n k, u n r, u n, u n", time="s"),
    _example("lstm_cell", "b k, two b r -> two b n", "f n k, f n r, f n"),
    _example("gru_cell", "b k, b r -> b n", "u n k, u n r, u n, u n"),
    _example("embedding", "b s -> b s n", "v n"),
    _example("attention", "b s h d, b t g d, b t g e -> b s h e", causal=True, heads="h", kv_heads="g"),
    _example("elementwise", "b s n, b s n -> b s n", function="silu_multiply"),
    _example("rotary", "b s h d, s d, s d -> b s h d"),
    _example("layer_norm", "b s n -> b s n", "n, n"),
    _example("rms_norm", "b s n -> b s n", "n"),
    _example("batch_norm", "b c x y -> b c x y", "c, c"),
    _example("group_norm", "b c x y -> b c x y", "c, c", groups=8),
    _example("softmax", "b s t -> b s t"),
    _example("reduce", "b s n -> b n", function="maximum"),
    _example("reshape", "b s m -> b s h d"),
    _example("transpose", "b s h d -> b h s d"),
    _example("concat", "b k, b n -> b kn"),
    _example("slice", "b s n -> b s k", start=32),
    _example("cross_entropy", "b s v, b s ->"),
    _example("mean_square", "b n, b n ->"),
    _example("binary_cross_entropy", "b n, b n ->"),
)


def rendered() -> str:
    """The sections of all kinds."""
    return "\n".join(line for op in EXAMPLES for line in _section(op)) + "\n"


def _section(op: OpNode) -> Iterator[str]:
    kind = KINDS[op.kind]
    yield f"\n### {kind.name}\n"
    yield kind.summary
    yield f"\nReads: {kind.operands}.\n"
    if kind.attributes:
        yield from ("| attribute | value | meaning |", "|---|---|---|")
        yield from (_attribute_row(attribute) for attribute in kind.attributes)
        yield ""
    yield f"Example `{_signature(op)}`{_settings(op)}:\n"
    yield from ("| rule | inputs | parameters | output | collectives |", "|---|---|---|---|---|")
    yield from (_rule_row(rule) for rule in rules_of(op))
    yield f"\nWork: {'; '.join(map(_work_text, work_of(op))) or 'none, it is a view'}."
    yield f"Saved for the backward pass: {_saved_text(saved_of(op))}."


def _attribute_row(attribute: Attribute) -> str:
    values = {
        "integer": f"whole number from {attribute.low}",
        "number": "any number",
        "flag": "true or false",
        "text": ", ".join(f"`{choice}`" for choice in attribute.choices),
        "dim": "name of a dim",
        "dims": "names of dims",
    }
    needed = "; required" if attribute.required else ""
    return f"| `{attribute.name}` | {values[attribute.type]} | {attribute.meaning}{needed} |"


def _signature(op: OpNode) -> str:
    inputs = ", ".join(_tensor(operand.dims) for operand in op.inputs)
    parameters = ", ".join(_tensor(parameter.dims) for parameter in op.parameters)
    return f"{inputs}{f'; {parameters}' if parameters else ''} -> {_tensor(op.output)}"


def _tensor(dims: tuple[str, ...]) -> str:
    return f"[{' '.join(dims)}]"


def _settings(op: OpNode) -> str:
    texts = [f"`{name}: {str(value).lower()}`" for name, value in op.attributes.items()]
    return f" with {', '.join(texts)}" if texts else ""


def _rule_row(rule: ShardingRule) -> str:
    inputs, parameters = (" ".join(map(place, places)) for places in (rule.inputs, rule.parameters))
    collectives = "; ".join(map(_collective_text, rule.collectives))
    return f"| {rule.name} | {inputs} | {parameters} | {place(rule.output)} | {collectives} |"


def _collective_text(call: CollectiveCall) -> str:
    copies = f"{call.copies:g} x " if call.copies != 1 else ""
    width = f" of {call.element_bytes:g} bytes" if call.element_bytes else ""
    times = _times_text(call.forward_calls, call.backward_calls)
    return f"{call.collective} {copies}{_tensor(call.dims)}{width}: {times}"


def _work_text(work: KernelWork) -> str:
    serial = f" at each of [{' '.join(work.serial)}]" if work.serial else ""
    if work.kind == "memory":
        return ", ".join(map(_moved_text, work.moved)) + serial
    roles = [
        f"{role} [{' '.join(dims)}]"
        for role, dims in (("batch", work.batch), ("m", work.m), ("n", work.n), ("k", work.k), ("v", work.v))
        if dims
    ]
    causal = ", causal" if work.causal else ""
    return f"{work.kind} of {', '.join(roles)}{causal}{serial}"


def _moved_text(moved: Moved) -> str:
    width = f" of {moved.element_bytes:g} bytes" if moved.element_bytes else ""
    return f"{_tensor(moved.dims)}{width} moved {_times_text(moved.forward, moved.backward)}"


def _times_text(forward: float, backward: float) -> str:
    """How often in the forward and in the backward pass; a pass without any is left out."""
    passes = (("forward", forward), ("backward", backward))
    return ", ".join(f"{times:g}x {name}" for name, times in passes if times)


def _saved_text(saved: SavedTensors) -> str:
    parts = [f"input {index}" for index in saved.inputs]
    parts += ["the output"] if saved.output else []
    parts += [f"{_tensor(dims)}{f' of {width:g} bytes' if width else ''}" for dims, width in saved.own]
    return ", ".join(parts) or "nothing"


def written() -> str:
    """The page with its sections generated again."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(HEADING) + len(HEADING)] + rendered()


if __name__ == "__main__":
    for example in EXAMPLES:
        check_op(example)
    PAGE.write_text(written(), encoding="utf-8")
