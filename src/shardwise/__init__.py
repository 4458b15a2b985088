"""Plans distributed training, and trains as planned.

Names are imported when they are first used: `import shardwise` takes no time, and only what runs plans needs
PyTorch.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shardwise.api import (
        check,
        evaluate,
        export,
        frontier,
        import_cluster,
        load,
        memory_by_stage,
        plan,
        replan,
        report,
        review,
        save,
        step_parts,
        sweep,
    )
    from shardwise.errors import ConfigError, Infeasible, InternalError
    from shardwise.plans import Plan
    from shardwise.runtime import graph_module, parallelize, reference_module

__all__ = [
    "ConfigError",
    "Infeasible",
    "InternalError",
    "Plan",
    "check",
    "evaluate",
    "export",
    "frontier",
    "graph_module",
    "import_cluster",
    "load",
    "memory_by_stage",
    "parallelize",
    "plan",
    "reference_module",
    "replan",
    "report",
    "review",
    "save",
    "step_parts",
    "sweep",
]

_MODULES = {
    "errors": ("ConfigError", "Infeasible", "InternalError"),
    "plans": ("Plan",),
    "runtime": ("graph_module", "parallelize", "reference_module"),
}
"""Modules of the names that are not in `shardwise.api`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from importlib import import_module

    found = next((module for module, names in _MODULES.items() if name in names), "api")
    return getattr(import_module(f"shardwise.{found}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
