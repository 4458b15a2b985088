"""A small graph as a user would write it, and its parts to change."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from shardwise.inputs import parse_mapping

TEXT = """
name: small
source: a hand-made example
batch: 8
seq_len: 4
sizes: {b: batch, s: seq_len, h: 6, f: 24, v: 10}
inputs: {tokens: [batch, seq_len], labels: [batch, seq_len]}
blocks:
- name: ends
  operators:
  - name: embed
    kind: embedding
    inputs: [{from: tokens, dims: [b, s]}]
    parameters: [{name: wte, dims: [v, h]}]
    output: [b, s, h]
- name: layer
  entry: x
  repeat: 3
  operators:
  - name: up
    kind: linear
    inputs: [{from: x, dims: [b, s, h]}]
    parameters: [{name: "layers.{0}.up", dims: [h, f]}]
    output: [b, s, f]
  - name: down
    kind: linear
    inputs: [{from: up, dims: [b, s, f]}]
    parameters: [{name: "layers.{0}.down", dims: [f, h]}]
    output: [b, s, h]
  - name: add
    kind: elementwise
    attributes: {function: add}
    inputs: [{from: x, dims: [b, s, h]}, {from: down, dims: [b, s, h]}]
    output: [b, s, h]
- name: head
  entry: y
  operators:
  - name: logits
    kind: linear
    inputs: [{from: y, dims: [b, s, h]}]
    parameters: [{name: wte, dims: [v, h]}]
    output: [b, s, v]
  - name: loss
    kind: cross_entropy
    inputs: [{from: logits, dims: [b, s, v]}, {from: labels, dims: [b, s]}]
    output: []
"""

SMALL: dict[str, Any] = parse_mapping(TEXT)


def with_value(path: str, value: Any) -> dict[str, Any]:
    """SMALL with the value at a path such as `blocks.1.operators.0.kind` replaced."""
    document = deepcopy(SMALL)
    place: Any = document
    *way, last = path.split(".")
    for step in way:
        place = place[int(step)] if step.isdecimal() else place[step]
    place[int(last) if last.isdecimal() else last] = value
    return document
