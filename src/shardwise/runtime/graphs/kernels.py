"""What each kind of operator computes on a rank."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.runtime.graphs.kernels_attention import ATTENTION
from shardwise.runtime.graphs.kernels_losses import LOSSES
from shardwise.runtime.graphs.kernels_normal import NORMALIZATIONS
from shardwise.runtime.graphs.kernels_pointwise import POINTWISE
from shardwise.runtime.graphs.kernels_products import PRODUCTS
from shardwise.runtime.graphs.kernels_recurrent import RECURRENT
from shardwise.runtime.graphs.kernels_windows import WINDOWS
from shardwise.runtime.graphs.work import Kernel

KERNELS: Mapping[str, Kernel] = {
    **PRODUCTS,
    **WINDOWS,
    **RECURRENT,
    **POINTWISE,
    **NORMALIZATIONS,
    **ATTENTION,
    **LOSSES,
}
"""By kind."""
