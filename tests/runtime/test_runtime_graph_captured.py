"""Captured modules under graph plans: losses, norms and gradients equal those of the modules on one
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.captured_equality import captured_differences, graph_of, plain
from tests.runtime.graph_modules import MODULES, data_of, module_of
from tests.runtime.graph_plans import on_frontier, sampled
from tests.sampling import sample_of
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, capture
from shardwise.runtime.graphs.modules import captured

TOLERANCE = 1e-9
"""Relative, in fp64, where only the order of sums differs; in fp32 the difference is up to 4e-5."""

IN_FP32 = {"llama": 1e-5}
"""Tolerances of modules with parts that always compute in fp32; graphs have no such casts."""

FEW = ("vgg", "lstm", "transformer", "vision", "again", "rows", "cells", "skip_tensors")
"""Modules that are run without `--full`."""


def worst(team: WorkerPool, name: str, plans: list[Plan]) -> float:
    devices = plans[0].mesh.devices
    return max(max(of) for of in team.run(devices, captured_differences, name, plans, plain(name), 1))


@pytest.mark.parametrize("name", sample_of([name for name in MODULES if name != "digits"], FEW))
def test_modules_train_under_any_layout(team: WorkerPool, name: str, full: bool) -> None:
    plans = list(sampled(graph_of(name), (2,), range(8 if full else 1)))
    assert worst(team, name, plans) < IN_FP32.get(name, TOLERANCE)
    assert graph_of(name).operators > 3


@pytest.mark.parametrize("name", sample_of(["vgg", "lstm", "transformer"], ["vgg", "lstm"]))
def test_modules_train_on_four_processes(team: WorkerPool, name: str, full: bool) -> None:
    plans = list(sampled(graph_of(name), (2, 2), range(8 if full else 1)))
    assert worst(team, name, plans) < TOLERANCE


@pytest.mark.parametrize("name", ["vgg", "lstm", "transformer"])
def test_points_of_the_frontier_train(team: WorkerPool, name: str, full: bool) -> None:
    plans = on_frontier(graph_of(name), 2, 3 if full else 2)
    assert worst(team, name, plans) < TOLERANCE


def test_training_an_operator_captured_for_cost_alone_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"captured\.py: aten\.linalg_vector_norm is modelled for its cost"):
        captured(module_of("digits", 1), data_of("digits", 0), graph_of("digits"))


def test_a_function_that_writes_its_operand_gets_a_copy() -> None:
    """VGG's ReLUs are in place; a tensor with several readers, or a view, must not change."""
    module = module_of("vgg", 1)
    assert any(isinstance(each, nn.ReLU) and each.inplace for each in module.modules())
    for settings in captured(module, data_of("vgg", 0), graph_of("vgg")).settings.values():
        if "function" in settings:
            given = torch.randn(2, 3, dtype=torch.float64)
            before = given.clone()
            settings["function"](given)
            assert torch.equal(given, before)


def test_another_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not the plan's network"):
        captured(module_of("lstm", 1), data_of("lstm", 0), graph_of("gru"))


class Rolled(nn.Module):
    """A standard deviation, which graphs represent for its cost only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x).std(0).sum()


def test_graph_operators_for_cost_alone_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "rolled.py"
    file.write_text(
        "import torch\nfrom tests.runtime.test_runtime_graph_captured import Rolled\n"
        "def build(batch: int = 4):\n    return Rolled(), (torch.zeros(batch, 4),)\n"
    )
    graph = capture(str(file), "build")
    with pytest.raises(ConfigError, match="is modelled for its cost only"):
        captured(Rolled(), (torch.zeros(4, 4),), graph)


class Words(nn.Module):
    """Called with a nested dict, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, scale: Tensor, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.table(batch["words"])) * scale
        return functional.cross_entropy(logits, batch["labels"])


def test_a_module_is_called_with_dicts_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(
        "import torch\nfrom tests.runtime.test_runtime_graph_captured import Words\n"
        "def build():\n    ids = torch.zeros(4, dtype=torch.long)\n"
        "    return Words(), {'batch': {'words': ids, 'labels': ids}, 'scale': torch.zeros(4, 5)}\n"
    )
    graph = capture(str(tmp_path / "words.py"), "build")
    assert graph.batch == 4
    words, labels, scale = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 3]), torch.rand(4, 5)
    own = captured(Words(), {"batch": {"words": words, "labels": labels}, "scale": scale}, graph)
    found = own.data({"scale": scale, "batch": {"labels": labels, "words": words}})
    readers = {operand.source: op for b in graph.blocks for op in b.operators for operand in op.inputs}
    for name, value in found.items():
        right = {"embedding": words, "elementwise": scale, "cross_entropy": labels}[readers[name].kind]
        assert torch.equal(value, right)
    with pytest.raises(ConfigError, match="does not have the arguments"):
        own.data({"scale": scale, "batch": {"words": words}})


class Rounded(torch.autograd.Function):
    """A step function with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.own(x)).sum()


class Looking(StraightThrough):
    """Reads values when it is not traced, as modules do that skip masks without effect."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.compiler.is_compiling() or bool(x.sum() < 9.0) else x.sum()


@pytest.mark.parametrize("module", [StraightThrough, Looking])
def test_a_custom_backward_pass_is_refused(tmp_path: Path, module: type[StraightThrough]) -> None:
    """A graph differentiates the forward pass, which gives another gradient."""
    (tmp_path / "through.py").write_text(
        f"import torch\nfrom tests.runtime.test_runtime_graph_captured import {module.__name__} as Own\n"
        "def build(batch: int = 4):\n    return Own(), (torch.zeros(batch, 4),)\n"
    )
    graph = capture(str(tmp_path / "through.py"), "build")
    with pytest.raises(ConfigError, match="Rounded"):
        captured(module(), (torch.zeros(4, 4),), graph)
