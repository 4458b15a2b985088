"""What a question is about: `Request` (model, cluster, job) and `GraphRequest`, from arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise import search
from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import Training
from shardwise.errors import ConfigError
from shardwise.graph import GRAPH_FILES, GRAPH_PREFIX, GRAPH_SCHEMA, OpGraph, graph_names, load_graph, scaled
from shardwise.inputs import printable, read_mapping, short_repr
from shardwise.model import Model, catalogue_names, load_model, model_from_config
from shardwise.questions.arguments import choice, count, number, optional_text, text
from shardwise.search import MeshChoice
from shardwise.strategy import (
    NEWEST_MEGATRON_LM,
    OWN_PROFILE,
    PROFILES,
    Calibration,
    Job,
    Profile,
    Target,
    newest_target,
    read_calibration,
    software_names,
    software_of,
    target_of,
)

OWN_TARGET = "shardwise"
"""The target of our own runtime, `shardwise train`: the default on devices that it knows."""

OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")
DTYPES = ("fp32", "fp16", "bf16", "fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArguments:
    """The arguments about model, cluster and job, as given; None where one was left out."""

    model: object
    cluster: object
    seq_len: object = None
    global_batch_size: object
    dtype: object = None
    optimizer: object = "adamw"
    memory_margin: object = 0.05
    expert_imbalance: object = 1.1
    inter_node: object = None
    calibration: object = None
    software: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Model, cluster and job of a question.

    `own_profile` is the software profile of our own runtime, which the job has only where that runtime is the
    target. With `has_software` the software profile of the job was requested by name, or measured.
    """

    model: Model
    cluster: Cluster
    job: Job
    own_profile: Profile
    has_software: bool = False

    def for_target(self, target: Target) -> Request:
        """The same with the software profile of `target`, unless software was requested."""
        if target.name == OWN_TARGET:
            profile = self.own_profile
        else:
            profile = self.job.profile if self.has_software else target.own_profile
        return replace(self, job=replace(self.job, profile=profile))


def request_of(given: JobArguments) -> Request:
    """The request that the arguments describe. ConfigError with argument, file and key of the first error.

    Arguments that need no file are checked before any file is opened.
    """
    seq_len = None if given.seq_len is None else count("--seq-len", given.seq_len)
    batch = count("--global-batch-size", given.global_batch_size)
    margin, imbalance = _margin(given), _imbalance(given)
    dtype, optimizer = _dtype(given), _optimizer(given)
    software = _software(given)
    model = model_of(given.model)
    cluster, calibration = measured_cluster(given)
    job = search.default_job(
        model,
        cluster,
        seq_len=seq_len if seq_len is not None else model.max_seq_len or 4096,
        global_batch_size=batch,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=margin,
        expert_imbalance=imbalance,
    )
    own = target_of(OWN_TARGET)
    own_profile, requested = software or PROFILES[own.profile], software
    if calibration is not None and software is None:
        measured = calibration.profile_of(job.dtype, has_experts=model.experts is not None)
        own_profile, requested = measured or own_profile, measured_software(measured, cluster)
    own_profile = own.run_by(own_profile)
    is_own = own.knows_devices(cluster.classes)
    profile = own_profile if is_own else requested or NEWEST_MEGATRON_LM
    return Request(
        model=model,
        cluster=cluster,
        job=replace(job, profile=profile),
        own_profile=own_profile,
        has_software=requested is not None,
    )


def _software(given: JobArguments) -> Profile | None:
    name = optional_text("--software", given.software)
    if name is None:
        return None
    known = software_names()
    return software_of(choice("--software", name if name in known else newest_target(name), known))


def _margin(given: JobArguments) -> float:
    return number("--memory-margin", given.memory_margin, low=0.0, high=0.9)


def _imbalance(given: JobArguments) -> float:
    return number("--expert-imbalance", given.expert_imbalance, low=1.0, high=100.0)


def _dtype(given: JobArguments) -> str | None:
    return None if given.dtype is None else choice("--dtype", given.dtype, DTYPES)


def _optimizer(given: JobArguments) -> Any:
    return choice("--optimizer", given.optimizer, OPTIMIZERS)


def model_of(given: object) -> Model:
    """The model of an argument: a model, a text (`load_model`), a config as a mapping, or an object with
    `to_dict()`, as configs of Transformers have."""
    if isinstance(given, Model):
        return given
    if isinstance(given, str | os.PathLike):
        return load_model(text("MODEL", given))
    to_dict = getattr(given, "to_dict", None)
    config = to_dict() if callable(to_dict) and not isinstance(given, type) else given
    if not isinstance(config, Mapping):
        raise ConfigError(
            "is no model", key="MODEL", found=short_repr(given),
            allowed="a name, a path, an id of the Hugging Face Hub, a config as a dict or of Transformers",
        )  # fmt: skip
    try:
        return model_from_config(_plain_mapping(config))
    except ConfigError as error:
        raise error.within(key="model") from None


def _plain_mapping(config: Mapping[Any, Any]) -> dict[str, object]:
    """The config as a JSON file would have it: names are texts, and so is what JSON does not have."""
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def measured_cluster(given: JobArguments) -> tuple[Cluster, Calibration | None]:
    """The cluster of the arguments with devices as their calibration measured them, and that calibration.
    ConfigError where the calibration has none of the cluster's devices."""
    inter_node = optional_text("--inter-node", given.inter_node)
    path = optional_text("--calibration", given.calibration)
    calibration = None if path is None else read_calibration(path)
    if isinstance(given.cluster, Cluster):
        for option, value in (("--inter-node", inter_node), ("--calibration", path)):
            if value is not None:
                raise ConfigError(
                    "is for clusters that are named by a text", key=option, found=short_repr(value),
                    allowed="no such argument",
                )  # fmt: skip
        return given.cluster, None
    named = text("cluster", given.cluster)
    if calibration is None:
        return load_cluster(named, inter_node=inter_node), None
    cluster = load_cluster(named, inter_node=inter_node, measured=calibration.devices)
    own = cluster.classes.values()
    if calibration.devices and not any(
        device.name in calibration.devices or device.efficiency.measured_on for device in own
    ):
        raise ConfigError(
            "has no device of this cluster",
            key="--calibration",
            found=", ".join(calibration.devices),
            allowed=f"a calibration of {', '.join(cluster.classes)}, or none",
        )
    return cluster, calibration


def measured_software(profile: Profile | None, cluster: Cluster) -> Profile | None:
    """The software profile of a calibration where it applies to `cluster` by default: that of our own runtime
    on CPUs only, that of other software everywhere."""
    if profile is None or profile.name != OWN_PROFILE or target_of(OWN_TARGET).knows_devices(cluster.classes):
        return profile
    return None


# Operator graphs


def is_graph(given: object) -> bool:
    """Whether a model is an operator graph: a graph, a shipped one, or a file with blocks or the schema of
    graphs."""
    if isinstance(given, OpGraph):
        return True
    if not isinstance(given, str | os.PathLike):
        return False
    named = text("MODEL", given)
    if named.casefold().startswith(GRAPH_PREFIX):
        return True
    if not named.lower().endswith(GRAPH_FILES):
        return False
    try:
        document = read_mapping(named)
        return "blocks" in document or document.get("schema") == GRAPH_SCHEMA
    except ConfigError:
        return False  # the reader of models reports the error


def refuse_bare_graph(given: object) -> None:
    """ConfigError where the model is the name of a shipped graph without its prefix, and not a model."""
    if not isinstance(given, str):
        return
    name = given.casefold()
    if name in graph_names() and name not in catalogue_names() and not os.path.exists(given):
        raise ConfigError(
            f"is not a known model (did you mean {GRAPH_PREFIX}{name}?)", key="MODEL", found=printable(given),
            allowed=f"a model, or a graph as {GRAPH_PREFIX}NAME",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRequest:
    """A graph at the requested batch, a cluster, and the training options."""

    graph: OpGraph
    cluster: Cluster
    training: Training
    memory_margin: float
    meshes: MeshChoice


def graph_request_of(given: JobArguments, meshes: str) -> GraphRequest:
    """The request that the arguments describe. ConfigError with the first error."""
    batch = count("--global-batch-size", given.global_batch_size)
    seq_len = None if given.seq_len is None else count("--seq-len", given.seq_len)
    margin, _ = _margin(given), _imbalance(given)
    optimizer, dtype = _optimizer(given), _dtype(given)
    whole = given.model if isinstance(given.model, OpGraph) else load_graph(text("MODEL", given.model))
    graph = _scaled(whole, batch, seq_len)
    cluster, calibration = measured_cluster(given)
    training = Training(dtype=dtype or search.best_dtype(cluster), optimizer=optimizer)
    software = _software(given)
    if software is None and calibration is not None:
        software = measured_software(calibration.profile_without_data_overlap, cluster)
    if software is not None:
        training = replace(training, profile=software)
    return GraphRequest(
        graph=graph,
        cluster=cluster,
        training=training,
        memory_margin=margin,
        meshes=MeshChoice(meshes),
    )


def _scaled(graph: OpGraph, batch: int, seq_len: int | None) -> OpGraph:
    """`graph` at the batch and sequence length of the arguments."""
    if seq_len is not None and graph.seq_len is None:
        raise ConfigError(
            f"does not apply: graph {short_repr(graph.name)} has no sequence dimension",
            key="--seq-len", found=str(seq_len), allowed="no such option",
        )  # fmt: skip
    try:
        return scaled(graph, batch, seq_len)
    except ConfigError as error:
        raise ConfigError(
            error.message, key="--global-batch-size", found=error.found, allowed=error.allowed
        ) from None
