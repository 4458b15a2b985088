"""Pareto search: all non-dominated pairs of step time and memory of a chain of segments, exact or up to an
epsilon.

The basic method is FT, frontier tracking (Cai et al. 2020, arXiv 2004.10856). docs/concepts/pareto-search.md
describes the method and its guarantee.
"""

from shardwise.search.pareto.compilation import reporting_compilation, require_numba
from shardwise.search.pareto.two_phase import ParetoSearchResult, pareto_search

__all__ = ["ParetoSearchResult", "pareto_search", "reporting_compilation", "require_numba"]
