"""How many elements a model has, and how many one token meets; prediction modules apart."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.model import MTP_PREFIX, Experts, Model
from shardwise.operators import Operator


def parameters(model: Model) -> int:
    """Trained elements, all experts included."""
    return sum(weight.parameters for operator, _ in _operators(model) for weight in operator.weights)


def active_parameters(model: Model) -> int:
    """Elements that one token meets: of experts those it is routed to."""
    return sum(active_elements(operator, experts) for operator, experts in _operators(model))


def active_elements(operator: Operator, experts: Experts | None) -> int:
    """Elements of the operator's weights that one token meets."""
    total = 0
    for weight in operator.weights:
        if weight.experts and experts is not None:
            total += weight.parameters // weight.experts * experts.top_k
        else:
            total += weight.parameters
    return total


def _operators(model: Model) -> Iterator[tuple[Operator, Experts | None]]:
    for operator in model.embedding:
        yield operator, None
    for kind in model.pattern:
        for operator in model.kinds[kind].operators:
            yield operator, model.kinds[kind].experts
    for operator in model.head:
        if not operator.name.startswith(MTP_PREFIX):
            yield operator, None
