"""A small part of a space in which good strategies are soon found: what they take is what all others must
beat.

Nothing is proven on a sketch; whatever it leaves out is searched afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import distinct_rows
from shardwise.search.space import FULL, Space
from shardwise.search.variants import Variants
from shardwise.strategy import SCHEDULES, Column

FEW_SCHEDULES = tuple(SCHEDULES.index(name) for name in ("1f1b", "interleaved_1f1b", "zb_v"))
FEW_CHUNKS = (1, 2, 4, 8, 16)
FEW_MICRO_BATCHES = (1, 2, 4, 8)
FEW_SPLITS = 3


class RestrictedSpace(Space):
    """Of each axis few values: the first axis order, sequences parallel, experts whole or split like
    the rest, small micro-batches, three schedules, splits that are
    even but for the last stage, nothing or everything sharded, quarters of the layers recomputed.

    An axis that would have none of these keeps all its values.
    """

    def _restrict_shapes(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        tp, etp = columns["tp"], columns["etp"]
        plain = ((tp == 1) | (columns["sequence_parallel"] == 1)) & ((etp == 1) | (etp == tp))
        columns = _subset_or_all(columns, plain)
        names = ("tp", "cp", "dp", "pp", "etp", "ep", "sequence_parallel")
        rows, _ = distinct_rows([columns[name] for name in names])
        return {name: column[np.sort(rows)] for name, column in columns.items()}

    def orders(self, tp: int, cp: int, dp: int, pp: int) -> dict[str, Column]:
        return {name: column[:1] for name, column in super().orders(tp, cp, dp, pp).items()}

    def micro_batch_sizes(self, dp: int) -> dict[str, Column]:
        sizes = super().micro_batch_sizes(dp)
        return _subset_or_all(sizes, np.isin(sizes["micro_batch_size"], FEW_MICRO_BATCHES))

    def variants(self, pp: int) -> Variants:
        variants = super().variants(pp)
        keep = np.isin(variants.schedule, FEW_SCHEDULES) & np.isin(variants.vpp, FEW_CHUNKS)
        return variants.take(keep) if keep.any() else variants

    def _split_options(self, stages: int) -> dict[str, Column]:
        options = super()._split_options(stages)
        first, last = options["first_stage_layers"], options["last_stage_layers"]
        if not len(first):
            return options
        keep = (first == first[0]) & (last > last[0] - FEW_SPLITS)
        return _subset_or_all(options, keep | (np.arange(len(first)) < FEW_SPLITS if stages == 2 else keep))

    def _shard_options(self, ranks: int) -> dict[str, Column]:
        options = super()._shard_options(ranks)
        keep = options["optim_shard"] == options["optim_shard"].max(initial=1)
        for name in ("param_shard", "grad_shard"):
            keep &= (options[name] == 1) | (options[name] == options[name].max(initial=1))
        return _subset_or_all(options, keep)

    def recompute_layers(self, recompute: int, largest: int) -> Column:
        layers = super().recompute_layers(recompute, largest)
        if recompute != FULL:
            return layers
        few = np.isin(layers, [1, largest // 4, largest // 2, largest])
        return layers[few] if few.any() else layers


def _subset_or_all(options: Mapping[str, Column], keep: NDArray[np.bool_]) -> dict[str, Column]:
    """The options under a mask; all where it leaves none."""
    return {name: column[keep] if keep.any() else column for name, column in options.items()}


def restricted_space(space: Space) -> RestrictedSpace:
    """The sketch of a space."""
    return RestrictedSpace(**space.declared)
