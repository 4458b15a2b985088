"""The operators of a vision tower and of its projector (`vision_operators`), and what of them has gradients.

No rank of tensor or context parallelism shares the work: each computes the tower in whole, on all images of
its micro-batch. Equal layers are one list of operators that repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shardwise.errors import InternalError
from shardwise.model.layers import layer_from_shape, linear_weights, norm_operator
from shardwise.model.shape import LayerShape, ProjectorStep, VisionTower
from shardwise.operators import (
    Attention,
    Extent,
    Lookup,
    Matmul,
    Operator,
    Pointwise,
    Rows,
    Saved,
    Weight,
    is_trained,
)

VISION_PREFIX: Final = "vision."
PROJECTOR_PREFIX: Final = "projector."
"""Prefixes of the names of the tower's operators, and of those of its projector."""


def vision_operators(tower: VisionTower) -> tuple[Operator, ...]:
    """The operators from the pixels to the image's tokens in the sequence."""
    found: list[Operator] = list(_patches(tower))
    if tower.first_norm:
        found += _repeated([_norm("vision.first_norm", tower.norm, tower.hidden)], "patches", 1)
    for place, (shape, block, number) in enumerate(tower.layers):
        at = f"{VISION_PREFIX}{'layers' if len(tower.layers) == 1 else ('windows', 'layers')[place]}."
        found += _repeated(_layer(tower, shape, at), "patches", number, block)
    if tower.last_norm:
        found += _repeated([_norm("vision.last_norm", tower.norm, tower.hidden)], "patches", 1)
    for place, step in enumerate(tower.projector):
        if step.times:
            found += _repeated([_projected(f"{PROJECTOR_PREFIX}{place}", step)], step.rows, step.times)
    traffic = (Extent(2 * tower.text_hidden),)
    inserted = Pointwise(name=f"{PROJECTOR_PREFIX}insert", rows="images", forward=traffic, backward=traffic)
    return (*found, inserted)


def _patches(tower: VisionTower) -> Iterable[Operator]:
    """The product that embeds patches; positions and the class token, which are added."""
    k, hidden = Extent(tower.patch_elements), Extent(tower.hidden)
    at = f"{VISION_PREFIX}patches"
    yield Matmul(
        name=at,
        rows="patches",
        k=k,
        n=hidden,
        weights=linear_weights(at, k, hidden, bias=tower.patch_bias),
        saved=(Saved(name=f"{VISION_PREFIX}pixels", width=k, rows="patches"),),
    )
    weights = [Weight(name=f"{VISION_PREFIX}positions.weight", shape=(Extent(tower.positions), hidden))]
    tables = weights * bool(tower.positions)
    if tower.class_token:
        tables.append(Weight(name=f"{VISION_PREFIX}class_token", shape=(hidden,)))
    if tower.unused:
        tables.append(Weight(name=f"{VISION_PREFIX}unused", shape=(Extent(tower.unused),)))
    if tables:
        yield Lookup(name=f"{VISION_PREFIX}positions", rows="patches", width=hidden, weights=tuple(tables))


def _norm(name: str, norm: str, width: int) -> Operator:
    saved = (Saved(name=f"{name}.input", width=Extent(width)),)
    return norm_operator(name, norm, width, saved)  # type: ignore[arg-type]


def _layer(tower: VisionTower, shape: LayerShape, at: str) -> tuple[Operator, ...]:
    operators = layer_from_shape(shape, prefix=at).operators
    if not tower.layer_scale:
        return operators
    traffic = (Extent(4 * tower.hidden),)
    scale = Pointwise(
        name=f"{at}layer_scale",
        forward=traffic,
        backward=(Extent(6 * tower.hidden),),
        weights=(Weight(name=f"{at}layer_scale.weight", shape=(Extent(2), Extent(tower.hidden))),),
        saved=(Saved(name=f"{at}layer_scale.inputs", width=Extent(2 * tower.hidden)),),
    )
    return (*operators, scale)


def _projected(name: str, step: ProjectorStep) -> Operator:
    k, n = Extent(step.k), Extent(step.n)
    inputs = (Saved(name=f"{name}.input", width=k),)
    if step.kind == "product":
        weights = linear_weights(name, k, n, bias=step.bias)
        return Matmul(name=name, k=k, n=n, weights=weights, saved=inputs)
    if step.kind == "norm":
        return _norm(name, step.norm, step.k)
    traffic, back = (Extent(2 * step.k),), (Extent(3 * step.k),)
    return Pointwise(name=name, forward=traffic, backward=back, saved=inputs)


def _repeated(operators: Sequence[Operator], rows: Rows, number: int, block: int = 0) -> list[Operator]:
    """The operators on these rows, whole on every rank, with weights and saved tensors of all repetitions."""
    return [_on_rows(operator, rows, number, block) for operator in operators]


def _on_rows(operator: Operator, rows: Rows, number: int, block: int) -> Operator:
    if not isinstance(operator, Matmul | Attention | Pointwise | Lookup):
        raise InternalError(f"{operator.name} is no operator of a vision tower")
    weights = tuple(_whole_weight(weight, number) for weight in operator.weights)
    saved = tuple(replace(one, width=Extent(number * one.width.size), rows=rows) for one in operator.saved)
    common = replace(operator, rows=rows, weights=weights, saved=saved, repeats=number)
    match common:
        case Matmul():
            return replace(common, k=Extent(common.k.size), n=Extent(common.n.size))
        case Attention():
            heads, kv_heads = Extent(common.heads.size), Extent(common.kv_heads.size)
            return replace(common, heads=heads, kv_heads=kv_heads, causal=False, block=block)
        case Pointwise():
            forward, backward, eager = (
                tuple(Extent(one.size) for one in extents)
                for extents in (common.forward, common.backward, common.eager)
            )
            return replace(common, forward=forward, backward=backward, eager=eager)
    return common


def _whole_weight(weight: Weight, number: int) -> Weight:
    first, *others = weight.shape
    return replace(weight, shape=(Extent(number * first.size), *(Extent(one.size) for one in others)))


def without_idle_backward(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators in front of a decoder: those of a tower before the first trained weight have no backward
    pass, and save nothing for it."""
    found: list[Operator] = []
    has_trained = False
    for operator in operators:
        is_of_tower = operator.name.startswith((VISION_PREFIX, PROJECTOR_PREFIX))
        if is_of_tower and isinstance(operator, Matmul | Attention | Pointwise | Lookup):
            has_trained = has_trained or (bool(operator.weights) and is_trained(operator))
            if not has_trained:
                operator = replace(operator, forward_only=True, saved=())
        found.append(operator)
    return tuple(found)
