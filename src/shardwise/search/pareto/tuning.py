"""Tuned constants of the Pareto search, in one record.

The values are chosen by measurement, as a trade of time against the closeness of the answer. They change how
long a search takes and, where limits are exceeded, which epsilon it proves. The guarantee needs only that the
shares of the label tolerance add up to at most 1 and that no weight is negative.

`python -m benchmarks.graph_frontiers NAME` measures points, proven epsilon and CPU seconds of a
shipped graph, with `--epsilon 0` exactly. `python -m benchmarks.graph_growth chains` and `blocks` measure how
they grow with the graph. docs/benchmarks.md, section "Frontiers of operator graphs", has the results.

Code reads `tuning.TUNING.name`, so that replacing `TUNING` reaches all readers. Sizes that compiled loops
take as constants are in `labels_numba`, and bounds of rounding errors in `bound_sets`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuned constants. A share is a fraction of 1; epsilons are relative."""

    # Division of epsilon

    answer_share: float = 0.1
    """Share of epsilon spent on dropping points of the answer that others match; the search needs the rest to
    merge labels."""

    labels_share: float = 0.85
    """Share of the remaining epsilon spent on merging labels; the rest is spent on merging points of an
    enumeration. Labels take most of the time, so they get most."""

    resident_share: float = 0.75
    """Share of the memory tolerance of labels spent on resident_bytes, the rest on the peak: resident bytes
    add up over all segments, while only the largest peak counts."""

    # Division of the label tolerance along a chain: large tables, where labels are dense, get most

    parts_share: float = 0.05
    """Share of the label tolerance spent on elimination within segments, at least. Elimination gets more if
    the largest segment has more than this share of all variables."""

    segments_share: float = 0.05
    """Share of the label tolerance spent on the tables of segments, which are small."""

    runs_share: float = 0.05
    """Share of the label tolerance spent on runs of equal segments, which are joined only a few times."""

    extension_share: float = 0.3
    """Share of the label tolerance spent on extension along the chain, with the terminal join: its tables are
    the largest."""

    final_join_share: float = 0.2
    """Share of the tolerance of extension spent on the terminal join, which is a single join."""

    parts_excess_share: float = 0.25
    """Share of the label tolerance spent on elimination in proportion to the excess of a label. Labels far
    from the bound are then on a coarser grid."""

    segments_excess_share: float = 0.15
    """Share of the label tolerance spent on tables of segments in proportion to the excess of a label."""

    runs_excess_share: float = 0.15
    """Share of the label tolerance spent on runs of equal segments in proportion to the excess of a label."""

    tolerance_from_pairs: int = 8192
    """Pairs of labels of a join of elimination from which on it spends tolerance. Smaller joins leave it to
    the large tables at the end."""

    # Small chains, eliminated directly

    small_chain_costs: int = 1500
    """Most costs of all factors of a chain for which direct elimination is tried. It takes a tenth of a
    second, less than the two phases."""

    small_chain_pairs: int = 1 << 18
    """Most pairs of labels of all joins of a direct elimination; above, the two phases are faster."""

    small_chain_labels: int = 1 << 11
    """Most labels of a table in a direct elimination; above, the two phases are faster."""

    # Weighted sums

    first_scalarisation_rounds: int = 2
    """Rounds of weighted sums before presolve. Later rounds are cheaper, since choices are dropped."""

    scalarisation_rounds: int = 3
    """Most rounds of weighted sums after presolve, done twice. More rounds change almost no frontier and take
    longer."""

    slopes_at_once: int = 16
    """Most slopes of one round; the next round depends on the solutions that it finds."""

    weights_at_once: int = 16
    """Weights that one pass over a chain solves. One pass for several is cheaper than one each, but takes
    more memory."""

    share_steps: int = 3
    """Secant steps for the share of hidden_s in the weight of time: bounds need to be no closer than
    solutions are matched."""

    ascent_steps: int = 8
    """Steps of dual ascent of the peak multipliers for memory alone; half as many for other slopes, which
    start from those of the closest slope."""

    memory_ascent_steps: int = 16
    """Most weighted sums solved for a solution that reaches the bound of least memory; the first that
    does ends them."""

    tight_gap: float = 0.25
    """Gap between a bound and its solution at which dual ascent stops, in working epsilons: solutions are
    matched no closer."""

    # Presolve

    fixing_bounds: int = 5
    """Most bounds that reduced-cost fixing uses. Each costs a weighted sum of the chain."""

    dominant_segment_share: float = 0.5
    """Share of a chain's variables above which a segment is dominant, so that its modes become cases: bounds
    are then far below the solutions between two modes."""

    wide_separator_choices: int = 150_000
    """Choices of a separator above which a chain is wide: one label for each choice already exceeds
    `most_labels_with_tolerance`, so every enumeration fails."""

    # Gap enumeration

    first_extreme_step: float = 0.005
    """Relative distance of the first enumeration beyond the bound of one objective alone. An enumeration up
    to the incumbent at once may exceed the limits where the bound is low."""

    first_step: float = 0.5
    """Distance of the first enumeration beyond a bound, in working epsilons. A small one is cheap to
    repeat."""

    tightened_first_step: float = 2.0
    """Distance of the first enumeration beyond a tightened bound, in working epsilons: solutions are close to
    it."""

    exact_first_step: float = 1.0 / 16.0
    """Distance of the first enumeration with epsilon 0, as a share of the distance to the farthest open nadir
    point. A small one is cheap to repeat."""

    step_growth: float = 2.0
    """Growth of the distance from one enumeration at a bound to the next: the last one takes most of the
    time."""

    small_step_growth: float = 3.0
    """Growth of the distance after an enumeration of few labels, which costs little."""

    few_labels_stored: int = 1500
    """Labels below which an enumeration counts as one of few labels."""

    tightened_few_labels_stored: int = 500
    """Labels below which an enumeration after tightening counts as one of few labels: labels are dropped by
    completions, too."""

    nadir_margin: float = 1.15
    """Largest distance of an enumeration, as a multiple of the distance to the farthest open nadir point.
    Solutions found open other nadir points slightly farther away."""

    box_ratio: float = 10.0
    """Nadir points at most this many times as far beyond the bound as the limit of an enumeration are in its
    box: solutions found may close them."""

    most_multipliers: int = 4
    """Most multipliers under which labels are tested: each costs as much as the bound itself."""

    share_offsets: tuple[float, ...] = (-0.3, -0.15, -0.07, -0.03, 0.03, 0.07, 0.15, 0.3)
    """Differences to a bound's share of hidden_s that other multipliers have. A decision with a few large
    costs is bounded best by another share than the whole."""

    same_multiplier: float = 1e-3
    """Difference of shares of hidden_s, or of peak multipliers, below which multipliers count as equal: they
    would drop the same labels."""

    worthwhile_choices: float = 0.95
    """Labels are tested under other multipliers if these leave at most this share of the choices; otherwise
    they cost more than they save."""

    penalties: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
    """Multipliers of the weighted sum tried to prove which time is larger. All are solved in one pass."""

    # Limits of enumerations

    most_pairs_with_tolerance: int = 16_000_000
    """Most pairs of labels of one join with a tolerance; above, the search continues with a relaxed one."""

    most_labels_with_tolerance: int = 150_000
    """Most labels that a join with a tolerance leaves; above, the search continues with a relaxed one."""

    most_pairs_if_exact: int = 150_000_000
    """Most pairs of labels of one join without tolerance: exact results are worth more time."""

    most_labels_if_exact: int = 300_000
    """Most labels that a join without tolerance leaves: exact results are worth more memory."""

    labels_per_cell: int = 8
    """Labels per cell that a join may leave, if this allows more: large separators need a few for each
    choice."""

    most_completed_pairs: int = 64_000_000
    """Most pairs of labels of the terminal join if completions have dropped labels: few of the pairs stay."""

    failed_labels: int = 40_000
    """Labels that a failed enumeration counts as in the effort, so that a case ends after a few failures."""

    # Relaxation after an enumeration that exceeded its limits

    relax_factor: float = 8.0
    """Largest growth of the working epsilon: one large step instead of many failures."""

    least_relax_factor: float = 1.5
    """Least growth of the working epsilon for which it is relaxed at all: small steps would mean many
    failures."""

    relaxed_epsilon: float = 0.015
    """Largest working epsilon after relaxation; a larger one is of no use."""

    relaxed_epsilon_if_wide: float = 0.0075
    """Working epsilon at which a wide chain starts, since its enumerations fail. It is lower than
    `relaxed_epsilon`, since tightening alone may close the gaps."""

    # Bound tightening

    trial_bounds: int = 3
    """Bounds that are tightened on trial: they show whether others are worthwhile."""

    worthwhile_epsilons: float = 10.0
    """Rise of a trial bound, in requested epsilons, that makes further tightening worthwhile. A smaller gap
    is cheaper to enumerate."""

    worthwhile_gap: float = 0.01
    """Relative rise of a trial bound that makes further tightening worthwhile, with
    `worthwhile_gap_epsilons`. An enumeration that goes this far has many labels for any epsilon."""

    worthwhile_gap_epsilons: float = 2.0
    """Rise of a trial bound, in requested epsilons, that is needed in addition to `worthwhile_gap`: a smaller
    gap needs one enumeration."""

    tightening_rounds: int = 2
    """Rounds of weighted sums with tightening: each takes long."""

    most_failures: int = 2
    """Tightenings that exceed their limits after which a round ends: each takes long."""

    same_slope: float = 0.05
    """Relative difference of slopes below which only one of two bounds is tightened: the other adds
    nothing."""

    time_gap_share: float = 0.5
    """Part of a bound's distance to the incumbents by which its solution exceeds the mean of both times, if
    this mean causes the gap. Otherwise the peak does."""

    tightening_share: float = 0.125
    """Share of the label tolerance while tightening, with memory dualised. Few columns have few labels, so a
    small tolerance is affordable."""

    completion_share: float = 0.5
    """Share of the label tolerance for the labels of completions, which have few columns too."""

    most_bisections: int = 64
    """Most bisections of a branch and bound on the largest peak. Each solves weighted sums of both halves."""

    interval_width: float = 0.3
    """Width at which an interval of peaks is not bisected further, in working epsilons of memory: solutions
    are matched no closer."""

    least_interval_width: float = 1e-3
    """The same relative to memory, at least: with epsilon 0 bisection would not end."""

    target_gap: float = 0.25
    """Distance to the incumbents at which a bound is high enough, in working epsilons: solutions are matched
    no closer."""

    tie_share: float = 0.001
    """Share of the peak's weight spread evenly over all segments where the lower end of an interval is
    weighed: of equal solutions, one with smaller peaks is found."""

    # Recombination

    resolution: float = 10_000.0
    """Inverse of the relative step within which partial solutions are merged; it is divided by the number of
    segments. Finer steps would keep many of nearly equal cost."""

    most_options: int = 500
    """Most partial solutions at a time; above, the step grows, so that recombination stays
    cheap."""

    coarsening: float = 2.0
    """Growth of the step of recombination each time."""

    pool_epsilon: float = 0.001
    """Least epsilon of the search of the solution pool: incumbents at little cost."""

    pool_labels: int = 40_000
    """Most labels kept by the search of the solution pool: as many as a failed enumeration counts."""

    pool_choices_share: float = 0.5
    """Largest share of a chain's choices in the solution pool for which it is searched: a pool as large as
    the chain saves nothing."""


TUNING = Tuning()
"""The values that the search uses."""
