"""Generate the table of each schedule: GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB-V and DualPipe-V.

A rank's row is a *word*: one letter per action. `F B I W` act on the rank's first chunk, `f b i w` on its
second; `q` is the weight gradient of the oldest input gradient that still lacks its weight gradient. The n-th
letter of a class (forward, backward, weight; per chunk) takes the n-th item of that class's *stream* of
stages and micro-batches. So each schedule is one formula for words.

Sources: GPipe, arXiv 1811.06965; 1F1B and interleaved 1F1B, arXiv 2104.04473 (warm-up and groups as in
Megatron-LM); zero bubble H1, H2 and V, arXiv 2401.10241; DualPipe, arXiv 2412.19437, as the V-shaped half
that PyTorch has. The orders are those of PyTorch 2.13's `torch.distributed.pipelining` where it has the
schedule. Its zero-bubble schedule with one stage per rank is `zb_h1`; `zb_h2` is the same with twice the
warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Columns, Schedule
from shardwise.schedule.legality import illegal_reason, stage_of, stage_ranks

Ints = NDArray[np.int64]

_KIND_OF_LETTER = np.zeros(128, dtype=np.int64)
for _letters, _code in (("Ff", FORWARD), ("Bb", BACKWARD), ("Ii", BACKWARD_INPUT), ("Wwq", BACKWARD_WEIGHT)):
    _KIND_OF_LETTER[[ord(letter) for letter in _letters]] = _code

_CLASSES = ("F", "BI", "W", "f", "bi", "w")
_CLASS_OF_LETTER = np.full(128, -1, dtype=np.int64)
for _index, _letters in enumerate(_CLASSES):
    _CLASS_OF_LETTER[[ord(letter) for letter in _letters]] = _index


class _Stream(NamedTuple):
    """Stages and micro-batches of the letters of one class, first to last; shapes (n,), or () and (n,)."""

    stage: Ints | int
    microbatch: Ints


def generate(name: str, *, pp: int, microbatches: int, vpp: int) -> Schedule:
    """The table of schedule `name` for `pp` ranks, `vpp` chunks per rank and `microbatches` per step.

    Deterministic. Raises ConfigError, with the reason code, where the combination is illegal.
    """
    reason = illegal_reason(name, pp, microbatches, vpp)
    if reason is not None:
        raise ConfigError(
            f"schedule {name} is illegal with pp={pp}, microbatches={microbatches}, vpp={vpp} ({reason})",
            key="schedule",
        )
    word_of = _WORDS[name]
    rows = [
        _row(word_of(pp, rank, microbatches, vpp), _streams(name, pp, rank, microbatches, vpp))
        for rank in range(pp)
    ]
    stage, kind, microbatch = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    offsets = np.cumsum([0, *(len(row[0]) for row in rows)], dtype=np.int64)
    return Schedule.from_columns(
        name=name,
        microbatches=microbatches,
        stage_rank=stage_ranks(name, pp, vpp),
        columns=Columns(stage, kind, microbatch, offsets),
    )


def _streams(name: str, pp: int, rank: int, microbatches: int, vpp: int) -> dict[str, _Stream]:
    """The stream of each class of letters on `rank`."""
    in_order = np.arange(microbatches, dtype=np.int64)
    if vpp == 1:
        return {letters: _Stream(rank, in_order) for letters in ("F", "BI", "W")}
    if name == "interleaved_1f1b":
        return _interleaved_streams(pp, rank, microbatches, vpp)
    second = stage_of(name, pp, rank, 1)
    return {letters: _Stream(second if letters.islower() else rank, in_order) for letters in _CLASSES}


def _interleaved_streams(pp: int, rank: int, microbatches: int, vpp: int) -> dict[str, _Stream]:
    """Chunks alternate: pp micro-batches through one chunk, the same pp through the next; backward passes
    start with the last chunk."""
    round_index, place = np.divmod(np.arange(microbatches * vpp, dtype=np.int64), pp)
    group, chunk = np.divmod(round_index, vpp)
    microbatch = group * pp + place
    return {
        "F": _Stream(chunk * pp + rank, microbatch),
        "BI": _Stream((vpp - 1 - chunk) * pp + rank, microbatch),
    }


def _row(word: str, streams: dict[str, _Stream]) -> tuple[Ints, Ints, Ints]:
    """Stage, kind and micro-batch of every letter of `word`."""
    letters = np.frombuffer(word.encode(), dtype=np.uint8)
    kind = _KIND_OF_LETTER[letters]
    classes = _CLASS_OF_LETTER[letters]
    stage = np.empty(len(word), dtype=np.int64)
    microbatch = np.empty(len(word), dtype=np.int64)
    for name, (stages, microbatches) in streams.items():
        (places,) = np.nonzero(classes == _CLASSES.index(name))
        if len(places):
            stage[places] = stages
            microbatch[places] = microbatches[: len(places)]
    (queued,) = np.nonzero(classes < 0)
    if len(queued):
        (sources,) = np.nonzero(kind == BACKWARD_INPUT)
        stage[queued] = stage[sources]
        microbatch[queued] = microbatch[sources]
    return stage, kind, microbatch


def _gpipe(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    return "F" * microbatches + "B" * microbatches


def _one_f_one_b(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    warmup = min(pp - 1 - rank, microbatches)
    return "F" * warmup + "FB" * (microbatches - warmup) + "B" * warmup


def _interleaved(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    total = microbatches * vpp
    warmup = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, total)
    return "F" * warmup + "FB" * (total - warmup) + "B" * warmup


def _zero_bubble(pp: int, rank: int, microbatches: int, stretch: int) -> str:
    """1F1B with deferred weight gradients: a rank with fewer warm-up forwards defers more of them, so that
    all ranks save equally many activations."""
    warmup = min(stretch * (pp - 1 - rank), microbatches)
    deferred = stretch * rank
    pairs = microbatches - warmup
    bare_pairs = min(deferred, pairs)
    bare_inputs = min(deferred - bare_pairs, warmup)
    return (
        "F" * warmup
        + "FI" * bare_pairs
        + "FIq" * (pairs - bare_pairs)
        + "I" * bare_inputs
        + "Iq" * (warmup - bare_inputs)
        + "q" * (bare_pairs + bare_inputs)
    )


def _zb_h1(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    return _zero_bubble(pp, rank, microbatches, 1)


def _zb_h2(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    return _zero_bubble(pp, rank, microbatches, 2)


def _zb_v(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    below = pp - rank
    return (
        "F" * (2 * below - 1)
        + "fF" * rank
        + "fiw" * below
        + "FIWfiw" * (microbatches - 2 * pp + rank + 1)
        + "IWfiw" * (below - 1)
        + "Ii" * rank
        + "IW" * below
        + "w" * rank
        + "W" * rank
    )


def _dualpipe_v(pp: int, rank: int, microbatches: int, vpp: int) -> str:
    below = pp - 1 - rank
    whole = (rank + 1) // 2
    split = "iI" * ((rank + 1) // 2) if rank % 2 else "bI" + "iI" * (rank // 2)
    return (
        "F" * (2 * below)
        + "Ff" * (rank + 1)
        + "iqf" * below
        + "FbfB" * (microbatches - 2 * pp + rank + 1)
        + "bfB" * below
        + "bB" * whole
        + split
        + "qI" * below
        + "q" * (rank + 1)
    )


_WORDS: dict[str, Callable[[int, int, int, int], str]] = {
    "1f1b": _one_f_one_b,
    "gpipe": _gpipe,
    "interleaved_1f1b": _interleaved,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
}
