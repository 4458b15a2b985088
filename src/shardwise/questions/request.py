"""What a question is about: `Request` (model, cluster, job) and `GraphRequest`, from arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise import search
from shardwise.cluster import Cluster, at_price, load_cluster
from shardwise.cost import Training, dtype_spelled
from shardwise.errors import ConfigError
from shardwise.graph import GRAPH_FILES, GRAPH_PREFIX, GRAPH_SCHEMA, OpGraph, graph_names, load_graph, scaled
from shardwise.inputs import read_mapping, short_repr, unknown
from shardwise.model import (
    FREEZE_KEY,
    IMAGES_KEY,
    LORA_KEY,
    Images,
    Lora,
    Model,
    catalogue_names,
    frozen_names,
    images_from_config,
    images_of_text,
    load_model,
    lora_from_config,
    lora_of_text,
    model_from_config,
    offloading_modules,
    parameters,
    with_frozen,
    with_images,
    with_lora,
)
from shardwise.questions.arguments import choice, count, number, optional_text, options_of_software, text
from shardwise.search import MeshChoice
from shardwise.strategy import (
    CALIBRATED_FIELDS,
    NEWEST_MEGATRON_LM,
    OWN_PROFILE,
    PROFILES,
    Calibration,
    Job,
    Profile,
    Target,
    TimeFactors,
    kind_of_profile,
    newest_target,
    option_values,
    read_calibration,
    software_names,
    software_of,
    target_names,
    target_of,
    target_of_options,
)

OWN_TARGET = "shardwise"
"""The target of our own runtime, `shardwise train`: the default on devices that it knows."""

OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4")


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
    mean_sample_len: object = None
    inter_node: object = None
    calibration: object = None
    software: object = None
    attention: object = None
    set: object = None
    price: object = None
    lora: object = None
    images: object = None
    freeze: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Model, cluster and job of a question.

    `own_profile` is the software profile of our own runtime, which the job has only where that runtime is the
    target. With `has_software` the software profile of the job was requested by name, or measured under a
    name of its own. `measured` is known software with measured numbers. `options` are the requested options
    of the software; the job has their effects.
    """

    model: Model
    cluster: Cluster
    job: Job
    own_profile: Profile
    has_software: bool = False
    measured: Profile | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def for_target(self, target: Target) -> Request:
        """The same with the software profile of `target`, unless software was requested, and with the
        requested options. Raises ConfigError for an option that the target does not have."""
        if target.name == OWN_TARGET:
            profile = self.own_profile
        else:
            own = with_measured(target.profile_for(self.job, self.cluster.vendors.values()), self.measured)
            profile = self.job.profile if self.has_software else own
        return self.with_options(target, profile)

    def for_any_target(self) -> Request:
        """The same with options as plans without a target have them: those of the newest Megatron-LM at their
        defaults, and the requested ones. Requested software stays as it is, and that of our own runtime on
        devices that it knows."""
        if self.has_software or target_of(OWN_TARGET).knows_devices(self.cluster.classes):
            return self
        target, vendors = target_of_options(None), self.cluster.vendors.values()
        profile = target.with_options(self.job.profile, target.default_options(self.job, vendors))
        return self.with_options(target, profile)

    def open_options(self, target: Target | None) -> tuple[str, ...]:
        """Options of `target` (None: any) whose values a search compares: those that are not requested,
        unless software was."""
        if self.has_software:
            return ()
        searched = (target or target_of_options(None)).searched_options
        return tuple(name for name in searched if name not in self.options)

    def with_options(self, target: Target, profile: Profile) -> Request:
        """The same with this profile, in which the requested options of `target` are set."""
        require_options(target, self.options, self.job, self.cluster)
        _require_moving(self.options.get(MOVED, "none"), self.model, self.cluster)
        profile = target.with_options(profile, self.options)
        if any(value.within_node for value in target.values_of(self.options).values()):
            profile = replace(profile, linked_devices=_linked_devices(self.cluster))
        return replace(self, job=replace(self.job, profile=profile))


def request_of(given: JobArguments, target: object = None) -> Request:
    """The request that the arguments describe, with options of `target`, where one is named. ConfigError with
    argument, file and key of the first error.

    Arguments that need no file are checked before any file is opened.
    """
    seq_len = None if given.seq_len is None else count("--seq-len", given.seq_len)
    batch = count("--global-batch-size", given.global_batch_size)
    margin, imbalance = _margin(given), _imbalance(given)
    sample = None if given.mean_sample_len is None else count("--mean-sample-len", given.mean_sample_len)
    dtype, optimizer = _dtype(given), _optimizer(given)
    software = software_profile(given.software)
    options = _software_options(given)
    model = adapted_model(given)
    cluster, calibration = measured_cluster(given)
    length = seq_len if seq_len is not None else model.max_seq_len or 4096
    if model.image_tokens > length:
        raise ConfigError(
            "become more tokens than a sequence has", key=IMAGES, found=f"{model.image_tokens:,} tokens",
            allowed=f"up to {length:,}: fewer images, smaller ones, or a longer --seq-len",
        )  # fmt: skip
    if sample is not None:
        count("--mean-sample-len", sample, high=length)
    job = search.default_job(
        model,
        cluster,
        seq_len=length,
        global_batch_size=batch,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=margin,
        expert_imbalance=imbalance,
        mean_sample_len=sample,
    )
    cluster, calibration = _of_workload(cluster, calibration, model, job.dtype)
    own = target_of(OWN_TARGET)
    own_profile, requested = software or PROFILES[own.profile], software
    if calibration is not None and software is None:
        measured = calibration.profile_of(job.dtype, has_experts=model.experts is not None)
        own_profile, requested = measured or own_profile, measured_software(measured, cluster)
    own_profile = own.run_by(own_profile)
    is_own = own.knows_devices(cluster.classes)
    profile = own_profile if is_own else requested or NEWEST_MEGATRON_LM
    is_known = software is None and requested is not None and requested.name in PROFILES
    request = Request(
        model=model,
        cluster=cluster,
        job=job,
        own_profile=own_profile,
        has_software=requested is not None and not is_known,
        measured=requested if is_known else None,
        options=options,
    )
    named = newest_target(target) if isinstance(target, str) else None
    return request.with_options(target_of_options(named if named in target_names() else None), profile)


def _of_workload(
    cluster: Cluster, calibration: Calibration | None, model: Model, dtype: str
) -> tuple[Cluster, Calibration | None]:
    """Calibrated devices and software with the factor of this model and number format, where steps of it were
    measured."""
    factor = 1.0 if calibration is None else calibration.time_factor(parameters(model), dtype)
    if calibration is None or factor == 1.0:
        return cluster, calibration
    factors = TimeFactors(kernels=factor, node_links=factor, network=factor, host=factor)
    classes = {
        name: factors.of_device(device) if device.name in calibration.devices else device
        for name, device in cluster.classes.items()
    }
    profile = None if calibration.profile is None else factors.of_software(calibration.profile)
    return replace(cluster, classes=classes), replace(calibration, profile=profile)


def _software_options(given: JobArguments) -> dict[str, str]:
    """The requested options of the software. ConfigError where two arguments contradict each other."""
    found = options_of_software("--set", given.set)
    if given.attention is None:
        return found
    kernel = choice("--attention", given.attention, option_values()["attention"])
    if found.get("attention", kernel) != kernel:
        raise ConfigError(
            "contradicts --set.attention", key="--attention", found=kernel,
            allowed=f"{found['attention']}, or only one of both",
        )  # fmt: skip
    return {**found, "attention": kernel}


def _linked_devices(cluster: Cluster) -> int:
    """Devices that are linked without a network; 0 where the cluster gives its links one by one."""
    spans = [tier.span for tier in cluster.tiers if not tier.is_network]
    return max(spans, default=1) if cluster.tiers else 0


def require_options(target: Target, options: Mapping[str, str], job: Job, cluster: Cluster) -> None:
    """ConfigError for an option that the target does not have at this value, or not for such a job and
    cluster."""
    for name, value in options.items():
        key, own = f"--set.{name}", target.options.get(name, {}).get(value)
        if own is None:
            others = [one for one in target_names() if value in target_of(one).options.get(name, ())]
            raise ConfigError(
                f"is no option of {target.command}", key=key, found=f"{name}={value}",
                allowed=f"targets that have it: {', '.join(others)}, or any",
            )  # fmt: skip
        for with_what, found, allowed in own.unsupported(job, cluster.vendors.values()):
            raise ConfigError(
                f"cannot be combined with --set {name}={value}", key=with_what, found=found,
                allowed=", ".join(allowed),
            )  # fmt: skip


MOVED = "offload_modules"


def _require_moving(modules: str, model: Model, cluster: Cluster) -> None:
    """ConfigError for a module that moves no tensor of the model to the host, and for clusters of several
    classes of devices, whose uneven plans move none."""
    if modules != "none" and len(cluster.classes) > 1:
        raise ConfigError(
            f"cannot be combined with --set {MOVED}={modules}", key="cluster",
            found=", ".join(cluster.classes), allowed="devices of one class",
        )  # fmt: skip
    known = offloading_modules(kind.operators for kind in model.kinds)
    for name in () if modules == "none" else modules.split("+"):
        if name not in known:
            raise unknown(
                "moves nothing of this model", name, known, key=f"--set.{MOVED}", allowed="+".join(known)
            )


def software_profile(given: object) -> Profile | None:
    """The software profile with this name; None where none was given."""
    name = optional_text("--software", given)
    if name is None:
        return None
    known = software_names()
    return software_of(choice("--software", name if name in known else newest_target(name), known))


def _margin(given: JobArguments) -> float:
    return number("--memory-margin", given.memory_margin, low=0.0, high=0.9)


def _imbalance(given: JobArguments) -> float:
    return number("--expert-imbalance", given.expert_imbalance, low=1.0, high=100.0)


def _dtype(given: JobArguments) -> str | None:
    dtype = dtype_spelled(given.dtype) if isinstance(given.dtype, str) else given.dtype
    return None if dtype is None else choice("--dtype", dtype, DTYPES)


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


def adapted_model(given: JobArguments) -> Model:
    """The model of the arguments, with the images, the frozen parts and the adapters that they name."""
    adapters = None if given.lora is None else lora_of(given.lora)
    images = None if given.images is None else images_of(given.images)
    parts = None if given.freeze is None else parts_of(given.freeze)
    if adapters is not None and parts is not None:
        raise ConfigError(
            "cannot be combined with adapters, which freeze all weights of the model", key=FREEZE,
            found="+".join(parts), allowed=f"{FREEZE} or {LORA}",
        )  # fmt: skip
    model = model_of(given.model)
    try:
        model = model if images is None else with_images(model, images)
        model = model if parts is None else with_frozen(model, parts)
    except ConfigError as error:
        raise _named(error, {IMAGES_KEY: IMAGES, FREEZE_KEY: FREEZE}) from None
    if adapters is None:
        return model
    try:
        return with_lora(model, adapters)
    except ConfigError as error:
        raise _of_lora(error) from None


def lora_of(given: object) -> Lora:
    """The adapters of an argument: a rank, a text (`r=16,targets=q_proj+v_proj`), the path of an
    adapter_config.json or of its folder, a mapping of its keys, or a config of PEFT (with `to_dict()`)."""
    to_dict = getattr(given, "to_dict", None)
    config = to_dict() if callable(to_dict) and not isinstance(given, type) else given
    try:
        if isinstance(config, Lora):
            return config
        if isinstance(config, Mapping):
            return lora_from_config(config)
        if isinstance(config, int) and not isinstance(config, bool):
            return lora_from_config({"r": config})
        named = text(LORA, config)
        if not named.lower().endswith(".json") and not os.path.isdir(named):
            return lora_of_text(named)
        path = os.path.join(named, "adapter_config.json") if os.path.isdir(named) else named
        return _lora_of_file(path)
    except ConfigError as error:
        raise _of_lora(error) from None


def _lora_of_file(path: str) -> Lora:
    """The adapters of an adapter_config.json."""
    config = read_mapping(path)
    try:
        return lora_from_config(config)
    except ConfigError as error:
        raise error.within(file=path) from None


LORA, IMAGES, FREEZE = "--lora", "--images", "--freeze"


def images_of(given: object) -> Images | None:
    """The images of an argument: a number, a text (`2@1024x768`), a mapping with `count`, `height` and
    `width`; None for none."""
    try:
        if isinstance(given, str):
            return None if given.strip() == "0" else images_of_text(given)
        return None if given == 0 and not isinstance(given, bool) else images_from_config(given)
    except ConfigError as error:
        raise _named(error, {IMAGES_KEY: IMAGES}) from None


def parts_of(given: object) -> tuple[str, ...]:
    """The frozen parts of an argument: names in a list, or in a text (`vision+projector`)."""
    try:
        return frozen_names(given)
    except ConfigError as error:
        raise _named(error, {FREEZE_KEY: FREEZE}) from None


def _named(error: ConfigError, options: Mapping[str, str]) -> ConfigError:
    """The error with the name of an option in the place of its key."""
    first, dot, rest = (error.key or "").partition(".")
    if first not in options or error.file is not None:
        return error
    key = f"{options[first]}{dot}{rest}"
    return ConfigError(error.message, key=key, found=error.found, allowed=error.allowed)


def _of_lora(error: ConfigError) -> ConfigError:
    """The error with the option's name before its key."""
    key = (error.key or LORA_KEY).removeprefix(f"{LORA_KEY}.")
    if key.startswith(LORA) or error.file is not None:
        return error
    named = LORA if key == LORA_KEY else f"{LORA}.{key}"
    return ConfigError(error.message, key=named, found=error.found, allowed=error.allowed)


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
    """The cluster of the arguments with devices as their calibration measured them, at the price of the
    arguments, and that calibration. ConfigError where the calibration has none of the cluster's devices."""
    cluster, calibration = _measured_cluster(given)
    if given.price is None:
        return cluster, calibration
    price = given.price
    if not isinstance(price, str):
        price = number("--price", price, low=0.0, high=1e6)
    return at_price(cluster, price), calibration


def _measured_cluster(given: JobArguments) -> tuple[Cluster, Calibration | None]:
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


def with_measured(profile: Profile, measured: Profile | None) -> Profile:
    """The software of a target with measured numbers: all of them where the same software was measured, its
    passes and host times where it is of the same kind."""
    if measured is None or kind_of_profile(measured.name) != kind_of_profile(profile.name):
        return profile
    if measured.name != profile.name:
        return profile.with_costs(measured)
    known = PROFILES[measured.name]
    numbers: dict[str, Any] = {
        name: getattr(measured, name)
        for name in CALIBRATED_FIELDS
        if getattr(measured, name) != getattr(known, name)
    }
    return replace(profile, **numbers, provenance=measured.provenance)


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
        allowed = f"a model, or a graph as {GRAPH_PREFIX}NAME"
        raise unknown(
            "is not a known model", given, (), key="MODEL", guess=GRAPH_PREFIX + name, allowed=allowed
        )


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
    of_models = (
        (LORA, given.lora), (IMAGES, given.images), (FREEZE, given.freeze),
        ("--mean-sample-len", given.mean_sample_len),
    )  # fmt: skip
    for key, value in of_models:
        if value is not None:
            raise ConfigError(
                "is for models, not for operator graphs", key=key, found=short_repr(value),
                allowed="no such argument",
            )  # fmt: skip
    if options := _software_options(given):
        key = "--set" if given.set else "--attention"
        raise ConfigError("is for models", key=key, found=", ".join(options), allowed="no such argument")
    whole = given.model if isinstance(given.model, OpGraph) else load_graph(text("MODEL", given.model))
    graph = _scaled(whole, batch, seq_len)
    cluster, calibration = measured_cluster(given)
    training = Training(dtype=dtype or search.best_dtype(cluster), optimizer=optimizer)
    software = software_profile(given.software)
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
