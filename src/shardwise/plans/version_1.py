"""Plan files of version 1: three schemas, for uniform strategies, uneven plans and operator graphs.

`from_version_1` turns each into a document of version 2. What version 1 did not record has the value of a
question that does not mention it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.cluster import Cluster, cluster_from_record
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, short_repr
from shardwise.model import model_from_config
from shardwise.plans.documents import SCHEMA, VERSION, plain_mapping
from shardwise.plans.record import as_ranges, idle_in, rank_numbers
from shardwise.plans.resolved_layers import layers_document
from shardwise.strategy import ANY, profile_from_record

UNEVEN_PLAN_SCHEMA = "shardwise.uneven-plan"
GRAPH_PLAN_SCHEMA = "shardwise.graph-plan"
SCHEMAS_OF_VERSION_1 = (UNEVEN_PLAN_SCHEMA, GRAPH_PLAN_SCHEMA)

NO_IDLE: Mapping[str, object] = {"devices": 0, "nodes": 0, "ranks": ""}

Document = dict[str, Any]


def from_version_1(document: Mapping[str, object], path: str) -> Document:
    """The plan of a version 1 document, whose hash was checked, as a document of version 2. Raises
    ConfigError where keys that it needs are missing or have other types."""
    fields = Fields(document, file=path)
    upgrades = {UNEVEN_PLAN_SCHEMA: _uneven, GRAPH_PLAN_SCHEMA: _graph}
    upgraded = upgrades.get(str(document["schema"]), _uniform)(fields)
    rest = {key: value for key, value in document.items() if key not in (*upgraded, *_REMOVED)}
    return plain_mapping({**rest, **upgraded, "schema": SCHEMA, "version": VERSION})


_REMOVED = ("objective", "compared", "mesh", "layout", "step_time_s", "device_bytes", "at_once_bytes",
            "breakdown", "memory")  # fmt: skip
"""Keys of version 1 that are elsewhere in version 2, or named otherwise."""


def _uniform(fields: Fields) -> Document:
    best = _mapping(fields, "best")
    strategy, layout = Fields(best, file=fields.file, key="best").mapping("strategy"), _layout(fields, best)
    batch = fields.mapping("job").integer("global_batch_size", low=1)
    microbatches = fields.mapping("schedule").integer("microbatches", low=1)
    added = {"cp": strategy.any("cp"), "recompute": strategy.any("recompute")}
    stages = [{**stage, **added} for pipeline in layout for stage in pipeline]
    certificate = fields.mapping("certificate")
    # The certificate of a plan for a trace is about this strategy alone: its question was not recorded.
    is_question = not fields.has("for_trace")
    return {
        **_model(fields),
        "target": fields.any("target", default=None) or ANY,
        "question": _question(
            objective=fields.any("objective"),
            space=certificate.any("space"),
            fixed=certificate.any("fixed", default={}) if is_question else {},
            axes=certificate.any("axes", default={}) if is_question else {},
            events=_events(fields),
        ),
        "idle": NO_IDLE,
        "best": {
            **best,
            "layout": {
                "schedule": strategy.any("schedule"),
                "pipelines": [
                    {
                        "micro_batch_size": strategy.any("micro_batch_size"),
                        "microbatches": microbatches,
                        "rows": batch,
                        "makespan_s": best.get("step_time_s"),
                        "stages": stages,
                    }
                ],
            },
        },
    }


_IN_LAYOUT = ("micro_batch_size", "microbatches", "pipeline_s", "recompute", "schedule", "tightest_rank",
              "idle_devices")  # fmt: skip
"""Keys of the best uneven plan of version 1 that are in its layout or its memory in version 2."""


def _uneven(fields: Fields) -> Document:
    best = _mapping(fields, "best")
    part = Fields(best, file=fields.file, key="best")
    layout = _layout(fields, best)
    size = part.integer("micro_batch_size", low=1)
    counts, times = (
        part.sequence(name, low=len(layout), high=len(layout)) for name in ("microbatches", "pipeline_s")
    )
    ways = part.sequence("recompute", low=len(layout), high=len(layout))
    pipelines = []
    for stages, count, time_s, recompute in zip(layout, counts, times, ways, strict=True):
        if not isinstance(count, int) or not isinstance(recompute, list) or len(recompute) != len(stages):
            raise part.error(
                "microbatches" if not isinstance(count, int) else "recompute",
                "does not go with the pipelines", found=short_repr(count), allowed="one for each",
            )  # fmt: skip
        pipelines.append(
            {
                "micro_batch_size": size,
                "microbatches": count,
                "rows": count * size,
                "makespan_s": time_s,
                "stages": [
                    {**stage, "cp": 1, "recompute": one} for stage, one in zip(stages, recompute, strict=True)
                ],
            }
        )
    peak = part.mapping("peak_memory_bytes")
    allocated, reserved, device = (peak.number(name) for name in ("allocated", "reserved", "device"))
    compared = fields.mapping("compared")
    names = ("uniform_step_time_s", "fastest_class_step_time_s", "fastest_class")
    return {
        **_model(fields),
        "target": fields.any("target", default=None) or ANY,
        "question": _question(events=_events(fields)),
        "idle": _idle(fields, layout),
        "mixed": {
            **{name: compared.any(name, default=None) for name in names},
            "idle": [],
            "why_uniform": None,
            "uneven_gap": 0.0,
        },
        "best": {
            **{key: value for key, value in best.items() if key not in _IN_LAYOUT},
            "strategy": None,
            "layout": {"schedule": part.any("schedule"), "pipelines": pipelines},
            "memory": {
                "allocated": allocated,
                "fragmentation": reserved - allocated,
                "context_and_communicators": device - reserved,
                "tightest_rank": part.integer("tightest_rank"),
            },
        },
    }


def _graph(fields: Fields) -> Document:
    cluster = _cluster(fields)
    layout, graph = _mapping(fields, "layout"), fields.mapping("graph")
    part = Fields(layout, file=fields.file, key="layout")
    records = (
        [dict(layout)]
        if "stages" not in layout
        else [dict(_any(one)) for one in part.sequence("stages", low=2)]
    )
    per_stage = cluster.devices // len(records)
    microbatches = part.integer("microbatches", low=1) if "stages" in layout else 1
    batch, device_bytes = graph.integer("batch", low=1), fields.number("device_bytes")
    classes = [node.device_class for node in cluster.nodes for _ in range(node.devices)]
    time_s = fields.number("step_time_s")
    stages = []
    for place, record in enumerate(records):
        ranks = range(place * per_stage, (place + 1) * per_stage)
        blocks = _blocks(record)
        stages.append(
            {
                "devices": per_stage,
                "ranks": as_ranges(list(ranks)),
                "device_class": " + ".join(dict.fromkeys(classes[rank] for rank in ranks)),
                "tp": 1,
                "cp": 1,
                "dp": 1,
                "layers": blocks,
                "chunks": [blocks],
                "share": 1.0,
                "recompute": "none",
                "operators": record,
            }
        )
    job = dict(_mapping(fields, "job"))
    seq_len = graph.any("seq_len", default=None)
    return {
        "target": ANY,
        "question": _question(epsilon=fields.any("epsilon")),
        "idle": fields.any("idle", default=None) or NO_IDLE,
        "job": {
            **job,
            "seq_len": 1 if seq_len is None else seq_len,
            "global_batch_size": batch,
            "expert_imbalance": 1.1,
            "seed": 0,
        },
        "best": {
            "strategy": None,
            "layout": {
                "schedule": part.any("schedule") if "stages" in layout else "1f1b",
                "mesh": fields.any("mesh"),
                "pipelines": [
                    {
                        "micro_batch_size": max(batch // microbatches, 1),
                        "microbatches": microbatches,
                        "rows": batch,
                        "makespan_s": time_s,
                        "stages": stages,
                    }
                ],
            },
            "step_time_s": time_s,
            "band_s": _band_s(fields, cluster, time_s),
            "tokens_per_s_per_device": None,
            "mfu": None,
            "mfu_full_attention": None,
            "peak_memory_bytes": {
                # Older files do not have it; `device_bytes` is an upper bound.
                "allocated": fields.number("at_once_bytes", default=device_bytes),
                "reserved": device_bytes,
                "device": device_bytes,
                "capacity": min(device.memory_bytes for device in cluster.classes.values()),
            },
            "breakdown": fields.any("breakdown"),
            "memory": {**_mapping(fields, "memory"), "tightest_rank": 0},
            "evaluator": "max-plus",
        },
    }


def _band_s(fields: Fields, cluster: Cluster, step_time_s: float) -> list[float]:
    """The widest band of the step time on the classes of the cluster."""
    profile = profile_from_record(fields.mapping("job").mapping("profile"))
    used = {node.device_class for node in cluster.nodes}
    bands = [profile.band(is_calibrated=cluster.classes[name].efficiency.is_calibrated) for name in used]
    return [step_time_s * min(low for low, _ in bands), step_time_s * max(high for _, high in bands)]


def _question(
    *,
    objective: object = "time",
    space: object = "default",
    fixed: object = None,
    axes: object = None,
    epsilon: object = 0.0,
    events: object = None,
) -> Document:
    return {
        "objective": objective,
        "space": space,
        "fixed": {} if fixed is None else fixed,
        "axes": {} if axes is None else axes,
        "use_all": False,
        "stage_dp": 1,
        "mixed_stage_rows": 1,
        "epsilon": epsilon,
        "events": events,
    }


def _events(fields: Fields) -> object:
    """The origin of the trace that the plan was chosen for."""
    return fields.mapping("for_trace").any("source") if fields.has("for_trace") else None


def _model(fields: Fields) -> Document:
    """The model with its family and resolved layers."""
    record = dict(_mapping(fields, "model"))
    part = Fields(record, file=fields.file, key="model")
    config = _mapping(part, "config")
    try:
        model = model_from_config(config, name=part.text("name"))
    except ConfigError as error:
        raise error.within(file=fields.file, key="model.config") from None
    return {"model": {**record, "family": model.family, "layers": layers_document(model)}}


def _layout(fields: Fields, best: Mapping[str, Any]) -> list[list[Document]]:
    """The stages of each pipeline."""
    layout = Fields(best, file=fields.file, key="best").mapping("layout")
    found = []
    for pipeline in layout.mappings("pipelines", low=1):
        found.append([dict(_any(stage)) for stage in pipeline.sequence("stages", low=1)])
        pipeline.finish()
    layout.finish()
    return found


def _any(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping; else one that the reader of version 2 refuses."""
    return value if isinstance(value, Mapping) else {}


def _mapping(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.any(name)
    if not isinstance(value, Mapping):
        raise fields.error(name, "is not a mapping", found=short_repr(value), allowed="a mapping")
    return value


def _blocks(record: Mapping[str, Any]) -> int:
    """Number of blocks of a stage, repetitions counted."""
    blocks = record.get("blocks")
    counts = [_any(block).get("count", 1) for block in blocks] if isinstance(blocks, Sequence) else []
    return sum(count if isinstance(count, int) else 1 for count in counts)


def _cluster(fields: Fields) -> Cluster:
    try:
        return cluster_from_record(_mapping(fields, "cluster"))
    except ConfigError as error:
        raise error.within(file=fields.file, key="cluster") from None


def _idle(fields: Fields, layout: Sequence[Sequence[Mapping[str, Any]]]) -> Document:
    """The devices of the cluster that no stage uses."""
    used = [rank for stages in layout for stage in stages for rank in rank_numbers(str(stage.get("ranks")))]
    idle = idle_in(_cluster(fields), used)
    return {"devices": idle.devices, "nodes": idle.nodes, "ranks": idle.ranks}
