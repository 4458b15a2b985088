"""Costs of one pipeline of a strategy on nodes in one state, estimated once and cached (`Prices`)."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster, NodeState, Pool, pools_of, uniform_cluster
from shardwise.cost import Problem, bind, hop_s, stage_kinds_of
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.replanning.arrangement import microbatch_unit
from shardwise.search import PipelineFigures, pipeline_figures, spare_microbatches
from shardwise.strategy import RULES, Job, Strategy, StrategyTable, first_broken


class Prices:
    """Estimated costs of strategies for one model, cluster and job, on nodes in any state.

    Raises ConfigError for a model with frozen weights: a move would have to keep what is trained apart from
    what is not.
    """

    def __init__(self, model: Model, cluster: Cluster, job: Job) -> None:
        if model.is_partly_frozen:
            key, found = ("freeze", "+".join(model.frozen)) if model.frozen else ("lora", "adapters")
            raise ConfigError(
                "is not supported after events and for traces of them", key=f"model.config.{key}",
                found=found, allowed="a model of which all weights are trained",
            )  # fmt: skip
        self.model, self.cluster, self.job = model, cluster, job
        self.pools: tuple[Pool, ...] = pools_of(cluster)
        self._known: dict[tuple[Strategy, int, NodeState], PipelineFigures | None] = {}

    @property
    def node_bytes_per_s(self) -> tuple[float, ...]:
        """Largest bandwidth of a node of each pool to other nodes, in bytes/s."""
        return tuple(pool.node.nics * pool.node.nic_bytes_per_s for pool in self.pools)

    def devices_of(self, node: str) -> int:
        """Number of devices of a node of the cluster."""
        return self.cluster.nodes[int(node[1:])].devices

    def microbatches(self, strategy: Strategy) -> int:
        """Micro-batches of a step over all pipelines; 0 if the batch is not a multiple of the micro-batch
        size."""
        whole, rest = divmod(self.job.global_batch_size, strategy.micro_batch_size)
        return 0 if rest else whole

    def across_s(self, strategy: Strategy, state: NodeState) -> float:
        """Seconds to send a micro-batch to the next stage in another pipeline, over the outermost tier of
        nodes in this state."""
        kinds = stage_kinds_of(self._problem(strategy, state), [(strategy.tp, 1)], strategy.micro_batch_size)
        return float(hop_s(kinds)[0])

    def extra_in_flight(self, strategy: Strategy, state: NodeState) -> tuple[int, ...]:
        """For each stage, how many more micro-batches fit than its schedule has in flight."""
        return spare_microbatches(self._problem(strategy, state), strategy)

    def figures(self, strategy: Strategy, state: NodeState) -> PipelineFigures | None:
        """The figures of a pipeline of the strategy if all of its nodes are in this state; None if it is
        illegal or does not fit."""
        per_node = self.pools[state.pool].node.devices
        ranks = strategy.tp * strategy.cp * strategy.pp * strategy.dp
        key = strategy, ranks, state
        if key not in self._known:
            self._known[key] = None if ranks % per_node else self._computed(strategy, state)
        return self._known[key]

    def _problem(self, strategy: Strategy, state: NodeState) -> Problem:
        """A problem in which all pipelines have as many micro-batches as the busiest one. Durations do not
        depend on it."""
        nodes = strategy.tp * strategy.cp * strategy.pp * strategy.dp
        nodes //= self.pools[state.pool].node.devices
        unit, least = microbatch_unit(strategy)
        each = -(-self.microbatches(strategy) // strategy.dp)
        each = max(-(-each // unit) * unit, least)
        job = replace(self.job, global_batch_size=strategy.dp * strategy.micro_batch_size * each)
        return bind(self.model, uniform_cluster(self.cluster, self.pools[state.pool], nodes, state), job)

    def _computed(self, strategy: Strategy, state: NodeState) -> PipelineFigures | None:
        problem = self._problem(strategy, state)
        table = StrategyTable.of([strategy])
        if int(first_broken(table, problem.limits, RULES)[0]) >= 0:
            return None
        figures = pipeline_figures(problem, table)[0]
        if figures.device_bytes > problem.usable_bytes or figures.host_bytes > problem.host_bytes_per_device:
            return None
        return figures
