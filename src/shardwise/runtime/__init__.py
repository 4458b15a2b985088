"""Trains as a plan says, on PyTorch (`pip install 'shardwise[torch]'`)."""

from shardwise.errors import ConfigError

try:
    import torch as _torch  # noqa: F401 - asked for first, so that its absence is told as what it is
except ModuleNotFoundError as error:
    raise ConfigError(
        "is not installed, and running plans needs it", key="torch", allowed="pip install 'shardwise[torch]'"
    ) from error

from shardwise.runtime.capture import capture

__all__ = ["capture"]
