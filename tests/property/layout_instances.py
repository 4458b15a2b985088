"""Operator graphs for the tests of layouts and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.graph import Block, Operand, OpGraph, OpNode, Parameter, SizeGrowth


def op(
    name: str,
    kind: str,
    sizes: dict[str, int],
    inputs: list[tuple[str, str]],
    output: str,
    parameters: list[tuple[str, str]] | None = None,
    **attributes: int | float | bool | str,
) -> OpNode:
    """An operator; dims are letters: inputs and parameters as (name, dims), the output as dims."""
    listed = parameters or []
    used = {*output, *(dim for _, dims in [*inputs, *listed] for dim in dims)}
    return OpNode(
        name=name,
        kind=kind,
        dims={dim: size for dim, size in sizes.items() if dim in used},
        inputs=tuple(Operand(source, tuple(dims)) for source, dims in inputs),
        output=tuple(output),
        parameters=tuple(Parameter(each, tuple(dims)) for each, dims in listed),
        attributes=attributes,
    )


def mlp(batch: int, width: int, inner: int, classes: int) -> OpGraph:
    """Two linear layers with a relu between, and a loss, in one block."""
    sizes = {"b": batch, "i": width, "f": inner, "v": classes}
    operators = (
        op("up", "linear", sizes, [("x", "bi")], "bf", [("w_up", "if")]),
        op("relu", "elementwise", sizes, [("up", "bf")], "bf", function="relu"),
        op("down", "linear", sizes, [("relu", "bf")], "bv", [("w_down", "fv")]),
        op("loss", "cross_entropy", sizes, [("down", "bv"), ("target", "b")], ""),
    )
    return OpGraph(
        name="mlp",
        inputs={"x": (batch, width), "target": (batch,)},
        blocks=(Block(name="all", operators=operators),),
        batch=batch,
    )


def chain(batch: int, width: int, inner: int, classes: int, *, norm: str = "layer_norm") -> OpGraph:
    """Blocks in a row: a linear layer with a relu; two equal blocks, each with a norm, a linear layer and a
    sum with its input; a block without parameters; a head with a loss.
    """
    sizes = {"b": batch, "i": width, "f": inner, "g": inner, "v": classes}
    first = (
        op("up", "linear", sizes, [("x", "bi")], "bf", [("w_up", "if"), ("b_up", "f")]),
        op("relu", "elementwise", sizes, [("up", "bf")], "bf", function="relu"),
    )
    middle = (
        op("norm", norm, sizes, [("m", "bf")], "bf", [("middle.{0}.scale", "f")]),
        op("mix", "linear", sizes, [("norm", "bf")], "bg", [("middle.{0}.mix", "fg")]),
        op("add", "elementwise", sizes, [("m", "bf"), ("mix", "bf")], "bf", function="add"),
    )
    bend = (op("bend", "elementwise", sizes, [("e", "bf")], "bf", function="tanh"),)
    head = (
        op("down", "linear", sizes, [("z", "bf")], "bv", [("w_down", "fv")]),
        op("loss", "cross_entropy", sizes, [("down", "bv"), ("target", "b")], ""),
    )
    return OpGraph(
        name="chain",
        inputs={"x": (batch, width), "target": (batch,)},
        blocks=(
            Block(name="first", operators=first),
            Block(name="middle", operators=middle, entry="m", repeat=2),
            Block(name="bend", operators=bend, entry="e"),
            Block(name="head", operators=head, entry="z"),
        ),
        batch=batch,
        growth={"b": SizeGrowth(batch=1)},
    )


def skips(batch: int, width: int, inner: int, classes: int) -> OpGraph:
    """Blocks with skip tensors: two equal blocks read an inner tensor of the second block and its result; the
    last block reads an inner tensor of the first.
    """
    sizes = {"b": batch, "i": width, "f": inner, "g": inner, "v": classes}
    first = (
        op("up", "linear", sizes, [("x", "bi")], "bf", [("w_up", "if"), ("b_up", "f")]),
        op("relu", "elementwise", sizes, [("up", "bf")], "bf", function="relu"),
    )
    second = (
        op("turn", "linear", sizes, [("n", "bf")], "bg", [("w_turn", "fg")]),
        op("bend", "elementwise", sizes, [("turn", "bf")], "bf", function="tanh"),
    )
    middle = (
        op("mix", "linear", sizes, [("m", "bf")], "bg", [("middle.{0}.mix", "fg")]),
        op("gate", "elementwise", sizes, [("mix", "bf"), ("bend", "bf")], "bf", function="multiply"),
        op("add", "elementwise", sizes, [("m", "bf"), ("gate", "bf"), ("n", "bf")], "bf", function="add"),
    )
    last = (
        op("join", "elementwise", sizes, [("z", "bf"), ("up", "bf")], "bf", function="add"),
        op("down", "linear", sizes, [("join", "bf")], "bv", [("w_down", "fv")]),
        op("loss", "cross_entropy", sizes, [("down", "bv"), ("target", "b")], ""),
    )
    return OpGraph(
        name="skips",
        inputs={"x": (batch, width), "target": (batch,)},
        blocks=(
            Block(name="first", operators=first),
            Block(name="second", operators=second, entry="n"),
            Block(name="middle", operators=middle, entry="m", repeat=2),
            Block(name="last", operators=last, entry="z"),
        ),
        batch=batch,
        growth={"b": SizeGrowth(batch=1)},
    )


def skips_after_the_first(batch: int, width: int, inner: int, classes: int) -> OpGraph:
    """`skips`, whose last block reads only the block before it: skip tensors are live only between the first
    and the last block.
    """
    graph = skips(batch, width, inner, classes)
    *others, last = graph.blocks
    _, down, loss = last.operators
    down = replace(down, inputs=(Operand("z", down.inputs[0].dims),))
    return replace(graph, blocks=(*others, replace(last, operators=(down, loss))))


def without_first_weights(graph: OpGraph) -> OpGraph:
    """A `chain` whose first block is its relu alone; the data has the width of the block's output."""
    first, *others = graph.blocks
    relu = first.operators[1]
    (read,) = relu.inputs
    only = replace(relu, inputs=(Operand("x", read.dims),))
    inputs = {**graph.inputs, "x": relu.shape(relu.output)}
    return replace(graph, inputs=inputs, blocks=(replace(first, operators=(only,)), *others))


def llama(*, layers: int = 32, batch: int = 256, seq_len: int = 2048) -> OpGraph:
    """Llama-3.1-8B's operators: 15 per block."""
    s = {
        "b": batch,
        "s": seq_len,
        "t": seq_len,
        "e": 4096,
        "h": 32,
        "g": 8,
        "d": 128,
        "f": 14336,
        "v": 128256,
    }
    embedding = op("embed", "embedding", s, [("ids", "bs")], "bse", [("table", "ve")])
    layer = (
        op("norm1", "rms_norm", s, [("x", "bse")], "bse", [("w1", "e")]),
        op("q", "linear", s, [("norm1", "bse")], "bshd", [("wq", "ehd")]),
        op("k", "linear", s, [("norm1", "bse")], "bsgd", [("wk", "egd")]),
        op("v", "linear", s, [("norm1", "bse")], "bsgd", [("wv", "egd")]),
        op("q_rot", "rotary", s, [("q", "bshd")], "bshd"),
        op("k_rot", "rotary", s, [("k", "bsgd")], "bsgd"),
        op(
            "attend", "attention", s, [("q_rot", "bshd"), ("k_rot", "btgd"), ("v", "btge")], "bshe",
            causal=True, heads="h", kv_heads="g",
        ),
        op("o", "linear", s, [("attend", "bshd")], "bse", [("wo", "hde")]),
        op("add1", "elementwise", s, [("x", "bse"), ("o", "bse")], "bse", function="add"),
        op("norm2", "rms_norm", s, [("add1", "bse")], "bse", [("w2", "e")]),
        op("gate", "linear", s, [("norm2", "bse")], "bsf", [("wg", "ef")]),
        op("up", "linear", s, [("norm2", "bse")], "bsf", [("wu", "ef")]),
        op("act", "elementwise", s, [("gate", "bsf"), ("up", "bsf")], "bsf", function="silu_multiply"),
        op("down", "linear", s, [("act", "bsf")], "bse", [("wd", "fe")]),
        op("add2", "elementwise", s, [("add1", "bse"), ("down", "bse")], "bse", function="add"),
    )  # fmt: skip
    attend = layer[6]
    s_attend = {**attend.dims, "e": 128}
    layer = (*layer[:6], OpNode(
        name="attend", kind="attention", dims=s_attend, inputs=attend.inputs, output=attend.output,
        attributes=attend.attributes,
    ), *layer[7:])  # fmt: skip
    head = (
        op("norm", "rms_norm", s, [("y", "bse")], "bse", [("w", "e")]),
        op("logits", "linear", s, [("norm", "bse")], "bsv", [("w_head", "ev")]),
        op("loss", "cross_entropy", s, [("logits", "bsv"), ("targets", "bs")], ""),
    )
    return OpGraph(
        name="llama",
        inputs={"ids": (batch, seq_len), "targets": (batch, seq_len)},
        blocks=(
            Block(name="embedding", operators=(embedding,)),
            Block(name="layers", operators=layer, entry="x", repeat=layers),
            Block(name="head", operators=head, entry="y"),
        ),
        batch=batch,
        seq_len=seq_len,
    )


def random_graph(seed: int) -> OpGraph:
    """One to three blocks, the middle one repeated, of linear layers, functions, norms, products of a tensor
    with itself, sums and skips, with sizes that do not always divide.
    """
    random = np.random.default_rng(seed)
    sizes = {
        "b": int(random.choice([16, 24, 31, 64])), "s": int(random.choice([1, 8, 12])),
        "e": int(random.choice([32, 48, 64, 100])), "f": int(random.choice([64, 96, 130])),
    }  # fmt: skip
    blocks = [_random_block(random, sizes, "first", None, "x")]
    if random.random() < 0.7:
        blocks.append(_random_block(random, sizes, "middle", "m", "m", repeat=int(random.integers(1, 4))))
    last = _random_block(random, sizes, "last", "z", "z")
    loss = op("loss", "mean_square", sizes, [(last.operators[-1].name, "bse"), ("target", "bse")], "")
    blocks.append(Block(name="last", operators=(*last.operators, loss), entry="z"))
    shape = (sizes["b"], sizes["s"], sizes["e"])
    return OpGraph(
        name=f"random {seed}", inputs={"x": shape, "target": shape}, blocks=tuple(blocks), batch=sizes["b"]
    )


def skip_graph(seed: int) -> OpGraph:
    """Four blocks, the third one repeated. The last three may read results of earlier blocks, and the last
    two the entry of the second block, by its own name or by that of the operator that makes it.
    """
    random = np.random.default_rng(seed)
    sizes = {
        "b": int(random.choice([16, 24, 31])), "s": int(random.choice([1, 8])),
        "e": int(random.choice([32, 48, 100])), "f": int(random.choice([64, 130])),
    }  # fmt: skip
    first = _random_block(random, sizes, "first", None, "x")
    there = [each.name for each in first.operators if each.output == ("b", "s", "e")]
    more = _some(random, there)
    second = _random_block(random, sizes, "second", "n", "n", more=more)
    if first.operators[-1].name not in more and random.random() < 0.5:
        there[-1] = "n"
    there += [each.name for each in second.operators if each.output == ("b", "s", "e")]
    repeat = int(random.integers(1, 4))
    more = _some(random, there)
    middle = _random_block(random, sizes, "middle", "m", "m", repeat=repeat, more=more)
    last = _random_block(random, sizes, "last", "z", "z", more=_some(random, there))
    loss = op("loss", "mean_square", sizes, [(last.operators[-1].name, "bse"), ("target", "bse")], "")
    last = replace(last, operators=(*last.operators, loss))
    shape = (sizes["b"], sizes["s"], sizes["e"])
    return OpGraph(
        name=f"lending {seed}", inputs={"x": shape, "target": shape}, blocks=(first, second, middle, last),
        batch=sizes["b"],
    )  # fmt: skip


def _some(random: np.random.Generator, names: list[str]) -> list[str]:
    """None to two of some names."""
    return [str(name) for name in random.choice(names, int(random.integers(3)))]


FUNCTIONS = ("relu", "gelu", "dropout", "identity", "exp")


def _random_block(
    random: np.random.Generator,
    sizes: dict[str, int],
    name: str,
    entry: str | None,
    start: str,
    repeat: int = 1,
    more: Sequence[str] = (),
) -> Block:
    """Up to four steps, each from the previous tensor or an earlier one, to a tensor [b, s, e], and a sum
    with the existing tensors `more`.
    """
    made = [start, *more]
    operators: list[OpNode] = []
    unread: list[str] = []

    def add(kind: str, inputs: list[str], *parameters: tuple[str, str], **attributes: str) -> None:
        own = f"{name}{len(operators)}"
        named = [(f"{own}.{each}", dims) for each, dims in parameters]
        operators.append(op(own, kind, sizes, [(each, "bse") for each in inputs], "bse", named, **attributes))
        for each in inputs:
            if each in unread:
                unread.remove(each)
        made.append(own)
        unread.append(own)

    for _ in range(int(random.integers(1, 4))):
        source = made[-1] if random.random() < 0.7 else made[int(random.integers(len(made)))]
        choice = random.random()
        if choice < 0.45:
            _wide(random, sizes, operators, made, unread, source, name)
        elif choice < 0.55:
            add("layer_norm", [source], ("scale", "e"), ("shift", "e"))
        elif choice < 0.65:
            add("elementwise", [source, source], function="multiply")
        elif choice < 0.8:
            add("elementwise", [source], function=FUNCTIONS[int(random.integers(len(FUNCTIONS)))])
        else:
            add("elementwise", [source, made[int(random.integers(len(made)))]], function="add")
    # The entry and the tensors without a reader end in one sum.
    left = [*dict.fromkeys([*unread, start, *more])]
    add("elementwise", left, function="add" if len(left) > 1 else "identity")
    return Block(name=name, operators=tuple(operators), entry=entry, repeat=repeat)


def _wide(
    random: np.random.Generator,
    sizes: dict[str, int],
    operators: list[OpNode],
    made: list[str],
    unread: list[str],
    source: str,
    name: str,
) -> None:
    """A linear layer to f and one back to e, with biases or without."""
    own = f"{name}{len(operators)}"
    # Some layers share their first weight: within a block, or the first block with the last.
    shared = "within middle" if name == "middle" else "across"
    weight = shared if random.random() < 0.6 else f"{own}.weight"
    bias = [(f"{own}.bias", "f")] if random.random() < 0.5 else []
    operators.append(op(own, "linear", sizes, [(source, "bse")], "bsf", [(weight, "ef"), *bias]))
    back = f"{name}{len(operators)}"
    operators.append(op(back, "linear", sizes, [(own, "bsf")], "bse", [(f"{back}.weight", "fe")]))
    if source in unread:
        unread.remove(source)
    made.append(back)
    unread.append(back)
