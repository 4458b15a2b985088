"""Sharding rules agree with PyTorch's DTensor on the layouts that need no redistribution, for all operators
that it has.

Both sides are enumerated: DTensor is tried with every placement of all tensors. Rules with collectives are
not compared, because DTensor redistributes tensors there. A layout that only one side has is listed with the
reason; no other difference is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.graph.operators import operator

from shardwise.graph import OpNode, check_op, placement_text, rules_of

torch = pytest.importorskip("torch", reason="DTensor's rules are the oracle")

from tests.unit.graph.dtensor import Layout, fake_mesh, legal_layouts  # noqa: E402

aten = torch.ops.aten

SIZES = {
    "b": 4, "s": 8, "t": 8, "k": 6, "n": 4, "h": 2, "d": 6, "e": 6, "v": 8, "c": 6, "o": 2, "x": 8, "y": 8,
    "i": 3, "p": 4, "q": 4, "kn": 10, "hd": 12, "two": 2, "part": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An operator of ours and the corresponding DTensor call, with its tensors in our order inserted among
    its arguments; and the layouts that only one side has, with the reason.
    """

    op: OpNode
    call: Any
    arguments: Callable[[list[Any]], tuple[Any, ...]] = tuple
    only_ours: frozenset[Layout] = frozenset()
    only_theirs: frozenset[Layout] = frozenset()
    why: str = ""
    dtypes: tuple[Any, ...] = ()


def _op(kind: str, text: str, parameters: str = "", **attributes: Any) -> OpNode:
    return operator(kind, text, SIZES, parameters=parameters, **attributes)


def _layouts(*texts: str) -> frozenset[Layout]:
    """`R P -> P` as (("R", "P"), "P")."""
    pairs = (text.split("->") for text in texts)
    return frozenset((tuple(left.split()), right.strip()) for left, right in pairs)


def _elementwise(function: str, text: str, call: Any, **differences: Any) -> Case:
    return Case(_op("elementwise", text, function=function), call, **differences)


CASES: dict[str, Case] = {
    "matmul": Case(_op("matmul", "s k, k n -> s n"), aten.mm.default),
    "batched matmul": Case(_op("matmul", "b s k, b k n -> b s n"), aten.bmm.default),
    "linear with bias": Case(
        _op("linear", "s k -> s n", "k n, n"),
        aten.addmm.default,
        lambda t: (t[2], t[0], t[1]),
        only_theirs=_layouts("R P P -> P"),
        why="a weight is no partial sum",
    ),
    "embedding": Case(
        _op("embedding", "b s -> b s e", "v e"),
        aten.embedding.default,
        lambda t: (t[1], t[0]),
        dtypes=(torch.int64,),
    ),
    "add": _elementwise("add", "b n, n -> b n", aten.add.Tensor),
    "subtract": _elementwise("subtract", "b n, b n -> b n", aten.sub.Tensor),
    "multiply": _elementwise("multiply", "b n, n -> b n", aten.mul.Tensor),
    "divide": _elementwise("divide", "b n, n -> b n", aten.div.Tensor),
    "a number added": _elementwise("shift", "b n -> b n", aten.add.Scalar, arguments=lambda t: (t[0], 2.0)),
    "a number less": _elementwise("shift", "b n -> b n", aten.sub.Tensor, arguments=lambda t: (t[0], 2.0)),
    "less than a number": _elementwise(
        "shift", "b n -> b n", aten.rsub.Scalar, arguments=lambda t: (t[0], 2.0)
    ),
    "times a number": _elementwise("scale", "b n -> b n", aten.mul.Tensor, arguments=lambda t: (t[0], 2.0)),
    "power": _elementwise("power", "b n -> b n", aten.pow.Tensor_Scalar, arguments=lambda t: (t[0], 3.0)),
    "clamp": _elementwise("clamp", "b n -> b n", aten.clamp.default, arguments=lambda t: (t[0], 0.0, 1.0)),
    "masked fill": _elementwise(
        "masked_fill",
        "b n, b n -> b n",
        aten.masked_fill.Scalar,
        arguments=lambda t: (t[1], t[0], 2.0),
        dtypes=(torch.bool,),
    ),
    "maximum": _elementwise("maximum", "b n, b n -> b n", aten.maximum.default),
    "negate": _elementwise("negate", "b n -> b n", aten.neg.default),
    "identity": _elementwise("identity", "b n -> b n", aten._to_copy.default),
    "broadcast": Case(
        _op("elementwise", "b n -> s b n", function="identity"),
        aten.expand.default,
        lambda t: (t[0], [8, 4, 4]),
        only_ours=_layouts("R -> S(0)"),
        why="each rank broadcasts its part of a new dim alone; DTensor does so whole and cuts it",
    ),
    **{
        name: _elementwise(name, "b n -> b n", getattr(aten, name).default)
        for name in ("gelu", "relu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "log")
    },
    "where": _elementwise(
        "where",
        "b n, b n, b n -> b n",
        aten.where.self,
        dtypes=(torch.bool,),
        only_ours=_layouts("R P P -> P"),
        why="a choice between partial sums is the partial sum of the choice",
    ),
    "dropout": _elementwise(
        "dropout",
        "b n -> b n",
        aten.native_dropout.default,
        arguments=lambda t: (t[0], 0.5, True),
        only_ours=_layouts("P -> P"),
        why="a mask that all ranks draw alike is a linear function",
    ),
    "softmax": Case(_op("softmax", "b n -> b n"), aten._softmax.default, lambda t: (t[0], -1, False)),
    "log softmax": Case(
        _op("softmax", "b n -> b n", function="log_softmax"),
        aten._log_softmax.default,
        lambda t: (t[0], -1, False),
    ),
    "layer norm": Case(
        _op("layer_norm", "b s n -> b s n", "n, n"),
        aten.native_layer_norm.default,
        lambda t: (t[0], [4], t[1], t[2], 1e-5),
    ),
    "rms norm": Case(
        _op("rms_norm", "b s n -> b s n", "n"),
        aten._fused_rms_norm.default,
        lambda t: (t[0], [4], t[1], 1e-5),
    ),
    "batch norm": Case(
        _op("batch_norm", "b c x -> b c x", "c, c"),
        aten.native_batch_norm.default,
        lambda t: (*t, None, None, True, 0.1, 1e-5),
    ),
    "group norm": Case(
        _op("group_norm", "b c x -> b c x", "c, c", groups=2),
        aten.native_group_norm.default,
        lambda t: (*t, 4, 6, 8, 2, 1e-5),
        only_ours=_layouts("S(1) S(0) S(0) -> S(1)"),
        why="DTensor splits the batch alone",
    ),
    "convolution": Case(
        _op("convolution", "b c x -> b o x", "o c i, o", padding=1),
        aten.convolution.default,
        lambda t: (*t, [1], [1], [1], False, [0], 1),
        only_ours=_layouts("R S(0) S(0) -> S(1)", "S(1) S(1) P -> P", "R S(2) P -> P", "P R P -> P"),
        why="DTensor splits the batch alone",
    ),
    "maximum of windows": Case(
        _op("pool", "b c x y -> b c p q", function="maximum", kernel=2),
        aten.max_pool2d_with_indices.default,
        lambda t: (t[0], [2, 2], [2, 2]),
        only_ours=_layouts("S(2) -> S(2)", "S(3) -> S(3)"),
        why="windows side by side need no rows of neighbours",
    ),
    "average of windows": Case(
        _op("pool", "b c x y -> b c p q", function="average", kernel=2),
        aten.avg_pool2d.default,
        lambda t: (t[0], [2, 2], [2, 2]),
        only_ours=_layouts("S(2) -> S(2)", "S(3) -> S(3)"),
        why="windows side by side need no rows of neighbours",
    ),
    "adaptive average": Case(
        _op("pool", "b c x y -> b c p q", function="average"),
        aten._adaptive_avg_pool2d.default,
        lambda t: (t[0], [4, 4]),
        only_ours=_layouts("S(2) -> S(2)", "S(3) -> S(3)"),
        why="windows side by side need no rows of neighbours",
    ),
    "sum": Case(_op("reduce", "b n -> b", function="sum"), aten.sum.dim_IntList, lambda t: (t[0], [1])),
    "mean": Case(
        _op("reduce", "b n -> b", function="mean"),
        aten.mean.dim,
        lambda t: (t[0], [1]),
        only_ours=_layouts("P -> P"),
        why="a mean is linear",
    ),
    "largest": Case(
        _op("reduce", "b n -> b", function="maximum"),
        aten.amax.default,
        lambda t: (t[0], [1]),
        only_theirs=_layouts("S(1) -> P(max)"),
        why="DTensor leaves maxima of parts; here ranks exchange them at once",
    ),
    "reshape of heads": Case(
        _op("reshape", "b h d -> b hd"),
        aten.view.default,
        lambda t: (t[0], [4, 12]),
        only_theirs=_layouts("S(2) -> strided S(1)"),
        why="parts that lie in strides have no placement here",
    ),
    "reshape to heads": Case(_op("reshape", "b hd -> b h d"), aten.view.default, lambda t: (t[0], [4, 2, 6])),
    "transpose": Case(_op("transpose", "b n -> n b"), aten.transpose.int, lambda t: (t[0], 0, 1)),
    "permute": Case(_op("transpose", "b s n -> n b s"), aten.permute.default, lambda t: (t[0], [2, 0, 1])),
    "concat": Case(_op("concat", "b k, b n -> b kn"), aten.cat.default, lambda t: (t, 1)),
    "slice": Case(_op("slice", "b n -> b part", start=1), aten.slice.Tensor, lambda t: (t[0], 1, 1, 3)),
    "one element": Case(_op("slice", "b n -> b", start=1), aten.select.int, lambda t: (t[0], 1, 1)),
    "attention": Case(
        _op("attention", "b h s d, b h t d, b h t e -> b h s e"),
        aten._scaled_dot_product_flash_attention.default,
        only_ours=_layouts("R R P -> P", "S(2) R R -> S(2)", "R R S(3) -> S(3)"),
        why="attention is linear in its values; queries and widths of values as on a CPU",
    ),
    "cross entropy": Case(
        _op("cross_entropy", "b v, b -> "),
        aten.nll_loss_forward.default,
        lambda t: (t[0], t[1], None, 1, -100),
        dtypes=(torch.float32, torch.int64),
    ),
    "mean square": Case(_op("mean_square", "b n, b n -> "), aten.mse_loss.default),
    "binary cross entropy": Case(
        _op("binary_cross_entropy", "b n, b n -> "), aten.binary_cross_entropy_with_logits.default
    ),
}


SLOW_CASES = {
    "attention on a CPU": Case(
        _op("attention", "b h s d, b h t d, b h t e -> b h s e"),
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        only_ours=_layouts("R R P -> P"),
        why="attention is linear in its values",
    ),
}
"""Run with `--full`: DTensor derives these rules anew for every placement."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = CASES | SLOW_CASES if metafunc.config.getoption("--full") else CASES
        metafunc.parametrize("case", cases.values(), ids=cases)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with fake_mesh() as made:
        yield made


def ours(op: OpNode) -> set[Layout]:
    """Layouts of rules without collectives, forward: `R+` is replicated with a summed gradient."""
    return {
        (
            tuple(placement_text(place).removesuffix("+") for place in (*rule.inputs, *rule.parameters)),
            placement_text(rule.output).removesuffix("+"),
        )
        for rule in rules_of(op)
        if not rule.collectives
    }


def theirs(case: Case, mesh: Any) -> set[Layout]:
    shapes = [case.op.shape(tensor.dims) for tensor in case.op.inputs]
    shapes += [case.op.shape(tensor.dims) for tensor in case.op.parameters]
    dtypes = (*case.dtypes, *(torch.float32 for _ in shapes[len(case.dtypes) :]))
    meta = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return legal_layouts(mesh, case.call, meta, case.arguments)


def test_rules_are_those_of_dtensor_but_for_listed_differences(case: Case, mesh: Any) -> None:
    check_op(case.op)
    found, known = ours(case.op), theirs(case, mesh)
    assert found - known == case.only_ours
    assert known - found == case.only_theirs
    assert bool(case.why) == bool(case.only_ours or case.only_theirs)
