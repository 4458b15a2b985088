"""One layout of an operator graph, priced from its names alone.

Plain scalar code written from docs/tracking.md, to hold prices of all layouts at once against: it shares the
equations, the records and what kinds of operators say with `cost.layouts`, and no code.
"""

from shardwise.cost.one_layout.ledger import Charge
from shardwise.cost.one_layout.pipeline import PipelinePrice, price_pipeline
from shardwise.cost.one_layout.price import LayoutPrice, price_layout, price_stage

__all__ = ["Charge", "LayoutPrice", "PipelinePrice", "price_layout", "price_pipeline", "price_stage"]
