"""The job that `parallelize` has built, as the class that its plan is for."""

from __future__ import annotations

from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.uniform import UniformTrainingJob


def uniform(job: object) -> UniformTrainingJob:
    assert isinstance(job, UniformTrainingJob)
    return job


def uneven(job: object) -> UnevenTrainingJob:
    assert isinstance(job, UnevenTrainingJob)
    return job


def of_graph(job: object) -> GraphTrainingJob:
    assert isinstance(job, GraphTrainingJob)
    return job
