"""What jobs train: `TrainedModel` and `TrainedGraph`, with their data, initial values and weight files.

`TrainedNetwork` is what the training loop, checkpoints and `train` know of both.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.graph import OpGraph, graph_text, step_flop
from shardwise.inputs import parse_mapping
from shardwise.plans import Plan
from shardwise.runtime.data import SYNTHETIC, ArrayFolder, RandomInputs, Samples, Synthetic, TokenFile
from shardwise.runtime.graphs import check_computable, graph_value, meta_graph_module
from shardwise.runtime.initialization import initial_value
from shardwise.runtime.modules import reference_module
from shardwise.runtime.state_dict import ParameterValue
from shardwise.runtime.weights import (
    check_weight_names,
    graph_weights_in,
    save_graph_weights,
    save_weights,
    weights_in,
)


class TrainedNetwork(ABC):
    """The model or operator graph of `plan`.

    Progress is counted in `unit`, `per_step` of them in a step; rates are shown with `decimals`.
    """

    unit: ClassVar[str]
    decimals: ClassVar[int]

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    @abstractmethod
    def per_step(self) -> int:
        """Tokens, or samples of a graph, of a step."""

    @property
    @abstractmethod
    def peak_s(self) -> float:
        """Seconds of the model FLOPs of a step at the peak of all devices."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and a run that resumes from it must have in common, by names of the manifest."""

    @abstractmethod
    def check(self, *, has_weight_files: bool) -> None:
        """ConfigError if the runtime cannot compute the network, or read and write its weight files if these
        are needed."""

    @abstractmethod
    def samples(self, data: str, seed: int) -> Samples:
        """The batches of `data`: `synthetic`, or the path of a token file (for a graph, of a folder of
        arrays). ConfigError if it cannot be used."""

    @abstractmethod
    def module(self) -> nn.Module:
        """The whole network on the meta device."""

    @abstractmethod
    def values(self, *, seed: int, weights: str | None) -> ParameterValue:
        """The initial parameters: those in the folder `weights`, or by the seed. ConfigError if the folder
        cannot be read."""

    @abstractmethod
    def save(self, state: Mapping[str, Tensor], folder: str) -> None:
        """Write the whole parameters, by name, into `folder`."""


class TrainedModel(TrainedNetwork):
    """A model, which reads tokens. Its weights are read and written in the format of Hugging Face
    libraries."""

    unit, decimals = "tokens", 0

    @property
    def per_step(self) -> int:
        return self.plan.job.global_batch_size * self.plan.job.seq_len

    @property
    def peak_s(self) -> float:
        return (self.plan.best.mfu or 0.0) * self.plan.step_time_s

    @property
    def identity(self) -> dict[str, Any]:
        job = self.plan.job
        return {
            "model": model_hash(self.plan.model.config), "graph": None, "optimizer": job.optimizer,
            "global_batch_size": job.global_batch_size, "seq_len": job.seq_len,
        }  # fmt: skip

    def check(self, *, has_weight_files: bool) -> None:
        if has_weight_files:
            check_weight_names(self.plan.model)

    def samples(self, data: str, seed: int) -> Samples:
        job, vocab = self.plan.job, self.plan.model.vocab
        source = Synthetic if data == SYNTHETIC else partial(TokenFile, data)
        return source(vocab=vocab, global_batch_size=job.global_batch_size, seq_len=job.seq_len, seed=seed)

    def module(self) -> nn.Module:
        with torch.device("meta"):
            return reference_module(self.plan.model)

    def values(self, *, seed: int, weights: str | None) -> ParameterValue:
        if weights is not None:
            return weights_in(weights, self.plan.model)
        return partial(initial_value, seed=seed, layers=self.plan.model.layers)

    def save(self, state: Mapping[str, Tensor], folder: str) -> None:
        save_weights(self.plan.model, state, folder)


class TrainedGraph(TrainedNetwork):
    """An operator graph, which reads its inputs. Its weights are read and written by their names in it."""

    unit, decimals = "samples", 1

    @property
    def per_step(self) -> int:
        return self.plan.graph.batch

    @cached_property
    def peak_s(self) -> float:
        classes = self.plan.cluster.classes
        peak_flop_per_s = sum(
            classes[node.device_class].peak_flop_per_s[self.plan.job.dtype] * node.speed * node.devices
            for node in self.plan.cluster.nodes
        )
        return step_flop(self.plan.graph) / peak_flop_per_s

    @property
    def identity(self) -> dict[str, Any]:
        graph = self.plan.graph
        return {
            "model": None, "graph": graph_hash(graph), "optimizer": self.plan.job.optimizer,
            "global_batch_size": graph.batch, "seq_len": graph.seq_len,
        }  # fmt: skip

    def check(self, *, has_weight_files: bool) -> None:
        check_computable(self.plan.graph)

    def samples(self, data: str, seed: int) -> Samples:
        if data == SYNTHETIC:
            return RandomInputs(self.plan.graph, seed)
        return ArrayFolder(data, self.plan.graph, seed=seed)

    def module(self) -> nn.Module:
        return meta_graph_module(self.plan.graph)

    def values(self, *, seed: int, weights: str | None) -> ParameterValue:
        if weights is not None:
            return graph_weights_in(weights, self.plan.graph)
        return graph_value(self.plan.graph, seed=seed)

    def save(self, state: Mapping[str, Tensor], folder: str) -> None:
        save_graph_weights(state, folder)


def model_hash(config: Mapping[str, object]) -> str:
    """Hash of a model's config without its name."""
    body = {key: value for key, value in config.items() if key not in ("name", "_name_or_path")}
    return _hash(body)


def graph_hash(graph: OpGraph) -> str:
    """Hash of what a graph computes, independent of batch size, sequence length, name, costs and sharding
    limits."""
    document: Any = parse_mapping(graph_text(graph))
    for block in document["blocks"]:
        for operator in block["operators"]:
            for key in ("whole", "flop", "moved_bytes"):
                operator.pop(key, None)
    return _hash({key: document[key] for key in ("sizes", "inputs", "blocks")})


def _hash(body: Mapping[str, object]) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
