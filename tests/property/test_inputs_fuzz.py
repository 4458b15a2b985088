"""Any input gives a mapping of plain values, or one ConfigError of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, cluster_from_record, cluster_record, load_cluster
from shardwise.cluster.file import cluster_of_fields
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_mapping, read_mapping

T = TypeVar("T")
TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(TEXT, max_size=8),
    st.sampled_from(["node", "cluster", "400Gb/s", "1e9", "H100-SXM", "4us", "2TiB", "d0", "-1", "0GB"]),
)  # fmt: skip
KEYS = st.text(TEXT, max_size=6)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))


def only_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and only_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(only_plain(item) for item in value)
    return value is None or type(value) in (str, bool, int, float)


def outcome(call: Callable[[], T]) -> T | ConfigError:
    """The result of `call`, or its ConfigError, which must be one short line; any other exception is a
    failure.
    """
    try:
        return call()
    except ConfigError as error:
        refusal = error
    assert "\n" not in str(refusal) and len(str(refusal)) < 2000
    return refusal


def parsed_or_refused(text: str, file: str | None = None) -> dict[str, object] | None:
    value = outcome(lambda: parse_mapping(text, file=file))
    if isinstance(value, ConfigError):
        return None
    assert only_plain(value)
    return value


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_json_values_survive(mapping: dict[str, Any]) -> None:
    assert parsed_or_refused(json.dumps(mapping), "x.json") == mapping
    assert parsed_or_refused(json.dumps(mapping, ensure_ascii=False), "x.json") == mapping


@given(
    st.text(st.sampled_from("ab:-?[]{},&*!|>'\"%@` \n\t#.0123456789eE+~<\\\0\ufeff\ud800\x85"), max_size=60)
)
@example("? ")
@example("a: |\n\t")
@example('"\\x')
@example("%YAML 9.9\n---\na: 1")
def test_yaml_syntax_is_read_or_refused(text: str) -> None:
    parsed_or_refused(text)
    parsed_or_refused("a:\n " + text, "x.yaml")
    parsed_or_refused('{"a": ' + text, "x.json")


@given(data=st.binary(max_size=80))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    value = outcome(lambda: read_mapping(str(path)))
    assert value.file == str(path) if isinstance(value, ConfigError) else only_plain(value)


def mutated(tree: Any, data: st.DataObject) -> Any:
    """`tree` with one place changed: a value replaced, a key renamed, removed or added."""
    if isinstance(tree, dict) and tree:
        key = data.draw(st.sampled_from(sorted(tree)))
        change = data.draw(st.sampled_from(["into", "into", "into", "rename", "remove", "add"]))
        rest = {name: item for name, item in tree.items() if name != key}
        if change == "remove":
            return rest
        if change == "rename":
            return {**rest, data.draw(KEYS): tree[key]}
        if change == "add":
            return {**tree, data.draw(KEYS): data.draw(TREES)}
        return {**tree, key: mutated(tree[key], data)}
    if isinstance(tree, list) and tree:
        index = data.draw(st.integers(0, len(tree) - 1))
        return [*tree[:index], mutated(tree[index], data), *tree[index + 1 :]]
    return data.draw(TREES)


@pytest.mark.slow
@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_cluster_file_is_a_cluster_or_a_config_error(path: Path, data: st.DataObject) -> None:
    tree = mutated(mutated(read_mapping(str(path)), data), data)
    fields = Fields(tree if isinstance(tree, dict) else {}, file="c.yaml")
    cluster = outcome(lambda: cluster_of_fields(fields))
    if isinstance(cluster, ConfigError):
        assert cluster.file == "c.yaml"
    else:
        assert cluster.devices > 0 and cluster.tiers[-1].span == cluster.devices


@pytest.mark.parametrize("name", ["\n", "", "x" * 300])
def test_a_class_name_that_is_no_text_is_refused_in_one_line(name: str) -> None:
    """Formerly the class was named among the allowed values even for a node without a device."""
    tree = read_mapping(str(next(path for path in EXAMPLES if path.name == "mixed.yaml")))
    classes = tree["classes"]
    assert isinstance(classes, dict)
    tree = {**tree, "classes": {name: classes["A100-capped"]}}
    refusal = outcome(lambda: cluster_of_fields(Fields(tree, file="c.yaml")))
    assert isinstance(refusal, ConfigError) and refusal.key == "classes"


@pytest.mark.slow
@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_record_is_a_cluster_or_a_config_error(path: Path, data: st.DataObject) -> None:
    record = json.loads(json.dumps(cluster_record(load_cluster(str(path)))))
    tree = mutated(record, data)
    cluster = outcome(lambda: cluster_from_record(tree if isinstance(tree, dict) else {}, file="plan.json"))
    assert isinstance(cluster, Cluster) or cluster.file == "plan.json"


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789xX+-.H1A8Ggpu/ \0\n"), max_size=20))
def test_any_cluster_text_is_a_cluster_or_a_config_error(text: str) -> None:
    cluster = outcome(lambda: load_cluster(text))
    assert isinstance(cluster, ConfigError) or cluster.devices > 0
