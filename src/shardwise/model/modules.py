"""Named modules of a layer, whose recomputation Megatron-LM switches on by name (`--recompute-modules`).

A module repeats some operators of a layer in the backward pass and saves none of the tensors between them.
`core_attn`, `mlp`, `moe` and `shared_experts` are whole blocks, of which only the inputs are saved.
`mla_up_proj`, `layernorm` and `moe_act` also discard their outputs, which the next operator would save.
(megatron-core 0.19.2: transformer/attention.py, multi_latent_attention.py, transformer_layer.py,
moe/moe_layer.py, moe/experts.py; output-discarding: `CheckpointWithoutOutput` in tensor_parallel/random.py.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from shardwise.operators import Operator

MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""All modules, in the order in which a set of them is written."""

INSIDE = {"moe": ("moe_act", "shared_experts")}
"""Modules that another one contains."""

NO_MODULES = ""
"""The set without modules."""


def set_text(names: Iterable[str]) -> str:
    """A set of modules as text: their names in the order of MODULES, joined by `+`."""
    given = set(names)
    return "+".join(name for name in MODULES if name in given)


MODULE_SETS = tuple(
    set_text(names) for size in range(len(MODULES) + 1) for names in combinations(MODULES, size)
)
"""Every set of modules, those with fewer modules first."""


def names_of(modules: str) -> tuple[str, ...]:
    """The modules of a set."""
    return tuple(modules.split("+")) if modules else ()


def repeated_modules(modules: str) -> tuple[str, ...]:
    """The modules of a set that no other one of the set contains."""
    names = names_of(modules)
    inside = {name for outer in names for name in INSIDE.get(outer, ())}
    return tuple(name for name in names if name not in inside)


@dataclass(frozen=True, slots=True)
class ModuleOperators:
    """What recomputing one module of a layer repeats and drops.

    `repeated` are indices of operators, `dropped` those of saved tensors: (operator, place in its list).
    `drops_scores` says whether the scores of unfused attention go too. `is_attention` tells the half of the
    layer. `joins` says whether the module joins partial results of tensor ranks, `routes` whether it sends
    tokens to experts, `attends` whether it exchanges keys and values over context ranks.
    """

    name: str
    is_attention: bool
    repeated: tuple[int, ...]
    dropped: tuple[tuple[int, int], ...]
    drops_scores: bool = False
    joins: bool = False
    routes: bool = False
    attends: bool = False

    @property
    def is_mlp(self) -> bool:
        """Whether it is in the other half of the layer."""
        return not self.is_attention


def modules_of_layer(operators: Sequence[Operator]) -> tuple[ModuleOperators, ...]:
    """The modules of a layer; `layernorm` is listed once for each half of the layer that has such a norm."""
    return _modules_named(
        tuple((operator.name, tuple(saved.name for saved in operator.saved)) for operator in operators)
    )


def modules_of_layers(layers: Iterable[Sequence[Operator]]) -> tuple[str, ...]:
    """The modules that some of these layers have, in the order of MODULES."""
    found = {module.name for operators in layers for module in modules_of_layer(operators)}
    return tuple(name for name in MODULES if name in found)


_ADAPTER = "_lora_"
"""In the names of an adapter's operators, after that of its matrix, with which they are recomputed."""

_ADAPTER_SAVED = "_lora_a.output"
"""Ends the name of the tensor between the matrices of an adapter. No module moves it to the host."""

_Names = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of operators, each with the names of the tensors that it saves."""


@cache
def _modules_named(names: _Names) -> tuple[ModuleOperators, ...]:
    layer = _LayerNames(names)
    return (*_attention_modules(layer), *_norm_modules(layer), *_mlp_modules(layer))


@dataclass(frozen=True, slots=True)
class _LayerNames:
    """The names of a layer's operators and saved tensors."""

    names: _Names

    def operators(self, block: str, *operators: str) -> tuple[int, ...]:
        """Indices of these operators of a block; without names, all of the block."""
        parts = [_part(name) for name, _ in self.names]
        return tuple(i for i, (at, own) in enumerate(parts) if at == block and own in (operators or (own,)))

    def saved(self, *tensors: str) -> tuple[tuple[int, int], ...]:
        """Places of these saved tensors."""
        return tuple(
            (i, j)
            for i, (_, own) in enumerate(self.names)
            for j, name in enumerate(own)
            if any(name == each or name.endswith(f".{each}") for each in tensors)
        )

    def of_adapters(self, repeated: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Places of the saved outputs of A of the adapters among these operators."""
        return tuple(
            (i, j)
            for i in repeated
            for j, name in enumerate(self.names[i][1])
            if name.endswith(_ADAPTER_SAVED)
        )

    def is_of_attention(self, operator: int) -> bool:
        return _part(self.names[operator][0])[0] == "attention"


def _attention_modules(layer: _LayerNames) -> Iterator[ModuleOperators]:
    if not layer.operators("attention"):
        return
    yield ModuleOperators(
        "core_attn", True, layer.operators("attention", "core"), layer.saved("attention.core.log_sum_exp"),
        drops_scores=True, attends=True,
    )  # fmt: skip
    if layer.operators("attention", "kv_up"):
        # Without a low rank, the queries' projection is the up projection.
        queries = "q_up" if layer.operators("attention", "q_up") else "q"
        repeated = layer.operators("attention", queries, "kv_up", "rotary")
        yield ModuleOperators(
            "mla_up_proj", True, repeated,
            (*layer.saved("attention.q", "attention.k", "attention.v"), *layer.of_adapters(repeated)),
        )  # fmt: skip


def _norm_modules(layer: _LayerNames) -> Iterator[ModuleOperators]:
    """Norms before attention and before the MLP. (A norm after them makes the residual stream.)"""
    for half in ("attention", "mlp"):
        is_attention = half == "attention"
        outputs = [
            place
            for place in layer.saved(f"{half}.norm.output")
            if layer.is_of_attention(place[0]) == is_attention
        ]
        if outputs:
            yield ModuleOperators("layernorm", is_attention, layer.operators(half, "norm"), tuple(outputs))


def _mlp_modules(layer: _LayerNames) -> Iterator[ModuleOperators]:
    if dense := layer.operators("mlp", "gate", "up", "gate_up", "activation", "down"):
        dropped = layer.saved("mlp.up.output", "mlp.activation.output")
        yield ModuleOperators("mlp", False, dense, (*dropped, *layer.of_adapters(dense)), joins=True)
    experts, shared = layer.operators("experts"), layer.operators("shared")
    of_shared = layer.saved("shared.up.output", "shared.activation.output")
    if experts:
        of_experts = layer.saved(
            "router.probabilities", "experts.input", "experts.up.output", "experts.activation.output"
        )
        yield ModuleOperators(
            "moe", False, (*layer.operators("router"), *experts, *shared), (*of_experts, *of_shared),
            joins=bool(shared), routes=True,
        )  # fmt: skip
        activation = layer.operators("experts", "activation")
        yield ModuleOperators("moe_act", False, activation, layer.saved("experts.activation.output"))
    if shared:
        yield ModuleOperators("shared_experts", False, shared, of_shared, joins=True)


def _part(name: str) -> tuple[str, str]:
    """Block and operator of an operator's name, without the prefix of its layer; of an adapter's operator,
    those of its matrix."""
    *_, block, operator = ("", "", *name.split("."))
    return block, operator.partition(_ADAPTER)[0]


# Modules whose tensors move to the host

OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Modules of `--offload-modules`, in the order in which a set of them is written."""


@dataclass(frozen=True, slots=True)
class OffloadedTensor:
    """A saved tensor that goes to the host: the operator and its place there. `copies` are how often it is
    copied; it leaves the device where it `is_released`. It consists of `parts` tensors."""

    operator: int
    place: int
    copies: int
    is_released: bool
    parts: int


def offloaded_tensors(operators: Sequence[Operator], modules: str) -> tuple[OffloadedTensor, ...]:
    """The saved tensors of a layer that a set of modules moves to the host.

    A module moves what it saves. The output of attention is saved by attention and by the projection after
    it: both copy it, and the device has it until the projection has. Norms before attention over heads and
    before a dense MLP are fused with the next product by Transformer Engine, so their input moves with
    `qkv_linear`, or not at all. (megatron-core 0.19.2: transformer/attention.py, transformer_layer.py,
    moe/experts.py, pipeline_parallel/fine_grained_activation_offload.py.)
    """
    return _offloaded(_names_of(operators), modules) if modules else ()


@cache
def _offloaded(names_of_layer: _Names, modules: str) -> tuple[OffloadedTensor, ...]:
    layer, names = _LayerNames(names_of_layer), set(names_of(modules))
    copied = [place for name in OFFLOADED if name in names for place in _moved_by(layer, name)]
    output = layer.saved("attention.core.output")
    staying = () if "attn_proj" in names else output
    of_two = layer.saved("attention.kv")
    return tuple(
        OffloadedTensor(*place, copied.count(place), place not in staying, 2 if place in of_two else 1)
        for place in dict.fromkeys(copied)
    )


def offloading_modules(layers: Iterable[Sequence[Operator]]) -> tuple[str, ...]:
    """The modules that move tensors of some of these layers, in the order of OFFLOADED."""
    known = [_LayerNames(_names_of(operators)) for operators in layers]
    return tuple(name for name in OFFLOADED if any(_moved_by(layer, name) for layer in known))


_AFTER_QKV = ("norm", "core", "gating", "out", "dropout", "residual")
"""Operators of attention that are not in the projections before its core."""


def _names_of(operators: Sequence[Operator]) -> _Names:
    return tuple((operator.name, tuple(saved.name for saved in operator.saved)) for operator in operators)


def _moved_by(layer: _LayerNames, module: str) -> tuple[tuple[int, int], ...]:
    """Places of the tensors that a module saves."""
    is_latent, has_experts = layer.operators("attention", "kv_up"), layer.operators("experts")
    norm = [place for place in layer.saved("layer.input") if layer.is_of_attention(place[0])]
    match module:
        case "attn_norm":
            return tuple(norm) if is_latent else ()
        case "qkv_linear":
            inner = [
                (i, j)
                for i, (operator, saved) in enumerate(layer.names)
                for j, tensor in enumerate(saved)
                if layer.is_of_attention(i) and _part(operator)[1] not in _AFTER_QKV
                if not tensor.endswith(_ADAPTER_SAVED)
            ]
            return (*(() if is_latent else norm), *inner)
        case "core_attn":
            core = layer.operators("attention", "core")
            return tuple((i, j) for i in core for j in range(len(layer.names[i][1])))
        case "attn_proj":
            return layer.saved("attention.core.output")
        case "mlp_norm":
            return layer.saved("mlp.norm.input") if has_experts else ()
        case "expert_fc1":
            return layer.saved("experts.input")
    return layer.saved("experts.up.output")
