"""Stand-ins for GPU software, so that Megatron-LM can be imported on a machine without a GPU.

Python imports this module at startup where its folder is on PYTHONPATH: only in the child processes of these
tests.
"""

from __future__ import annotations

import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions

# Megatron-LM needs Python 3.12, which has `typing.override`.
if not hasattr(typing, "override"):
    setattr(typing, "override", typing_extensions.override)  # noqa: B010 - mypy knows no such name before 3.12

# Triton compiles GPU kernels and is missing from CPU builds of PyTorch; Megatron-LM imports it
# unconditionally.
for name in ("triton", "triton.language"):
    module = MagicMock()
    module.__spec__ = ModuleSpec(name, None)
    module.__version__ = "3.5.0"
    sys.modules[name] = module


# Megatron-LM compiles functions at import, for which the compiler would need Triton.
def compile_nothing(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else compile_nothing


torch.compile = compile_nothing

# The checks of some flags query the generation of the first GPU: here an H100's.
PROPERTIES = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132
)
torch.cuda.get_device_properties = lambda *_: PROPERTIES


class FusedAdam:
    """The arguments of Transformer Engine's optimizer that Megatron-LM needs for moments in 16 bits."""

    def __init__(
        self,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: Any = None,
    ) -> None:
        raise NotImplementedError("a stand-in without a GPU")


optimizers = ModuleType("transformer_engine.pytorch.optimizers")
optimizers.FusedAdam = optimizers.FusedSGD = FusedAdam  # type: ignore[attr-defined]
sys.modules[optimizers.__name__] = optimizers
