"""Models of which some parts are frozen: `with_frozen_parts`.

A frozen part has neither gradients nor optimizer states. Gradients of inputs flow through it where something
before it is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.model.lora import frozen
from shardwise.model.model import Model
from shardwise.model.vision_operators import PROJECTOR_PREFIX, VISION_PREFIX, without_idle_backward
from shardwise.operators import Operator, has_trained_weights

FREEZE_KEY: Final = "freeze"
"""The key of a model's config that names its frozen parts."""

PARTS: Final = ("vision", "projector", "language")


def frozen_names(value: object) -> tuple[str, ...]:
    """The parts that a value names, in the order of PARTS: a list, or a text such as `vision+projector`."""
    names = value.replace(",", "+").split("+") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names) or not names:
        raise ConfigError(
            "is no list of parts", key=FREEZE_KEY, found=short_repr(value), allowed="+".join(PARTS)
        )
    for name in names:
        if name.strip() not in PARTS:
            raise unknown("is no part of a model", name, PARTS, key=FREEZE_KEY)
    return tuple(part for part in PARTS if part in {name.strip() for name in names})


def with_frozen_parts(model: Model, parts: Sequence[str]) -> Model:
    """The model with these parts frozen. ConfigError for parts that it does not have, and where nothing is
    trained."""
    if not model.patches and {"vision", "projector"} & {*parts}:
        raise ConfigError(
            "the model has no vision tower that is counted", key=FREEZE_KEY, found="+".join(parts),
            allowed="a vision-language model with --images",
        )  # fmt: skip
    embedding = without_idle_backward(
        frozen(operator) if _part_of(operator) in parts else operator for operator in model.embedding
    )
    kinds, head = model.kinds, model.head
    if "language" in parts:
        kinds = tuple(replace(kind, operators=tuple(map(frozen, kind.operators))) for kind in kinds)
        head = tuple(map(frozen, head))
    found = replace(model, embedding=embedding, kinds=kinds, head=head, frozen=tuple(parts))
    if not has_trained_weights([*embedding, *head, *(one for kind in kinds for one in kind.operators)]):
        raise ConfigError(
            "nothing is trained", key=FREEZE_KEY, found="+".join(parts),
            allowed="a part that is not frozen, or adapters (--lora)",
        )  # fmt: skip
    return found


def _part_of(operator: Operator) -> str:
    if operator.name.startswith(VISION_PREFIX):
        return "vision"
    return "projector" if operator.name.startswith(PROJECTOR_PREFIX) else "language"
