"""The seven schedules written out again as words (docs/concepts/cost-model.md, section 13), and their
tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from shardwise.check.rows import Family

TableAction = tuple[int, str, int]
"""Stage, kind (F, B, I, W), microbatch."""

Table = tuple[tuple[TableAction, ...], ...]
"""For each pipeline rank its actions, in order."""


def table_of(family: Family) -> Table:
    """The table that the family's schedule is."""
    pp, vpp, m = family.pp, family.vpp, family.microbatches
    if family.schedule == "interleaved_1f1b":
        return tuple(tuple(_interleaved(pp, vpp, m, rank)) for rank in range(pp))
    word = WORDS[family.schedule]
    return tuple(tuple(_actions_of_word(word(pp, m, rank), pp, rank)) for rank in range(pp))


def _actions_of_word(word: str, pp: int, rank: int) -> Iterator[TableAction]:
    """The actions that the letters of a word stand for: capitals on stage `rank`, small ones on the stage
    that comes back through the same rank, `q` for what the next I or i left undone."""
    back = 2 * pp - 1 - rank
    numbers = {letter: count() for letter in "FBWfbw"}
    inputs: list[tuple[int, int]] = []
    undone = count()
    for letter in word:
        if letter == "q":
            stage, microbatch = inputs[next(undone)]
            yield stage, "W", microbatch
            continue
        stage = rank if letter.isupper() else back
        class_ = {"I": "B", "i": "b"}.get(letter, letter)
        microbatch = next(numbers[class_])
        if letter in "Ii":
            inputs.append((stage, microbatch))
        yield stage, letter.upper(), microbatch


def _gpipe(pp: int, m: int, rank: int) -> str:
    return "F" * m + "B" * m


def _1f1b(pp: int, m: int, rank: int) -> str:
    k = min(pp - 1 - rank, m)
    return "F" * k + "FB" * (m - k) + "B" * k


def _zb_h(pp: int, m: int, rank: int, *, times: int) -> str:
    k, z = min(times * (pp - 1 - rank), m), times * rank
    x = min(z, m - k)
    y = min(z - x, k)
    return "F" * k + "FI" * x + "FIq" * (m - k - x) + "I" * y + "Iq" * (k - y) + "q" * (x + y)


def _zb_v(pp: int, m: int, rank: int) -> str:
    d = pp - 1 - rank
    return (
        "F" * (2 * d + 1)
        + "fF" * rank
        + "fiw" * (d + 1)
        + "FIWfiw" * (m - 2 * pp + rank + 1)
        + "IWfiw" * d
        + "Ii" * rank
        + "IW" * (d + 1)
        + "w" * rank
        + "W" * rank
    )


def _dualpipe_v(pp: int, m: int, rank: int) -> str:
    d, c = pp - 1 - rank, (rank + 1) // 2
    middle = "iI" * ((rank + 1) // 2) if rank % 2 else "bI" + "iI" * (rank // 2)
    return (
        "F" * (2 * d)
        + "Ff" * (rank + 1)
        + "iqf" * d
        + "FbfB" * (m - 2 * pp + rank + 1)
        + "bfB" * d
        + "bB" * c
        + middle
        + "qI" * d
        + "q" * (rank + 1)
    )


WORDS: dict[str, Callable[[int, int, int], str]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "zb_h1": lambda pp, m, rank: _zb_h(pp, m, rank, times=1),
    "zb_h2": lambda pp, m, rank: _zb_h(pp, m, rank, times=2),
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
}
"""The word of a rank, from pp, the microbatches and the rank."""


def _interleaved(pp: int, vpp: int, m: int, rank: int) -> Iterator[TableAction]:
    total = m * vpp
    k = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, total)
    numbers = {"F": count(), "B": count()}
    for letter in "F" * k + "FB" * (total - k) + "B" * k:
        j = next(numbers[letter])
        chunk = (j // pp) % vpp
        stage = (chunk if letter == "F" else vpp - 1 - chunk) * pp + rank
        yield stage, letter, (j // pp // vpp) * pp + j % pp


def in_flight(family: Family, rank: int) -> int:
    """The most (stage, microbatch) of a rank between F and the end of B or W."""
    pp, vpp, m = family.pp, family.vpp, family.microbatches
    return {
        "1f1b": min(m, pp - rank),
        "gpipe": m,
        "interleaved_1f1b": min(m * vpp, (vpp + 1) * pp - 2 * rank - 1),
        "zb_h1": min(m, pp),
        "zb_h2": min(m, 2 * pp - 1),
        "zb_v": min(2 * m, 2 * pp),
        "dualpipe_v": min(2 * m, 2 * pp + 1),
    }[family.schedule]


def pending_weights(family: Family, rank: int) -> int:
    """The most (stage, microbatch) of a rank from the begin of I to the end of W."""
    of_rank = {"zb_h1": rank + 1, "zb_h2": 2 * rank + 1, "zb_v": 2 * rank + 1, "dualpipe_v": rank + 1}
    return min(family.microbatches, of_rank.get(family.schedule, 0))
