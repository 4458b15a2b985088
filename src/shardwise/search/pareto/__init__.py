"""Frontier tracking: all non-dominated solutions of a chain of choices, exact or up to an epsilon.

(FT: Cai et al. 2020, arXiv 2004.10856; docs/concepts/pareto-search.md.)
"""

from shardwise.search.pareto.two_phase import ParetoSearchResult, pareto_search

__all__ = ["ParetoSearchResult", "pareto_search"]
