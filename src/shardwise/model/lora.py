"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): a model whose matrices are frozen, and the pairs of
small matrices that are trained instead.

`lora_from_config` reads rank and targets under the keys of PEFT, `adapted` freezes the
operators of a model and adds those of its adapters. Each adapter of a matrix [k, n] has A [k, r] and B
[r, n]; its output, scaled, is added to that of the matrix. Under tensor parallelism A is sharded as k, and B
as n; the other one of both is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.model.model import Lora, Model
from shardwise.model.vision_operators import without_idle_backward
from shardwise.operators import (
    Extent,
    GroupedMatmul,
    Loss,
    Matmul,
    Operator,
    Pointwise,
    Saved,
    Weight,
)

LORA_KEY: Final = "lora"
"""The key of a model's config that has its adapters."""

MAX_RANK: Final = 65536

ALL_LINEAR: Final = "all-linear"
"""PEFT's name for all matrices of the layers."""

Group = tuple[str, ...]
"""Matrices that share one adapter, because software has them as one matrix."""

_QKV: Final[Group] = ("attention.q", "attention.k", "attention.v")
_GATE_UP: Final[Group] = ("mlp.gate", "mlp.up")

TARGETS: Final[Mapping[str, tuple[Group, ...]]] = {
    "q_proj": (("attention.q",),),
    "k_proj": (("attention.k",),),
    "v_proj": (("attention.v",),),
    "o_proj": (("attention.out",),),
    "q_a_proj": (("attention.q_down",),),
    "q_b_proj": (("attention.q_up",),),
    "kv_a_proj_with_mqa": (("attention.kv_down",),),
    "kv_b_proj": (("attention.kv_up",),),
    "gate_proj": (("mlp.gate",),),
    "up_proj": (("mlp.up",),),
    "down_proj": (("mlp.down",),),
    "qkv_proj": (_QKV,),
    "gate_up_proj": (_GATE_UP,),
    "c_proj": (("attention.out",), ("mlp.down",)),
}  # fmt: skip
"""Names of target modules, with the matrices of each adapter."""

SPELLINGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("query_key_value", "c_attn", "Wqkv", "linear_qkv"), "qkv_proj"),
    **dict.fromkeys(("out_proj", "dense", "linear_proj"), "o_proj"),
    **dict.fromkeys(("fc1", "c_fc", "dense_h_to_4h"), "up_proj"),
    **dict.fromkeys(("fc2", "dense_4h_to_h", "linear_fc2"), "down_proj"),
    "linear_fc1": "gate_up_proj",
}
"""Other names of the same modules, of families of Transformers and of Megatron-Bridge."""

_SEPARATE: Final = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
)  # fmt: skip

FUSED_QKV: Final = frozenset({"gpt2", "bloom", "gpt_neox", "falcon", "phi3", "mpt", "dbrx", "gpt_bigcode"})
"""Families in which queries, keys and values are one matrix."""

FUSED_UP: Final = frozenset({"phi3", "glm", "glm4"})
"""Families in which gate and up projection are one matrix."""

PREFIX: Final = "_lora"
"""Starts the last part of the names of an adapter's operators, after the name of its matrix."""


# Keys of PEFT

_IGNORED: Final = frozenset({
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping",
    "peft_version", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights", "fan_in_fan_out",
    "layers_pattern", "megatron_core", "megatron_config", "ensure_weight_tying", "runtime_config",
    "eva_config", "corda_config", "shardwise",
})  # fmt: skip
"""Keys of adapter_config.json that change neither sizes nor time; `shardwise` has texts of our exports."""


def lora_from_config(config: Mapping[str, object]) -> Lora:
    """The adapters of a mapping with PEFT's keys: `r` and `target_modules`, without which PEFT's default for
    the family applies. ConfigError for keys that train more or other tensors."""
    kind = config.get("peft_type", "LORA")
    if str(kind).rpartition(".")[2].upper() != "LORA":
        raise ConfigError("is no LoRA adapter", key="peft_type", found=short_repr(kind), allowed="LORA")
    for key, value in config.items():
        is_known = key in _IGNORED or key in ("r", "target_modules", "lora_dropout")
        if not is_known and value not in (None, False, "none", [], {}, ()):
            raise ConfigError("is not supported", key=key, found=short_repr(value), allowed="null")
    return Lora(
        r=_rank(config.get("r")),
        target_modules=_names(config.get("target_modules")),
        dropout=_dropout(config.get("lora_dropout")),
    )


def lora_of_text(text: str) -> Lora:
    """The adapters of a text: a rank (`16`), or `r=16,targets=q_proj+v_proj`. ConfigError for any other."""
    allowed = "a rank, or r=16,targets=q_proj+v_proj"
    if text.strip().isdecimal():
        return lora_from_config({"r": int(text)})
    found: dict[str, object] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        key = {"r": "r", "rank": "r", "targets": "target_modules", "target_modules": "target_modules"}.get(
            name
        )
        if key is None or not value or key in found:
            raise ConfigError("is not understood", found=short_repr(part.strip()), allowed=allowed)
        found[key] = value.split("+") if key == "target_modules" else value
    rank = found.get("r")
    if not isinstance(rank, str) or not rank.isdecimal():
        raise ConfigError("has no rank", key="r", found=short_repr(rank or text), allowed=allowed)
    return lora_from_config({**found, "r": int(rank)})


def _rank(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        found = "nothing" if value is None else short_repr(value)
        raise ConfigError("is no rank", key="r", found=found, allowed=f"a whole number from 1 to {MAX_RANK}")
    return value


def _names(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise ConfigError("is no list of names", key="target_modules", found=short_repr(value))
    known = (*TARGETS, *SPELLINGS, ALL_LINEAR)
    # A set of names in PEFT has no order; its config files list them in any.
    own = sorted(dict.fromkeys(str(name).rpartition(".")[2] for name in names), key=_place)
    for name in own:
        if name not in known:
            raise unknown(
                "is not a known module", name, known, key="target_modules", allowed=", ".join(sorted(known))
            )
    return tuple(own)


def _place(name: str) -> tuple[int, str]:
    known = (*TARGETS, *SPELLINGS)
    return (known.index(name) if name in known else len(known), name)


def _dropout(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(
            "is no rate", key="lora_dropout", found=short_repr(value), allowed="a number from 0 to 1"
        )
    return float(value)


# Adapters of a model


def adapted(model: Model, lora: Lora) -> Model:
    """The model with its weights frozen and with adapters on the targets of `lora`. A head of labels is
    trained, as PEFT does. ConfigError for targets that the model does not have, and for those on experts."""
    if model.head_layers:
        raise ConfigError(
            "is not supported with multi-token prediction", key=LORA_KEY,
            found=f"{model.head_layers} prediction modules", allowed="a config without prediction modules",
        )  # fmt: skip
    names = lora.target_modules or _default_targets(model.family)
    groups = _groups_of(model, names)
    kinds = tuple(
        replace(kind, operators=_with_adapters(kind.operators, groups, lora.r)) for kind in model.kinds
    )
    trained_head = () if model.labels is None else ("head.output",)
    note = "LoRA: all weights but the adapters are frozen; each adapter runs as kernels of its own"
    if lora.dropout:
        note += f"; lora_dropout {lora.dropout:g}, its masks and the copies of its inputs are not counted"
    return replace(
        model,
        kinds=kinds,
        embedding=without_idle_backward(frozen(operator) for operator in model.embedding),
        head=tuple(
            operator if operator.name in trained_head else frozen(operator) for operator in model.head
        ),
        lora=replace(lora, target_modules=names),
        notes=(*model.notes, note),
    )


def _default_targets(family: str) -> tuple[str, ...]:
    """The targets that PEFT has where a config names none."""
    return ("qkv_proj",) if family in FUSED_QKV else ("q_proj", "v_proj")


def _all_linear(family: str) -> tuple[str, ...]:
    names = list(_SEPARATE)
    if family in FUSED_QKV:
        names[:3] = ["qkv_proj"]
    if family in FUSED_UP:
        names[names.index("gate_proj") : names.index("up_proj") + 1] = ["gate_up_proj"]
    return tuple(names)


def frozen(operator: Operator) -> Operator:
    """The operator with frozen weights. A matmul then has no use for its saved input: its input gradient
    needs the weights alone."""
    if isinstance(operator, Matmul | GroupedMatmul):
        return replace(operator, trained=False, saved=())
    if isinstance(operator, Loss) or not operator.weights:
        return operator
    return replace(operator, trained=False)


def _groups_of(model: Model, names: Sequence[str]) -> tuple[Group, ...]:
    """The matrices of each adapter. ConfigError for names that the model does not have."""
    is_all = ALL_LINEAR in names
    if is_all:
        names = _all_linear(model.family)
    of_model = {name for kind in model.kinds for operator in kind.operators for name in _matrices(operator)}
    if is_all and any(matrix.startswith(("mixer.", "attention.index_")) for matrix in of_model):
        raise ConfigError(
            "includes modules of layers that adapters do not support here", key="target_modules",
            found=ALL_LINEAR, allowed="names of modules of attention and of the MLP",
        )  # fmt: skip
    has_experts = any(kind.experts is not None for kind in model.kinds)
    found: dict[Group, None] = {}
    for name in names:
        wanted = TARGETS[SPELLINGS.get(name, name)]
        if has_experts and any(matrix.startswith("mlp.") for group in wanted for matrix in group):
            raise ConfigError(
                "is a module of experts, whose adapters are not supported", key="target_modules",
                found=ALL_LINEAR if is_all else name, allowed="modules of attention",
            )  # fmt: skip
        if "attention.output_gate" in of_model and any("attention.q" in group for group in wanted):
            raise ConfigError(
                "is joined with the gate of attention in this family, which is not supported",
                key="target_modules", found=name, allowed="other modules",
            )  # fmt: skip
        own = [tuple(matrix for matrix in group if matrix in of_model) for group in wanted]
        if not any(own) and not is_all:
            known = [one for one in TARGETS if any(set(group) & of_model for group in TARGETS[one])]
            raise unknown(
                "is no module of this model", name, known, key="target_modules", allowed=", ".join(known)
            )
        found |= dict.fromkeys(group for group in own if group)
    several = [matrix for group in found for matrix in group]
    for matrix in several:
        if several.count(matrix) > 1:
            raise ConfigError("name a matrix twice", key="target_modules", found=matrix, allowed="each once")
    return tuple(found)


def _matrices(operator: Operator) -> Iterator[str]:
    """Names of the matrices of a plain matmul, without the last part, `weight`."""
    for weight in operator.weights if isinstance(operator, Matmul) else ():
        if len(weight.shape) == 2:
            yield weight.name.removesuffix(".weight")


def _with_adapters(operators: Sequence[Operator], groups: Iterable[Group], r: int) -> tuple[Operator, ...]:
    """Frozen operators of a layer, each followed by the adapters of the groups that end with it.

    A saved input of frozen matmuls is needed by adapters alone: the first one that reads it saves it.
    """
    waiting = {group: [matrix for matrix in group if _has(operators, matrix)] for group in groups}
    saved_by_reader: dict[int, tuple[Saved, ...]] = {}
    found: list[Operator] = []
    saved: set[int] = set()
    for place, operator in enumerate(operators):
        source = _source(operators, place)
        if source is not None:
            saved_by_reader[place] = operators[source].saved
        found.append(frozen(operator))
        own = set(_matrices(operator))
        for matrices in waiting.values():
            if not matrices or matrices[-1] not in own:
                continue
            inputs = saved_by_reader.get(place, ())
            is_first = source is not None and source not in saved
            found += _adapter(operators, matrices, operator, inputs if is_first else (), r)
            saved |= {source} if source is not None else set()
    return tuple(found)


def _has(operators: Iterable[Operator], matrix: str) -> bool:
    return any(matrix in _matrices(operator) for operator in operators)


def _source(operators: Sequence[Operator], place: int) -> int | None:
    """The operator that lists the saved input of the matmul at `place`: itself, or the last matmul before it
    with an input of that width. None where attention, whose output it is, lists it."""
    operator = operators[place]
    if not isinstance(operator, Matmul):
        return None
    before = [
        index
        for index, one in enumerate(operators[: place + 1])
        if isinstance(one, Matmul | GroupedMatmul) and one.saved and one.saved[-1].width == operator.k
    ]
    return before[-1] if before else None


def _adapter(
    operators: Iterable[Operator], matrices: Sequence[str], base: Operator, inputs: tuple[Saved, ...], r: int
) -> Iterator[Operator]:
    """A, B, and the sum of their scaled output with that of the matrices, which `base` is the last to have.

    The sum scales (reads, writes) and adds (reads two, writes); its backward scales a gradient and adds that
    of the input.
    """
    shapes = [
        weight.shape
        for operator in operators
        for weight in operator.weights
        if weight.name.removesuffix(".weight") in matrices and len(weight.shape) == 2
    ]
    k, rank = shapes[0][0], Extent(r)
    n = Extent(sum(shape[1].size for shape in shapes), shapes[0][1].role)
    block, _, _ = matrices[0].rpartition(".")
    name = f"{block}.{'_'.join(matrix.rpartition('.')[2] for matrix in matrices)}{PREFIX}"
    rows = base.rows
    yield Matmul(
        name=f"{name}_a",
        rows=rows,
        k=k,
        n=rank,
        weights=(Weight(name=f"{name}_a.weight", shape=(k, rank)),),
        saved=inputs,
    )
    yield Matmul(
        name=f"{name}_b",
        rows=rows,
        k=rank,
        n=n,
        weights=tuple(
            Weight(name=f"{name}_b.{place}.weight" if len(shapes) > 1 else f"{name}_b.weight",
                   shape=(rank, shape[1]))
            for place, shape in enumerate(shapes)
        ),
        saved=(Saved(name=f"{name}_a.output", width=rank, rows=rows),),
    )  # fmt: skip
    yield Pointwise(
        name=f"{name}_sum",
        rows=rows,
        forward=(Extent(5 * n.size, n.role),),
        backward=(Extent(2 * n.size, n.role), Extent(3 * k.size, k.role)),
    )
