"""Work and saved activations, counted by hand: operations, bytes of traffic and saved bytes at 2 bytes per
element.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
from tests.unit.graph.operators import operator

from shardwise.graph import OpNode, check_op, local_sizes, rules_of, saved_of, work_of

SIZES = {
    "b": 2, "s": 16, "t": 16, "k": 32, "n": 64, "h": 8, "g": 2, "d": 4, "e": 4, "v": 128, "c": 8, "o": 16,
    "x": 14, "y": 14, "i": 3, "j": 3, "z": 7, "w": 7, "f": 4, "r": 64, "kn": 96, "k4": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Forward operations; bytes of traffic forward and backward; saved bytes."""

    op: OpNode
    flop: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0


CASES = {
    # 2 * (2*16) rows * 32 * 64; saves its input of 2*16*32.
    "linear": Counted(
        operator("linear", "b s k -> b s n", SIZES, parameters="n k, n"),
        flop=2 * 32 * 32 * 64,
        saved_bytes=2 * 1024,
    ),
    # 2 products of [16, 32] x [32, 64]; saves 2*16*32 and 2*32*64.
    "batched matmul": Counted(
        operator("matmul", "b s k, b k n -> b s n", SIZES),
        flop=2 * 2 * 16 * 32 * 64,
        saved_bytes=2 * (1024 + 4096),
    ),
    # First 2 x 32 with 32 x 64 (4096 products), then 2 x 64 with 64 x 128 (16384).
    "three operands": Counted(
        operator("einsum", "b k, k n, n v -> b v", SIZES),
        flop=2 * (4096 + 16384),
        saved_bytes=2 * (64 + 2048 + 8192),
    ),
    # 2*14*14 places, 16 filters of 8*3*3.
    "convolution": Counted(
        operator("convolution", "b c x y -> b o x y", SIZES, parameters="o c i j, o", padding=1),
        flop=2 * (2 * 196) * 16 * 72,
        saved_bytes=2 * 2 * 8 * 196,
    ),
    # 4 groups: filters of 2*3*3.
    "grouped convolution": Counted(
        operator("convolution", "b c x y -> b o x y", SIZES, parameters="o k4 i j", padding=1, groups=4),
        flop=2 * (2 * 196) * 16 * 18,
        saved_bytes=2 * 2 * 8 * 196,
    ),
    # 8 channels, each 2*14*14 places and 9 taps.
    "depthwise convolution": Counted(
        operator("convolution", "b c x y -> b c x y", SIZES, parameters="c i j", padding=1),
        flop=2 * 8 * (2 * 196) * 9,
        saved_bytes=2 * 2 * 8 * 196,
    ),
    # Half of 2 * (2*8 heads) * 16 * 16 * (4 + 4); saves q and output of 2*16*8*4, k and v of 2*16*2*4, and a
    # statistic of 4 bytes for each of 2*8*16 rows.
    "causal attention of grouped heads": Counted(
        operator(
            "attention", "b s h d, b t g d, b t g e -> b s h e", SIZES, causal=True, heads="h", kv_heads="g"
        ),
        flop=16 * 16 * 16 * 8,
        saved_bytes=2 * (2 * 1024 + 2 * 256) + 4 * 256,
    ),
    # Reads two of 2*64 and writes one; backward reads both and the gradient, writes two.
    "silu times": Counted(
        operator("elementwise", "b n, b n -> b n", SIZES, function="silu_multiply"),
        forward_bytes=2 * 3 * 128,
        backward_bytes=2 * 5 * 128,
        saved_bytes=2 * 2 * 128,
    ),
    # Its gradient is passed on unchanged.
    "sum": Counted(
        operator("elementwise", "b n, b n -> b n", SIZES, function="add"), forward_bytes=2 * 3 * 128
    ),
    "a number more": Counted(
        operator("elementwise", "b n -> b n", SIZES, function="shift"), forward_bytes=2 * 2 * 128
    ),
    # Its gradient is multiplied too.
    "times a number": Counted(
        operator("elementwise", "b n -> b n", SIZES, function="scale"),
        forward_bytes=2 * 2 * 128,
        backward_bytes=2 * 2 * 128,
    ),
    # Reads 128 + 64, writes 128; backward reads 128 and writes the 64 of the broadcast operand.
    "sum with a vector": Counted(
        operator("elementwise", "b n, n -> b n", SIZES, function="add"),
        forward_bytes=2 * (128 + 64 + 128),
        backward_bytes=2 * (64 + 128),
    ),
    # Reads, writes, and writes a mask of a byte; backward the same with the gradient.
    "dropout": Counted(
        operator("elementwise", "b n -> b n", SIZES, function="dropout"),
        forward_bytes=2 * 2 * 128 + 128,
        backward_bytes=2 * 2 * 128 + 128,
        saved_bytes=128,
    ),
    # Two tensors forward, three backward; saves the input, mean and deviation of 32 rows.
    "layer norm": Counted(
        operator("layer_norm", "b s n -> b s n", SIZES, parameters="n, n"),
        forward_bytes=2 * 2 * 2048,
        backward_bytes=2 * 3 * 2048,
        saved_bytes=2 * 2048 + 2 * 4 * 32,
    ),
    # Statistics of 8 channels.
    "batch norm": Counted(
        operator("batch_norm", "b c x y -> b c x y", SIZES, parameters="c, c"),
        forward_bytes=2 * 2 * 3136,
        backward_bytes=2 * 3 * 3136,
        saved_bytes=2 * 3136 + 2 * 4 * 8,
    ),
    # Backward reads the output and the gradient and writes.
    "softmax": Counted(
        operator("softmax", "b s t -> b s t", SIZES),
        forward_bytes=2 * 2 * 512,
        backward_bytes=2 * 3 * 512,
        saved_bytes=2 * 512,
    ),
    # Rows of 64 for 32 indices, read and written; backward reads them and adds into rows of 4 bytes.
    "embedding": Counted(
        operator("embedding", "b s -> b s n", SIZES, parameters="v n"),
        forward_bytes=2 * 2 * 2048,
        backward_bytes=2 * 2048 + 8 * 2048,
        saved_bytes=2 * 32,
    ),
    # Three passes of 4 bytes over 32*128 logits, two backward; saves them in 4 bytes, and 32 targets.
    "cross entropy": Counted(
        operator("cross_entropy", "b s v, b s -> ", SIZES),
        forward_bytes=3 * 4 * 4096,
        backward_bytes=2 * 4 * 4096,
        saved_bytes=4 * 4096 + 2 * 32,
    ),
    # 2*8*14*14 read and 2*8*7*7 written, the same of gradients; saves its input and 784 places of 8 bytes.
    "maximum of windows": Counted(
        operator("pool", "b c x y -> b c z w", SIZES, function="maximum", kernel=2),
        forward_bytes=2 * (3136 + 784),
        backward_bytes=2 * (3136 + 784),
        saved_bytes=2 * 3136 + 8 * 784,
    ),
    "mean": Counted(
        operator("reduce", "b s n -> b n", SIZES, function="mean"),
        forward_bytes=2 * (2048 + 128),
        backward_bytes=2 * (2048 + 128),
    ),
    "reshape": Counted(operator("reshape", "b kn -> b k i", SIZES)),
    "transpose": Counted(operator("transpose", "b s n -> b n s", SIZES)),
    "transposed copy": Counted(
        operator("transpose", "b s n -> b n s", SIZES, copies=True),
        forward_bytes=2 * 2 * 2048,
        backward_bytes=2 * 2 * 2048,
    ),
    # Copies 2*96; gradients are views.
    "concat": Counted(operator("concat", "b k, b n -> b kn", SIZES), forward_bytes=2 * 2 * 192),
    # Forward is a view; backward reads 2*32 and writes them at their offset.
    "slice": Counted(operator("slice", "b n -> b k", SIZES, start=32), backward_bytes=2 * 2 * 64),
    # 3*64 gates of 32 and 64 products for each of 2 rows; saves input, state, gates and the reset state.
    "gru cell": Counted(
        operator("gru_cell", "b k, b r -> b n", SIZES, parameters="i n k, i n r, i n, i n"),
        flop=2 * 2 * 192 * (32 + 64),
        forward_bytes=2 * 2 * (3 * 192 + 3 * 64),
        backward_bytes=2 * 2 * (2 * 192 + 4 * 64),
        saved_bytes=2 * 2 * (32 + 64 + 192 + 64),
    ),
    # 16 steps of 4*64 gates: the input's 32 and the state's 64 products for each of 2 rows. Between them
    # gates three times and 64 of state three times, backward twice and four times. Saves inputs, states,
    # gates and cells.
    "lstm": Counted(
        operator("lstm", "b s k -> b s n", SIZES, parameters="f n k, f n r, f n", time="s"),
        flop=2 * 16 * 2 * 256 * (32 + 64),
        forward_bytes=2 * 16 * 2 * (3 * 256 + 3 * 64),
        backward_bytes=2 * 16 * 2 * (2 * 256 + 4 * 64),
        saved_bytes=2 * 32 * (32 + 64 + 256 + 64),
    ),
}


def elements(op: OpNode, dims: tuple[str, ...]) -> int:
    return prod(op.dims[dim] for dim in dims)


@pytest.mark.parametrize("name", CASES)
def test_flop_and_bytes_equal_counts_by_hand(name: str) -> None:
    counted = CASES[name]
    op = counted.op
    check_op(op)
    flop = forward_bytes = backward_bytes = 0.0
    for work in work_of(op):
        steps = elements(op, work.serial)
        if work.kind == "matmul":
            flop += 2 * steps * elements(op, (*work.batch, *work.m, *work.n, *work.k))
        if work.kind == "attention":
            scores = elements(op, (*work.batch, *work.m, *work.n))
            flop += (1 if work.causal else 2) * scores * elements(op, work.k)
            flop += (1 if work.causal else 2) * scores * elements(op, work.v)
        for moved in work.moved:
            nbytes = steps * elements(op, moved.dims) * (moved.element_bytes or 2)
            forward_bytes += moved.forward * nbytes
            backward_bytes += moved.backward * nbytes
    assert (flop, forward_bytes, backward_bytes) == (
        counted.flop, counted.forward_bytes, counted.backward_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_equal_counts_by_hand(name: str) -> None:
    counted = CASES[name]
    op, saved = counted.op, saved_of(counted.op)
    nbytes = sum(2 * elements(op, op.inputs[slot].dims) for slot in saved.inputs)
    nbytes += 2 * elements(op, op.output) if saved.output else 0
    own = sum(elements(op, dims) * (width or 2) for dims, width in saved.own)
    assert nbytes + own == counted.saved_bytes


@pytest.mark.parametrize("name", CASES)
def test_matmuls_are_divided_among_ranks(name: str) -> None:
    """Splitting a product's dim in two halves its work, or all ranks do it equally."""
    op = CASES[name].op
    for work in work_of(op):
        if work.kind == "memory":
            continue
        dims = (*work.batch, *work.m, *work.n, *work.k, *work.v)
        for rule in rules_of(op):
            if rule.split is None or rule.units % 2:
                continue
            sizes = local_sizes(op, [rule], [2])
            share = prod(sizes[dim] for dim in dims) / elements(op, dims)
            assert share == (0.5 if rule.split in dims else 1.0), rule.name
