"""The text of Megatron-LM's `--pipeline-model-parallel-layout`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

_LONGEST_PLAIN = 3
"""Layers of a stage that are spelled out; more are `t*N`."""


def layout_text(counts: Sequence[int]) -> str:
    """The layout of stages with these numbers of decoder layers: the embedding `E` comes before the layers of
    the first stage, the loss `L` after those of the last. Stages are in the order of the layers.

    Runs of alike stages are written once: 1, 1, 1 and 0 layers are `Et|(t|)*2L`.
    """
    stages = [_layers(count) for count in counts]
    stages[0] = "E" + stages[0]
    texts = []
    for stage, run in groupby(stages[:-1]):
        length = len(list(run))
        texts.append(f"{stage}|" if length == 1 else f"({stage}|)*{length}")
    return "".join(texts) + f"{stages[-1]}L"


def _layers(count: int) -> str:
    return "t" * count if count <= _LONGEST_PLAIN else f"t*{count}"
