"""Plans distributed training, and trains as planned."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shardwise.runtime import graph_module, parallelize, reference_module

__all__ = ["graph_module", "parallelize", "reference_module"]


def __getattr__(name: str) -> object:
    """What runs plans needs PyTorch, so it is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from shardwise import runtime

    return getattr(runtime, name)
