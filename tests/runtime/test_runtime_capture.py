"""Captured modules, compared with PyTorch's own counts, with the shipped graphs, and with captures at other
sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime import captured, graph_modules
from tests.sampling import sample_of
from torch.utils.flop_counter import FlopCounterMode

from shardwise.graph import (
    PARTIAL,
    OpGraph,
    forward_flop,
    graph_text,
    load_graph,
    parameter_count,
    parse_graph,
    rules_of,
    scaled,
    skip_tensors_of,
    step_flop,
)
from shardwise.inputs import parse_mapping
from shardwise.runtime import capture

FILE = captured.__file__
NAMES = (
    "vgg", "resnet", "lstm", "gru", "transformer", "llama", "uneven", "again", "towers", "vision", "digits",
    "numbers", "rows", "cells",
)  # fmt: skip

SCALED = ("vgg", "lstm", "llama", "towers", "digits", "rows", "cells")
"""Modules that a run without `--full` captures at another size."""


@pytest.fixture(scope="module")
def graph_of() -> Callable[[str], OpGraph]:
    found: dict[str, OpGraph] = {}

    def graph(name: str) -> OpGraph:
        if name not in found:
            found[name] = capture(FILE, name)
        return found[name]

    return graph


def _built(name: str) -> captured.Built:
    built: captured.Built = getattr(captured, name)()
    return built


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_modules(name: str, graph_of: Callable[[str], OpGraph]) -> None:
    """All parameters, by name and number of elements."""
    with torch.device("meta"):
        module, _ = _built(name)
    graph = graph_of(name)
    assert parameter_count(graph) == sum(parameter.numel() for parameter in module.parameters())
    found = {
        _numbered(parameter.name, repetition): node.elements(parameter.dims)
        for block in graph.blocks
        for repetition in range(block.repeat)
        for node in block.operators
        for parameter in node.parameters
    }
    whole: dict[str, int] = {}
    for key, elements in found.items():  # rows of a parameter are named so: in_proj_weight[0:32]
        owner = key.partition("[")[0]
        whole[owner] = whole.get(owner, 0) + elements
    assert whole == {key: parameter.numel() for key, parameter in module.named_parameters()}


def _numbered(name: str, repetition: int) -> str:
    front, brace, remaining = name.partition("{")
    number, _, back = remaining.partition("}")
    return f"{front}{int(number) + repetition}{back}" if brace else name


# PyTorch counts causal attention in full, 4 b h s s d in each of 4 layers; we count half of it.
CAUSAL_HALF = {"llama": 4 * 2 * 2 * 4 * 16 * 16 * 16}

BACKWARD_DIFFERS = {
    # PyTorch leaves out the gradient of the initial state: 2 b g h h in each of 2 layers.
    "lstm": 2 * 2 * 4 * 4 * 32 * 32,
    "gru": 2 * 2 * 4 * 3 * 32 * 32,
    "cells": 2 * 4 * (4 + 3) * 8 * 8,  # an LSTM cell and a GRU cell
    # PyTorch counts the weight's gradient of 6 groups as if each had all channels: 5 x 2 b c h w 9 too much.
    "towers": -5 * 2 * 4 * 6 * 10 * 4 * 9,
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", NAMES)
def test_flop_are_those_that_pytorch_counts(name: str, graph_of: Callable[[str], OpGraph]) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # fused cells are not counted
        module, inputs = _built(name)
        forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with forward, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            module(*inputs)
        with both, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = module(*inputs)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
    graph, half = graph_of(name), CAUSAL_HALF.get(name, 0)
    assert forward_flop(graph) + half == forward.get_total_flops()
    assert step_flop(graph) + 3 * half - BACKWARD_DIFFERS.get(name, 0) == both.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_module_is_a_valid_graph_file(name: str, graph_of: Callable[[str], OpGraph]) -> None:
    graph = graph_of(name)
    assert parse_graph(parse_mapping(graph_text(graph))) == graph


@pytest.mark.parametrize("name", sample_of(NAMES, SCALED))
def test_a_captured_graph_scales_as_the_module_does(name: str, graph_of: Callable[[str], OpGraph]) -> None:
    graph = graph_of(name)
    assert scaled(graph, 3 * graph.batch) == capture(FILE, name, batch=3 * graph.batch)


def test_the_length_of_sequences_scales_too(graph_of: Callable[[str], OpGraph], tmp_path: Path) -> None:
    path = tmp_path / "longer.py"
    path.write_text(
        "from tests.runtime import captured\n\n\ndef llama(batch=2, seq_len=48):\n"
        "    return captured.llama(batch, seq_len)\n"
    )
    longer = capture(str(path), "llama")
    assert longer.seq_len == 48
    assert replace(longer, source="") == replace(scaled(graph_of("llama"), seq_len=48), source="")


def test_repeated_blocks_are_folded(graph_of: Callable[[str], OpGraph]) -> None:
    def folded(name: str) -> list[tuple[str, int]]:
        return [(block.name, block.repeat) for block in graph_of(name).blocks if block.repeat > 1]

    assert folded("llama") == [("layers", 4)]
    assert folded("resnet") == [("stages.0", 2), ("stages.1", 3)]
    assert folded("transformer") == [("encoder.layers", 3), ("decoder.layers", 2)]
    assert skip_tensors_of(graph_of("transformer")).names == ("shared",)  # the encoder's output
    assert not any(skip_tensors_of(graph_of(name)).names for name in ("llama", "resnet", "vision"))
    assert folded("uneven") == [("layers", 2), ("block3", 2)] or folded("uneven") == [("layers", 2)] * 2
    assert folded("again") == []
    assert folded("vision") == [("layers", 3)]
    names = {p.name for node in graph_of("llama").blocks[1].operators for p in node.parameters}
    assert "layers.{0}.q_proj.weight" in names and len(names) == 9
    names = {p.name for node in graph_of("resnet").blocks[-2].operators for p in node.parameters}
    assert "stages.1.{1}.conv1.weight" in names


def test_repetitions_may_read_tensors_made_before_the_first() -> None:
    """The encoder folds, though the embedded target skips it. So do the decoder layers after the first, which
    makes a tensor that the others read."""
    graph = capture(graph_modules.__file__, "skip_tensors")
    repeated = {block.name: block.repeat for block in graph.blocks if block.repeat > 1}
    assert repeated == {"encoder.layers": 2, "decoder": 2}
    skips = skip_tensors_of(graph)
    [decoder] = [place for place, block in enumerate(graph.blocks) if block.name == "decoder"]
    assert len(skips.skip_inputs[decoder]) == 2  # the encoder's output, and the first layer's tensor


def test_a_tensor_without_elements_adds_nothing(tmp_path: Path) -> None:
    """Key-value caches start with such a tensor."""
    file = tmp_path / "cache.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Cached(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.own = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n"
        "        return torch.cat([torch.tensor([]), self.own(x)], dim=-2).sum()\n\n\n"
        "def build(batch: int = 4):\n    return Cached(), (torch.zeros(batch, 4),)\n"
    )
    graph = capture(str(file), "build")
    assert [op.kind for block in graph.blocks for op in block.operators] == ["linear", "reduce"]


def test_a_llama_of_full_size_is_the_shipped_graph_in_its_totals() -> None:
    found = capture(FILE, "llama_8b_of_two_layers")
    shipped = scaled(load_graph("graph:llama-3.1-8b"), found.batch, found.seq_len)
    blocks = tuple(replace(block, repeat=min(block.repeat, 2)) for block in shipped.blocks)
    shipped = replace(shipped, blocks=blocks)
    assert parameter_count(found) == parameter_count(shipped)
    assert forward_flop(found) == forward_flop(shipped)
    assert step_flop(found) == step_flop(shipped)


PUBLISHED = [
    ("llama", "model.model.layers"),
    ("gpt2", "model.transformer.h"),
    ("bert", "model.bert.encoder.layer"),
]
"""Models and their layers; the first, which resembles our own module, runs with `--full` only."""


@pytest.mark.parametrize(("name", "layers"), sample_of(PUBLISHED, PUBLISHED[1:]))
def test_hugging_face_models_are_captured_unchanged(name: str, layers: str) -> None:
    """Parameters are those of the shipped graphs (without BERT's pooler; GPT-2's head is its embedding
    table), layers are folded, and scaling to another batch size and length gives the graph captured at that
    size."""
    from tests.runtime import published

    graph = capture(published.__file__, name)
    with torch.device("meta"):
        module, _ = getattr(published, name)()
    used = {key: p.numel() for key, p in module.named_parameters()}
    assert parameter_count(graph) == sum(used.values())
    assert [(block.name, block.repeat) for block in graph.blocks if block.repeat > 1] == [(layers, 3)]
    assert scaled(graph, 6) == capture(published.__file__, name, batch=6)


NUMBERS = {
    "mul": ("scale", 3.0), "add": ("shift", 1.5), "div": ("scale", 0.25), "rsub": ("shift", None),
    "add_1": ("shift", 1.0), "sub": ("shift", -7.0), "masked_fill": ("masked_fill", 0.25),
    "where": ("nonlinear", None), "pow_1": ("power", 3.0), "div_1": ("scale", None),
    "div_2": ("nonlinear", None), "masked_fill_1": ("masked_fill", None), "exp": ("exp", None),
}  # fmt: skip
"""Captured functions of a tensor and a number. A number that is not finite, or depends on the batch size, is
left out."""


def test_a_number_is_written_and_only_products_with_one_take_partial_sums(
    graph_of: Callable[[str], OpGraph],
) -> None:
    own = {node.name: node for block in graph_of("numbers").blocks for node in block.operators}
    found = {name: (own[name].attributes["function"], own[name].attributes.get("number")) for name in NUMBERS}
    assert found == NUMBERS
    linear = {name for name in NUMBERS if any(PARTIAL in rule.inputs for rule in rules_of(own[name]))}
    assert linear == {"mul", "div", "div_1"}


def test_roots_and_logarithms_of_sums_take_no_partial_sums(tmp_path: Path) -> None:
    file = tmp_path / "norms.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Norms(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.own = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        y = self.own(x)\n"
        "        return (y.norm(dim=1) + y.std(1) + y.var(1) + torch.logsumexp(y, 1)).sum()\n\n\n"
        "def build(batch: int = 4):\n    return Norms(), (torch.zeros(batch, 4),)\n"
    )
    own = [node for block in capture(str(file), "build").blocks for node in block.operators]
    sums = {node.name for node in own if node.kind == "reduce" and node.output}
    readers = [node for node in own for operand in node.inputs if operand.source in sums]
    assert len(sums) == len(readers) == 4
    assert not any(PARTIAL in rule.inputs for node in readers for rule in rules_of(node))
