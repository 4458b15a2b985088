"""What each kind of operator computes on a rank."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.runtime.graphs.kernels_losses import LOSSES
from shardwise.runtime.graphs.kernels_pointwise import POINTWISE
from shardwise.runtime.graphs.kernels_products import PRODUCTS
from shardwise.runtime.graphs.work import Kernel

KERNELS: Mapping[str, Kernel] = {**PRODUCTS, **POINTWISE, **LOSSES}
"""By kind."""
