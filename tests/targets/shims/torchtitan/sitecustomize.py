"""Stand-ins for GPU software and for packages about data, so that TorchTitan can be imported on a machine
without a GPU.

Python imports this module at startup where its folder is on PYTHONPATH: only in the child processes of these
tests.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

ABSENT = ("triton", "datasets", "tensorboard")
"""Triton compiles GPU kernels; the others read data and write logs. TorchTitan imports all of them."""


# TorchTitan compiles functions at import, for which the compiler would need Triton.
def compile_nothing(function: Any = None, **_options: Any) -> Any:
    return function if callable(function) else compile_nothing


torch.compile = compile_nothing

# These look for Triton, and are imported before there is a stand-in for it.
import torch._dynamo  # noqa: E402
import torch._inductor.runtime.triton_compat  # noqa: E402
import torch._inductor.utils  # noqa: E402


class StandIn(ModuleType):
    """A module that has every name. Capitalised names are classes, because `isinstance` needs them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__version__ = [], "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Finds the absent packages and all of their modules."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
