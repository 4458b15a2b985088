"""The shipped graphs compared with published counts and with arithmetic in this file."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.graph import (
    OpGraph,
    forward_flop,
    graph_names,
    graph_text,
    load_graph,
    parameter_count,
    parse_graph,
    scaled,
    shipped_graphs,
    step_flop,
)
from shardwise.inputs import parse_mapping
from shardwise.model import catalogue_names, load_model, parameters


def _bottlenecks(counts: tuple[int, ...], width: int) -> list[tuple[int, int, int, int]]:
    """Channels in, between and out, and output rows, of each block of a bottleneck ResNet."""
    blocks, channels = [], 64 * width
    for stage, count in enumerate(counts):
        between = 64 * width * 2**stage
        for _ in range(count):
            blocks.append((channels, between, 4 * between, 56 // 2**stage))
            channels = 4 * between
    return blocks


def _resnet_parameters(counts: tuple[int, ...], width: int) -> int:
    """Convolutions without bias, two parameters per channel of a normalisation, and the classifier."""
    total = 3 * 49 * 64 * width + 2 * 64 * width
    for channels, between, out, _ in _bottlenecks(counts, width):
        total += channels * between + 9 * between * between + between * out + 2 * (2 * between + out)
        total += (channels * out + 2 * out) if channels != out else 0
    return total + 4 * 64 * width * 8 * 1000 + 1000


def _resnet_forward_flop(counts: tuple[int, ...], width: int) -> float:
    """For 256 images of 224 x 224: the first block of each later stage works on twice the rows, until its 3 x
    3 convolution.
    """
    total = 112 * 112 * 3 * 49 * 64 * width + 4 * 64 * width * 8 * 1000
    before = 56
    for channels, between, out, rows in _bottlenecks(counts, width):
        total += before * before * channels * between
        total += rows * rows * (9 * between * between + between * out)
        total += rows * rows * channels * out if channels != out else 0
        before = rows
    return 2.0 * 256 * total


PARAMETERS = {
    # Simonyan and Zisserman 2015, table 2: 138 million; torchvision has 138,357,544.
    "vgg16": 138_357_544,
    # torchvision: 25,557,032.
    "resnet50": 25_557_032,
    "wideresnet26-10": _resnet_parameters((2, 2, 2, 2), 10),
    # table and softmax of 32,000 words; each layer 4 gates of 2048 from 2048 + 2048, two biases
    "lstm-2x2048": 2 * 32000 * 2048 + 32000 + 2 * 4 * 2048 * (2048 + 2048 + 2),
    # Radford et al. 2019 give 1542M; the checkpoint (tied head) has 1,557,611,200.
    "gpt2-1.5b": 1_557_611_200,
    "llama-3.1-8b": 8_030_261_248,
    # fairseq logs 209,911,808 trained parameters for transformer_vaswani_wmt_en_de_big with 32,768 pieces.
    "transformer-big": 209_911_808,
    # in 4096 x 16384, six layers of 16384 x 16384, out 16384 x 1000, each with its bias
    "mlp": 4096 * 16384 + 16384 + 6 * (16384 * 16384 + 16384) + 16384 * 1000 + 1000,
    # tables of 20M and 5M rows of 128; towers 256 or 384 to 1024 to 512 to 128
    "two-tower": 25_000_000 * 128 + (256 + 384) * 1024 + 2 * (1024 + 1024 * 512 + 512 + 512 * 128 + 128),
}


def _llama_forward_flop() -> float:
    """Twice the weights that products use, per token; causal attention is half of 4 s s per head dim."""
    tokens = 256 * 2048
    weights = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 4096 * 128256
    return 2.0 * tokens * weights + 32 * 256 * 32 * (4 * 2048 * 2048 * 128) / 2


def _gpt2_forward_flop() -> float:
    tokens = 512 * 1024
    weights = 48 * 12 * 1600 * 1600 + 1600 * 50257
    return 2.0 * tokens * weights + 48 * 512 * 25 * (4 * 1024 * 1024 * 64) / 2


def _transformer_big_forward_flop() -> float:
    """Per token 12 d d in a layer of the encoder, 16 d d in one of the decoder; attention of the encoder and
    across is full, the decoder's own causal."""
    tokens = 1024 * 64
    weights = 6 * (12 + 16) * 1024 * 1024 + 1024 * 32768
    return 2.0 * tokens * weights + 6 * (1 + 1 / 2 + 1) * 1024 * 16 * (4 * 64 * 64 * 64)


def _vgg_forward_flop() -> float:
    """Products of 3 x 3 convolutions by their rows and channels, then of the classifier."""
    convolutions = (
        (224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256),
        (56, 256, 256), (28, 256, 512), (28, 512, 512), (28, 512, 512), (14, 512, 512), (14, 512, 512),
        (14, 512, 512),
    )  # fmt: skip
    products = sum(rows * rows * 9 * read * made for rows, read, made in convolutions)
    return 2.0 * 256 * (products + 512 * 49 * 4096 + 4096 * 4096 + 4096 * 1000)


FORWARD_FLOP = {
    "vgg16": _vgg_forward_flop(),
    "resnet50": _resnet_forward_flop((3, 4, 6, 3), 1),
    "wideresnet26-10": _resnet_forward_flop((2, 2, 2, 2), 10),
    "lstm-2x2048": 2.0 * 512 * 128 * (2 * 4 * 2048 * (2048 + 2048) + 2048 * 32000),
    "llama-3.1-8b": _llama_forward_flop(),
    "gpt2-1.5b": _gpt2_forward_flop(),
    "transformer-big": _transformer_big_forward_flop(),
    "mlp": 2.0 * 8192 * (4096 * 16384 + 6 * 16384 * 16384 + 16384 * 1000),
    "two-tower": 2.0 * 16384 * (640 * 1024 + 2 * (1024 * 512 + 512 * 128) + 16384 * 128),
}

FREE_FLOP = {
    "vgg16": 2.0 * 256 * 224 * 224 * 27 * 64,
    "resnet50": 2.0 * 256 * 112 * 112 * 147 * 64,
    "wideresnet26-10": 2.0 * 256 * 112 * 112 * 147 * 640,
    # Products whose input is data do not compute its gradient.
    "mlp": 2.0 * 8192 * 4096 * 16384,
}


def test_every_graph_has_an_oracle() -> None:
    assert set(graph_names()) == set(PARAMETERS) == set(FORWARD_FLOP)


@pytest.mark.parametrize("name", graph_names())
def test_parameters_are_the_published_ones(name: str) -> None:
    assert parameter_count(load_graph(f"graph:{name}")) == PARAMETERS[name]


@pytest.mark.parametrize("name", graph_names())
def test_flop_equal_the_arithmetic(name: str) -> None:
    graph = load_graph(f"graph:{name}")
    assert forward_flop(graph) == pytest.approx(FORWARD_FLOP[name], rel=1e-12)
    assert step_flop(graph) == pytest.approx(3 * FORWARD_FLOP[name] - FREE_FLOP.get(name, 0.0), rel=1e-12)


@pytest.mark.parametrize("name", graph_names())
def test_files_are_in_the_written_form_and_say_their_source(name: str) -> None:
    graph = load_graph(f"graph:{name}")
    assert parse_graph(parse_mapping(graph_text(graph))) == graph
    assert graph.source and graph.name == name


def test_convolutions_have_the_published_flop() -> None:
    """torchvision gives 15.47 and 4.09 billion multiplications and additions per image."""
    assert forward_flop(load_graph("graph:vgg16")) / 256 / 2 == pytest.approx(15.47e9, rel=1e-3)
    assert forward_flop(load_graph("graph:resnet50")) / 256 / 2 == pytest.approx(4.09e9, rel=1e-3)


def test_the_flop_of_residual_networks_are_the_published_ones() -> None:
    assert _resnet_parameters((3, 4, 6, 3), 1) == PARAMETERS["resnet50"]


def test_the_catalogue_of_models_agrees() -> None:
    assert parameter_count(load_graph("graph:llama-3.1-8b")) == parameters(load_model("llama-3.1-8b"))
    assert parameter_count(load_graph("graph:gpt2-1.5b")) == parameters(load_model("gpt2-xl"))
    assert {"llama-3.1-8b", "gpt2-xl"} <= set(catalogue_names())


def test_llama_has_its_operators_one_by_one() -> None:
    graph = load_graph("GRAPH:Llama-3.1-8B")
    assert [(block.name, len(block.operators), block.repeat) for block in graph.blocks] == [
        ("embedding", 1, 1),
        ("layer", 15, 32),
        ("head", 3, 1),
    ]


@pytest.mark.parametrize("graph", shipped_graphs().values(), ids=lambda graph: graph.name)
def test_another_batch_keeps_the_parameters_and_scales_the_work(graph: OpGraph) -> None:
    twice = scaled(graph, 2 * graph.batch)
    assert parameter_count(twice) == parameter_count(graph)
    # In-batch softmax compares every user with every item.
    both = 2.0 * 16384 * 16384 * 128 * 2 if graph.name == "two-tower" else 0.0
    assert forward_flop(twice) == pytest.approx(2 * forward_flop(graph) + both, rel=1e-12)
    if graph.seq_len is not None:
        longer = scaled(graph, seq_len=2 * graph.seq_len)
        assert 2 * forward_flop(graph) <= forward_flop(longer) < 4 * forward_flop(graph)


def test_an_unknown_graph_suggests_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean graph:llama-3\.1-8b\?"):
        load_graph("graph:llama-3-8b")
    with pytest.raises(ConfigError, match=r"did you mean graph:mlp\?"):
        load_graph("mlpp")
