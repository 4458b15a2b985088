"""Graph files: their content, the error of each invalid file, and written files that are read again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.unit.graph.texts import SMALL, TEXT, with_value

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, SizeGrowth, graph_text, load_graph, parse_graph, scaled
from shardwise.inputs import parse_mapping

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/reference/schemas/graph.json").read_text())


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    graph = load_graph(str(path))
    assert (graph.name, graph.batch, graph.seq_len) == ("small", 8, 4)
    assert graph.inputs == {"tokens": (8, 4), "labels": (8, 4)}
    assert graph.operators == 1 + 3 * 3 + 2
    assert [(block.name, block.entry, block.repeat) for block in graph.blocks] == [
        ("ends", None, 1),
        ("layer", "x", 3),
        ("head", "y", 1),
    ]
    up = graph.blocks[1].operators[0]
    assert dict(up.dims) == {"b": 8, "s": 4, "h": 6, "f": 24}
    assert up.output == ("b", "s", "f") and up.parameters[0].name == "layers.{0}.up"
    assert graph.growth == {"b": SizeGrowth(batch=1), "s": SizeGrowth(seq_len=1)}


def test_json_and_the_schema_agree(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    assert load_graph(str(path)) == parse_graph(SMALL)
    validator.validate(SMALL)
    validator.validate(parse_mapping(graph_text(parse_graph(SMALL))))
    for document in (with_value("blocks.0.operator", []), with_value("batch", 0), with_value("blocks", [])):
        assert not validator.is_valid(document)


@pytest.mark.parametrize(
    "graph",
    [
        parse_graph(SMALL),
        scaled(parse_graph(SMALL), 6, 10),
        parse_graph(with_value("blocks.2.operators.1.whole", ["b"])),
        parse_graph(with_value("blocks.1.operators.1.whole", ["f", "s"])),
        parse_graph(with_value("blocks.1.operators.1.flop", 12.5)),
        parse_graph(with_value("blocks.1.operators.2.dims", {"k": "3*seq_len/2", "h": 6})),
        replace(parse_graph(SMALL), source=""),
    ],
)
def test_a_written_graph_is_read_back(graph: OpGraph, tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(graph_text(graph))
    assert load_graph(str(path)) == graph
    assert graph_text(load_graph(str(path))) == graph_text(graph)


def test_a_counter_counts_from_its_number() -> None:
    """`layers.3.up` is none of the three layers that begin at 0."""
    graph = parse_graph(
        with_value("blocks.0.operators.0.parameters.0.name", "layers.3.up")
        | {
            "blocks": [
                with_value("blocks.0.operators.0.parameters.0.name", "layers.3.up")["blocks"][0],
                SMALL["blocks"][1],
                with_value("blocks.2.operators.0.parameters.0.name", "layers.3.up")["blocks"][2],
            ]
        }
    )
    assert graph.blocks[0].operators[0].parameters[0].name == "layers.3.up"


def test_the_example_of_the_page_is_a_graph() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/formats.md").read_text()
    (example,) = re.findall(r"```yaml\n(name: small\n.*?)```", page, re.DOTALL)
    assert parse_graph(parse_mapping(example)).operators == 1 + 12 * 2 + 2


def test_a_name_defaults_to_the_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in SMALL.items() if key != "name"}))
    assert load_graph(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "size", "growth"),
    [
        (5, 5, SizeGrowth()),
        (5.0, 5, SizeGrowth()),
        ("batch", 8, SizeGrowth(batch=1)),
        ("batch*seq_len", 32, SizeGrowth(batch=1, seq_len=1)),
        ("seq_len * 3 / 2", 6, SizeGrowth(seq_len=1)),
        ("seq_len*seq_len", 16, SizeGrowth(seq_len=2)),
        ("6*4", 24, SizeGrowth()),
    ],
)
def test_sizes_are_products(text: object, size: int, growth: SizeGrowth) -> None:
    graph = parse_graph(with_value("blocks.1.operators.0.dims", {"own": text}))
    assert graph.blocks[1].operators[0].dims["own"] == size
    assert graph.growth.get("own", SizeGrowth()) == growth


def _without_entry() -> list[Any]:
    """The blocks of SMALL; the second reads a graph input instead of its entry."""
    blocks = with_value("blocks.1.operators.0.inputs.0.from", "vectors")["blocks"]
    blocks[1]["operators"][2]["inputs"][0]["from"] = "vectors"
    return list(blocks)


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "an input by a name of two lines": (
        with_value("inputs", {**SMALL["inputs"], "a\nb": ["batch"]}),
        "inputs",
        "has a name that is not a short text; found 'a\\nb'",
    ),
    "one name for the tensors of all repetitions": (
        with_value("blocks.1.operators.0.parameters.0.name", "up"),
        "blocks[1].operators[0].parameters[0].name",
        "of operator 'up' is one name for 3 tensors, one per repetition; found up; allowed: a number in "
        "braces that counts them, such as layers.{0}.up",
    ),
    "a name of one repetition beside it": (
        with_value("blocks.2.operators.0.parameters.0", {"name": "layers.2.up", "dims": ["v", "h"]}),
        "blocks[2].operators[0].parameters[0].name",
        "of operator 'logits' is also a name of operator 'up' ('layers.{0}.up'); found layers.2.up",
    ),
    "counters that meet": (
        with_value("blocks.1.operators.1.parameters.0.name", "layers.{2}.up"),
        "blocks[1].operators[1].parameters[0].name",
        "of operator 'down' is also a name of operator 'up' ('layers.{0}.up'); found layers.2.up",
    ),
    "two counters": (
        with_value("blocks.1.operators.0.parameters.0.name", "layers.{0}.{1}.up"),
        "blocks[1].operators[0].parameters[0].name",
        "of operator 'up' has braces that are not one counter",
    ),
    "a counter that is no number": (
        with_value("blocks.0.operators.0.parameters.0.name", "wte.{x}"),
        "blocks[0].operators[0].parameters[0].name",
        "of operator 'embed' has braces that are not one counter",
    ),
    "no loss": (
        with_value("blocks.2.operators", SMALL["blocks"][2]["operators"][:1])
        | {"inputs": {"tokens": ["batch", "seq_len"]}},
        "blocks[2].operators[0].output",
        "of operator 'logits', the last one, is not a loss; found [b, s, v]; allowed: [], a scalar",
    ),
    "a cycle": (
        with_value("blocks.1.operators.0.inputs.0", {"from": "add", "dims": ["b", "s", "h"]}),
        "blocks[1].operators[0].inputs[0].from",
        "of operator 'up' closes a cycle; found up -> down -> add -> up",
    ),
    "a loop": (
        with_value("blocks.1.operators.0.inputs.0.from", "up"),
        "blocks[1].operators[0].inputs[0].from",
        "closes a cycle; found up -> up",
    ),
    "an order": (
        with_value("blocks.1.operators", [SMALL["blocks"][1]["operators"][place] for place in (1, 0, 2)]),
        "blocks[1].operators[0].inputs[0].from",
        "of operator 'down' comes after it; found up; allowed: producers before readers",
    ),
    "an edge to nowhere": (
        with_value("blocks.1.operators.1.inputs.0.from", "upp"),
        "blocks[1].operators[1].inputs[0].from",
        "of operator 'down' does not exist (did you mean up?); found upp",
    ),
    "an edge into a block": (
        with_value("blocks.2.operators.0.inputs.0.from", "up"),
        "blocks[2].operators[0].inputs[0].from",
        "of operator 'logits' is in block 'layer'",
    ),
    "shapes that do not meet": (
        with_value("blocks.2.operators.0.inputs.0.dims", ["b", "s", "v"]),
        "blocks[2].operators[0].inputs[0].dims",
        "of operator 'logits' do not have the shape of 'y'; found [8, 4, 10]; allowed: [8, 4, 6]",
    ),
    "a rank that does not meet": (
        with_value("blocks.2.operators.0.inputs.0.dims", ["b", "h"]),
        "blocks[2].operators[0].inputs[0].dims",
        "found [8, 6]; allowed: [8, 4, 6]",
    ),
    "growth that does not meet": (
        with_value("blocks.1.operators.0.inputs.0.dims", ["s", "b", "h"]) | {"seq_len": 8},
        "blocks[1].operators[0].inputs[0].dims",
        "of operator 'up': does not grow as that dim of 'x'; found s",
    ),
    "growth of an input": (
        with_value("inputs.labels", ["batch", 4]),
        "inputs.labels",
        "does not grow as its readers' dims; found 4 that grows with nothing; allowed: 4 that",
    ),
    "growth of two readers": (
        with_value("blocks.2.operators.1.inputs.1", {"from": "tokens", "dims": ["s", "b"]})
        | {"seq_len": 8, "inputs": {"tokens": ["batch", "seq_len"]}},
        "blocks[2].operators[1].inputs[1].dims",
        "of operator 'loss' do not grow as another reader's",
    ),
    "a dimension of zero": (with_value("sizes.f", 0), "sizes.f", "of operator 'up' is zero; found 0"),
    "a dimension of half a token": (
        with_value("sizes.s", "seq_len/3"),
        "sizes.s",
        "of operator 'embed' is 1.33333, not a whole number; found 'seq_len/3'",
    ),
    "a division by zero": (with_value("sizes.f", "6/0"), "sizes.f", "of operator 'up' divides by zero"),
    "a size in words": (with_value("sizes.f", "hidden*4"), "sizes.f", "is not a size; found 'hidden*4'"),
    "a size without end": (with_value("sizes.f", "batch*999999999999"), "sizes.f", "is out of range"),
    "a size that is true": (with_value("sizes.f", True), "sizes.f", "is not a size; found true"),
    "an operator's own dimension of zero": (
        with_value("blocks.1.operators.1.dims", {"f": 0}),
        "blocks[1].operators[1].dims.f",
        "of operator 'down' is zero; found 0",
    ),
    "an input of zero": (with_value("inputs.labels", [0, 4]), "inputs.labels", "of operator 'loss' is zero"),
    "a dimension of zero that nobody has": (with_value("sizes.z", 0), "sizes.z", ": is zero; found 0"),
    "a dimension of zero of no list": (
        {**SMALL, "sizes": {"h": 0}, "blocks": {"operators": "h"}},
        "sizes.h",
        ": is zero; found 0",
    ),
    "a dim without size": (
        with_value("blocks.1.operators.0.output", ["b", "s", "g"]),
        "blocks[1].operators[0].output",
        "of operator 'up': dim without a size; found 'g'",
    ),
    "a dim twice": (
        with_value("blocks.1.operators.0.output", ["b", "b", "f"]),
        "blocks[1].operators[0].output",
        "of operator 'up': dim given twice; found 'b'",
    ),
    "a dim that is a number": (
        with_value("blocks.1.operators.0.output", ["b", 4, "f"]),
        "blocks[1].operators[0].output",
        "dim without a size; found 4",
    ),
    "a name of a dim": (with_value("sizes.2x", 2), "sizes.2x", "is not a dim name"),
    "a size that nobody has": (
        with_value("sizes.z", 2),
        "sizes",
        "has a name that no operator uses; found 'z'",
    ),
    "growth by name": (
        with_value("blocks.1.operators.0.dims", {"h": "batch*6/8"}),
        "blocks[1].operators[0].dims.h",
        "does not grow as elsewhere under this name; found 'batch*6/8'; allowed: a size that grows with "
        "nothing",
    ),
    "an operator twice": (
        with_value("blocks.2.operators.0.name", "up"),
        "blocks[2].operators[0].name",
        "is given twice (first at blocks[1].operators[0]); found up",
    ),
    "an operator like an input": (
        with_value("blocks.2.operators.1.name", "labels"),
        "blocks[2].operators[1].name",
        "is given twice (first at inputs.labels)",
    ),
    "a block twice": (with_value("blocks.2.name", "ends"), "blocks[2].name", "is given twice; found ends"),
    "an entry like an operator": (
        with_value("blocks.1.entry", "loss"),
        "blocks[1].entry",
        "is also the name of blocks[2].operators[1]",
    ),
    "no entry": (
        with_value("blocks.1.entry", None),
        "blocks[1].entry",
        "is missing; found nothing in block 'layer'",
    ),
    "a first entry": (with_value("blocks.0.entry", "z"), "blocks[0].entry", "is given for the first block"),
    "an entry that nobody reads": (
        SMALL
        | {"inputs": SMALL["inputs"] | {"vectors": ["batch", "seq_len", 6]}}
        | {"blocks": _without_entry()},
        "blocks[1].entry",
        "is read by no operator; found x",
    ),
    "a result that nobody reads": (
        with_value("blocks.1.operators.2.inputs.1.from", "x"),
        "blocks[1].operators[1]",
        "makes 'down', which no operator reads",
    ),
    "an input that nobody reads": (with_value("inputs.more", [8]), "inputs.more", "is read by no operator"),
    "a repeat of the first block": (with_value("blocks.0.repeat", 2), "blocks[0].repeat", "needs an entry"),
    "a repeat of unlike shapes": (
        with_value("blocks.2.repeat", 2),
        "blocks[2].repeat",
        "of block 'head' needs a result of the shape of its entry; found []; allowed: [8, 4, 6]",
    ),
    "parameters of two shapes": (
        with_value("blocks.2.operators.0.parameters.0.dims", ["h", "v"]),
        "blocks[2].operators[0].parameters[0]",
        "of operator 'logits' has another shape than at operator 'embed'; found [6, 10]; allowed: [10, 6]",
    ),
    "a shared parameter in a repeated block": (
        with_value("blocks.1.operators.0.parameters.0", {"name": "wte", "dims": ["h", "f"]})
        | {"sizes": SMALL["sizes"] | {"v": 6, "f": 6, "h": 6}},
        "blocks[1].operators[0].parameters[0]",
        "of operator 'up' is shared with operator 'embed' of another block",
    ),
    "a parameter that grows": (
        with_value("blocks.1.operators.0.parameters.0.dims", ["h", "f", "s"]),
        "blocks[1].operators[0].parameters[0]",
        "of operator 'up' grows with the batch or the sequence length",
    ),
    "an unknown key": (
        with_value("blocks.1.operators.0.input", []),
        "blocks[1].operators[0].input",
        "is not a known key (did you mean inputs?)",
    ),
    "an unknown key of an edge": (
        with_value("blocks.1.operators.0.inputs.0.form", "x"),
        "blocks[1].operators[0].inputs[0].form",
        "is not a known key (did you mean from?)",
    ),
    "an attribute that is a list": (
        with_value("blocks.1.operators.0.attributes", {"axes": [1]}),
        "blocks[1].operators[0].attributes.axes",
        "is not a plain value",
    ),
    "an unknown kind": (
        with_value("blocks.1.operators.0.kind", "liner"),
        "blocks[1].operators[0].kind",
        "of operator 'up' is not an operator kind (did you mean linear?); found 'liner'; allowed: einsum",
    ),
    "an attribute of another kind": (
        with_value("blocks.1.operators.2.attributes", {"function": "addd"}),
        "blocks[1].operators[2].attributes.function",
        "elementwise operator 'add' cannot have this value; found 'addd'",
    ),
    "a kind's own shapes": (
        with_value("blocks.2.operators.1.output", ["v"]),
        "blocks[2].operators[1]",
        "needs logits with one dim more than its targets",
    ),
    "more than anything computes": (
        with_value("blocks.1.operators.0.dims", {f"k{at}": 1e12 for at in range(4)}),
        "blocks[1].operators[0].dims",
        "of operator 'up' are too large together; found 10^51 iterations",
    ),
    "no blocks": (with_value("blocks", []), "blocks", "has the wrong length"),
    "a newer version": (with_value("version", 2), "version", "is not a whole number in range; found 2"),
    "another schema": (with_value("schema", "shardwise.plan"), "schema", "is not one of the choices"),
    "no sequence": (with_value("seq_len", None), "sizes.s", "needs the graph's seq_len; found 'seq_len'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_refused_by_key_and_operator(wrong: str, tmp_path: Path) -> None:
    document, key, message = WRONG[wrong]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        load_graph(str(path))
    error = caught.value
    assert error.file == str(path)
    assert error.key == key
    assert message in str(error) and "\n" not in str(error)


def test_unknown_names_suggest_a_near_one() -> None:
    with pytest.raises(ConfigError, match="neither a file nor a known graph"):
        load_graph("no-such-thing")
    with pytest.raises(ConfigError, match="is not a shipped graph"):
        load_graph("graph:no-such-thing")


def test_a_graph_scales_with_its_batch_and_sequence() -> None:
    graph = parse_graph(with_value("blocks.1.operators.0.flop", 100.0))
    larger = scaled(graph, 16, 12)
    assert (larger.batch, larger.seq_len) == (16, 12)
    assert larger.inputs == {"tokens": (16, 12), "labels": (16, 12)}
    up = larger.blocks[1].operators[0]
    assert dict(up.dims) == {"b": 16, "s": 12, "h": 6, "f": 24}
    assert up.flop == 100.0 * 2 * 3
    assert scaled(larger, 8, 4) == graph
    assert scaled(graph) == graph
    document = with_value("batch", 16)
    document["seq_len"] = 12
    assert scaled(parse_graph(SMALL), 16, 12) == parse_graph(document)


def test_a_graph_that_cannot_scale_is_refused() -> None:
    document = with_value("blocks.1.operators.0.dims", {"half": "batch/2"})
    with pytest.raises(ConfigError, match=r"gives 'up', dim half an invalid size; found 3\.5"):
        scaled(parse_graph(document), 7)
    still = with_value("seq_len", None)
    still["sizes"]["s"] = 4
    still["inputs"] = {"tokens": ["batch", 4], "labels": ["batch", 4]}
    with pytest.raises(ConfigError, match="graph 'small' has no sequence"):
        scaled(parse_graph(still), 8, 16)
