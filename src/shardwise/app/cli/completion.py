"""Values that the shell completes: models, devices, clusters, targets, fields of strategies, named choices.

`completer` finds the function for an option or argument. A shell completes the names of files where a
function has no value. Modules with the values are imported when the shell asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Completer = Callable[[str], list[str]]
"""Takes the word so far, and returns whole words that begin with it."""


def completer(name: str) -> Completer | None:
    """The function that completes the values of an option such as `--target`, or of an argument such as
    `MODEL`; None where there is none."""
    return _COMPLETERS.get(name)


def models(word: str) -> list[str]:
    """Models of the catalogue."""
    from shardwise.model import catalogue_names

    return _starting(word, catalogue_names())


def models_and_graphs(word: str) -> list[str]:
    """Models of the catalogue and operator graphs."""
    from shardwise.graph import GRAPH_PREFIX, graph_names

    return models(word) + _starting(word, (f"{GRAPH_PREFIX}{name}" for name in graph_names()))


def clusters(word: str) -> list[str]:
    """Shipped clusters, and the device at the end of a shorthand such as `8x8x`."""
    from shardwise.cluster import cluster_names, device_names

    begun = re.fullmatch(r"((?:.*\+)?(?:[0-9]+x){1,2})([^+]*)", word)
    if begun is None:
        return _starting(word, cluster_names())
    return [begun[1] + name for name in _starting(begun[2], device_names())]


def targets(word: str) -> list[str]:
    """Targets, and `any`."""
    from shardwise.strategy import ANY, target_names

    return _starting(word, (*target_names(), ANY))


def exporters(word: str) -> list[str]:
    """Targets that plans are exported to."""
    from shardwise.targets import EXPORTERS

    return _starting(word, EXPORTERS)


def software(word: str) -> list[str]:
    """Targets and profiles of software."""
    from shardwise.strategy import software_names, target_names

    return _starting(word, dict.fromkeys((*target_names(), *software_names())))


def strategy_fields(word: str) -> list[str]:
    """The last field of `tp=8,schedule=...`, or its value."""
    from shardwise.strategy import ALIASES, FIELD_VALUES, FIELDS

    values = {**FIELD_VALUES, "sequence_parallel": ("yes", "no"), "zero_stage": ("0", "1", "2", "3")}
    return _pairs(word, (*FIELDS, *ALIASES), values)


def software_options(word: str) -> list[str]:
    """The last option of `grad_reduce_dtype=bf16,...`, or its value."""
    from shardwise.strategy import option_values

    return _pairs(word, option_values(), option_values())


def changes(word: str) -> list[str]:
    """The last change of `nodes=16,...`."""
    from shardwise.search import CHANGES

    return _pairs(word, CHANGES, {})


def dtypes(word: str) -> list[str]:
    """Training precisions."""
    from shardwise.questions import DTYPES

    return _starting(word, DTYPES)


def optimizers(word: str) -> list[str]:
    """Optimizers."""
    from shardwise.questions import OPTIMIZERS

    return _starting(word, OPTIMIZERS)


def objectives(word: str) -> list[str]:
    """What `plan` minimises."""
    from shardwise.plans import OBJECTIVES

    return _starting(word, OBJECTIVES)


def modes(word: str) -> list[str]:
    """How `frontier` chooses a point."""
    from shardwise.search import MODES

    return _starting(word, MODES)


def launchers(word: str) -> list[str]:
    """Launchers of plans."""
    from shardwise.launch import LAUNCHERS

    return _starting(word, LAUNCHERS)


def spaces(word: str) -> list[str]:
    """Search spaces."""
    from shardwise.search import SPACES

    return _starting(word, SPACES)


def prices(word: str) -> list[str]:
    """Names of list prices."""
    from shardwise.cluster import price_offers

    return _starting(word, dict.fromkeys(f"{one.provider}:{one.commitment}" for one in price_offers()))


def _starting(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(word)]


def _pairs(word: str, names: Iterable[str], values: Mapping[str, Iterable[str]]) -> list[str]:
    """`name=value` pairs joined by commas: completes the last name, or its value. A shell that splits words
    at `=` gives a value alone."""
    head, comma, last = word.rpartition(",")
    name, equals, value = last.partition("=")
    if equals:
        return [f"{head}{comma}{name}={one}" for one in _starting(value, values.get(name, ())) if one]
    found = [f"{head}{comma}{one}=" for one in _starting(last, names)]
    every = dict.fromkeys(one for each in values.values() for one in each)
    return found or [f"{head}{comma}{one}" for one in _starting(last, every) if one]


_COMPLETERS: Mapping[str, Completer] = {
    "MODEL": models,
    "MODEL or graph": models_and_graphs,
    "--model": models,
    "CLUSTER": clusters,
    "--cluster": clusters,
    "--target": targets,
    "--to": exporters,
    "--software": software,
    "--strategy": strategy_fields,
    "--fix": strategy_fields,
    "--why-not": strategy_fields,
    "--what-if": changes,
    "--set": software_options,
    "--dtype": dtypes,
    "--optimizer": optimizers,
    "--objective": objectives,
    "--mode": modes,
    "--space": spaces,
    "--with": launchers,
    "--price": prices,
}
