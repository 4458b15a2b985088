"""Problems of the planner as records of the independent checker, through the documents of a plan file."""

from __future__ import annotations

from dataclasses import asdict

from shardwise.cluster import Cluster, cluster_record
from shardwise.model import Model
from shardwise.plans.documents import plain_mapping
from shardwise.plans.resolved_layers import layers_document
from shardwise.strategy import Job
from shardwise_verify import problem
from shardwise_verify.problem import Figures
from shardwise_verify.reading import record
from shardwise_verify.records import ClusterRecord, JobRecord, LayersRecord


def layers_of(model: Model) -> LayersRecord:
    """The resolved layers of a model as a plan file has them."""
    return record(LayersRecord, plain_mapping(layers_document(model)))


def cluster_of(cluster: Cluster) -> ClusterRecord:
    """A cluster as a plan file has it."""
    return record(ClusterRecord, plain_mapping(cluster_record(cluster)))


def job_of(job: Job) -> JobRecord:
    """A job as a plan file has it."""
    return record(JobRecord, plain_mapping(asdict(job)))


def figures_of(model: Model, cluster: Cluster, job: Job) -> Figures:
    """The checker's figures of a problem."""
    return problem.figures_of(layers_of(model), cluster_of(cluster), job_of(job))
