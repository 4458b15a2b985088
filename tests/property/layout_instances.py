"""Operator graphs for the tests of layouts and their costs."""

from __future__ import annotations

from shardwise.graph import Block, Operand, OpGraph, OpNode, Parameter


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
