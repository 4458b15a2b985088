"""Builds the sizes of a decoder from a Hugging Face config, as the file of its family says.

Family files name sizes as follows; `[i]` marks those that may differ by layer, `i` in expressions. Other
names in expressions are keys of the config; `sliding`, whether the layer has the window; or `hidden`,
`layers`, `heads` and `ffn`, sizes of that name.

- Of the decoder: `hidden vocab layers tied positions embedding_width embedding_norm embedding_dropout
  final_norm output_bias logit_softcap mtp_modules max_seq_len`.
- Of its layers: `norm placement[i] dropout`; `dropout` is a rate.
- `attention.heads[i] .kv_heads[i] .head_dim[i] .window[i] .sliding[i] .qkv_bias .out_bias .qk_norm[i]
  .rotary[i] .sinks .softcap .gate .gate_bias .shared_kv[i]`. With `attention.kv_rank` it is latent
  attention, which also has `.q_rank .nope_dim .rope_dim .v_dim .bias .index_topk .index_heads[i] .index_dim`.
- `attention.at[i]` and `mlp.at[i]`: whether the layer has attention, and an MLP or experts.
- `recurrent.second[i]`: whether such a layer reads the same input as attention.
- `recurrent.at[i]`: whether a state-space, linear-attention or convolution layer takes the place of
  attention; `recurrent.kind .heads .head_dim .key_heads .key_dim .kernel .chunk .norm .gate_rank .bias
  .conv_bias .dt_rank .inner_norms`.
- `eager.norm .qk_norm .activation .router .fused_qkv .copied_output`: what the modules of Transformers save
  in addition.
- `mlp.ffn[i] .gated .bias .activation_weights`.
- `experts.at[i]` (whether the layer has experts) and `experts.count .top_k .ffn .gated .bias .router_bias
  .shared_ffn .shared_gate .groups .groups_per_token .capacity_factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast, get_args

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.model.config_keys import MAX_COUNT, MAX_EXPERTS, MAX_LAYERS, MAX_SEQ_LEN, ConfigFields
from shardwise.model.config_parts import TextConfig, text_config
from shardwise.model.expressions import Expression, InexactDivision
from shardwise.model.family_files import ModelFamily
from shardwise.model.shape import (
    AttentionShape,
    Decoder,
    EagerModules,
    GroupedQueryAttentionShape,
    LatentAttentionShape,
    LayerShape,
    MixerNorm,
    Mlp,
    Norm,
    NormPlacement,
    OutputGate,
    QkNorm,
    Recurrence,
    RecurrentShape,
    RoutedMlp,
)

MAIN_SIZES: Final = (
    "hidden", "vocab", "layers", "attention.heads", "mlp.ffn", "experts.count", "experts.top_k",
    "experts.ffn",
)  # fmt: skip
"""Sizes whose keys a config must have, unless it is nested or its family says otherwise."""

RESERVED: Final = ("i", "sliding", "hidden", "layers", "heads", "ffn")
"""Names in expressions that are not keys of a config."""

_GATES: Final[tuple[OutputGate, ...]] = get_args(OutputGate)
MAX_SOFTCAP: Final = 1e6
CAPACITY_FACTORS: Final = (0.01, 100.0)

T = TypeVar("T")


def decoder_from_config(config: Mapping[str, object]) -> Decoder:
    """The decoder of a config with a `model_type`. ConfigError for an unknown one and for wrong keys."""
    text = text_config(config)
    family = text.family
    fields = ConfigFields(
        text.config,
        key=text.key,
        defaults={**text.class_defaults, **family.defaults},
        spellings=_spellings(family, text.class_spellings),
        required=() if text.key else _required(family),
    )
    fields.any("model_type", default=None)
    decoder = _Sizes(family, fields).decoder()
    for name in (*family.keys, *text.other_parts):
        fields.is_given(name)
    notes = fields.refuse_unread_sizes(family.name, text.class_defaults)
    return _with_head(replace(decoder, notes=(*text.notes, *family.notes, *notes)), text)


def _with_head(decoder: Decoder, text: TextConfig) -> Decoder:
    """The decoder with what the whole config decides: tied embeddings, and a head of labels."""
    if text.labels is not None:
        return replace(decoder, tied=False, labels=text.labels, output_bias=text.has_label_bias)
    return decoder if text.tied is None else replace(decoder, tied=text.tied)


def _spellings(family: ModelFamily, of_class: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """All spellings of each key: those of the family, and those of the class in both directions."""
    groups: dict[str, dict[str, None]] = {}
    pairs = [(key, other) for key, others in family.spellings.items() for other in others]
    for other, key in [*((other, key) for key, other in pairs), *of_class.items()]:
        joined = {**groups.get(key, {key: None}), **groups.get(other, {other: None})}
        for name in joined:
            groups[name] = joined
    return {name: tuple(other for other in group if other != name) for name, group in groups.items()}


def _required(family: ModelFamily) -> frozenset[str]:
    main = {family.sizes[size].text for size in MAIN_SIZES if size in family.sizes}
    bare = {text for text in main if text.isidentifier()}
    return frozenset((bare | family.required) - family.optional)


class _Sizes:
    """The sizes of one config by the expressions of its family, checked for type and range."""

    def __init__(self, family: ModelFamily, fields: ConfigFields) -> None:
        self.family = family
        self.fields = fields
        self._found: dict[str, Any] = {}
        self._layer = 0
        self._is_sliding = False

    # Values
    def _lookup(self, name: str) -> Any:
        if name == "i":
            return self._layer
        if name == "sliding":
            return self._is_sliding
        if name in ("hidden", "layers"):
            return self.count(name)
        if name in ("heads", "ffn"):
            return self.count({"heads": "attention.heads", "ffn": "mlp.ffn"}[name])
        if name not in self._found:
            self._found[name] = self.fields.value(name)
        return self._found[name]

    def _evaluated(self, expression: Expression, size: str) -> Any:
        try:
            return expression.value(self._lookup)
        except InexactDivision as error:
            name = {"heads": self._blamed("attention.heads")}.get(error.name, error.name)
            raise self.fields.error(
                self.fields.spelling(name) if name else self._blamed(size),
                "does not divide the hidden size"
                if error.dividend == self.count("hidden")
                else "does not divide",
                found=short_repr(error.divisor),
                allowed=f"a divisor of {error.dividend}",
            ) from None
        except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError):
            raise self._wrong(size, "is not supported with the other keys", None, expression.text) from None

    def value(self, size: str, default: object = None) -> Any:
        """The value of a size in the current layer, of any type."""
        expression = self.family.sizes.get(size)
        if expression is None:
            return default
        if "i" in expression.names or "sliding" in expression.names:
            return self._evaluated(expression, size)
        if size not in self._found:
            self._found[size] = self._evaluated(expression, size)
        return self._found[size]

    def count(self, size: str, *, default: int | None = None, low: int = 1, high: int = MAX_COUNT) -> int:
        """A whole number from `low` to `high`; `default` where the family does not have the size."""
        value = self.value(size, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value % 1
            or not low <= value <= high
        ):
            raise self._wrong(
                size, "is not a whole number in range", value, f"a whole number from {low} to {high}"
            )
        return int(value)

    def optional_count(self, size: str, *, high: int = MAX_COUNT) -> int | None:
        return None if self.value(size) is None else self.count(size, high=high)

    def flag(self, size: str, *, default: bool = False) -> bool:
        return bool(self.value(size, default))

    def is_positive(self, size: str, *, high: float = 1.0) -> bool:
        """Whether a number, such as a dropout rate or a soft cap, is above 0; null is not."""
        value = self.value(size)
        if value is None or isinstance(value, bool):
            return bool(value)
        if not isinstance(value, int | float) or not 0 <= value <= high:
            raise self._wrong(size, "is not a number in range", value, f"a number from 0 to {high:g}")
        return value > 0

    def choice(self, size: str, choices: tuple[T, ...], default: T) -> T:
        value = self.value(size, default)
        if value not in choices:
            raise self._wrong(size, "is not supported", value, ", ".join(map(str, choices)))
        return cast("T", value)

    def _blamed(self, size: str) -> str:
        """The key to name in an error about a size: the first of its expression that the config has."""
        names = self.family.sizes[size].names
        own = [name for name in names if name not in RESERVED]
        given = [name for name in own if self.fields.is_given(name)]
        if not own and "heads" in names:
            return self._blamed("attention.heads")
        return self.fields.spelling((given or own or [size])[0])

    def _wrong(self, size: str, message: str, value: object, allowed: str) -> ConfigError:
        found = None if value is None else short_repr(value)
        return self.fields.error(self._blamed(size), message, found=found, allowed=allowed)

    # Parts
    def decoder(self) -> Decoder:
        layers = self.count("layers", high=MAX_LAYERS)
        hidden = self.count("hidden")
        self._check()
        sliding = self._sliding(layers)
        shapes = []
        for layer in range(layers):
            self._layer = layer
            shapes.append(self._layer_shape(hidden, sliding[layer] if sliding else None))
        mtp_modules = self.count("mtp_modules", default=0, low=0, high=100)
        if mtp_modules and "experts.at" in self.family.sizes and not isinstance(shapes[-1].mlp, RoutedMlp):
            raise self._wrong("experts.at", "leaves no layer with experts", self.value("experts.at"), "fewer")
        return Decoder(
            family=self.family.name,
            hidden=hidden,
            vocab=self.count("vocab"),
            layers=tuple(shapes),
            tied=self.flag("tied"),
            positions=self.count("positions", default=0, low=0),
            embedding_width=self.count("embedding_width", default=hidden),
            embedding_norm=self.flag("embedding_norm"),
            embedding_dropout=self.is_positive("embedding_dropout"),
            final_norm=self.flag("final_norm", default=True),
            output_bias=self.flag("output_bias"),
            logit_softcap=self.is_positive("logit_softcap", high=MAX_SOFTCAP),
            mtp_modules=mtp_modules,
            max_seq_len=self.optional_count("max_seq_len", high=MAX_SEQ_LEN),
        )

    def _check(self) -> None:
        for check in self.family.checks:
            if not self._evaluated(check.condition, "hidden"):
                found = self.fields.value(check.key)
                key = self.fields.spelling(check.key)
                raise self.fields.error(
                    key, "is not supported", found=short_repr(found), allowed=check.allowed
                )

    def _sliding(self, layers: int) -> list[bool] | None:
        """Whether each layer has the window, by `layer_types`; None where the config does not have them."""
        if not self.fields.is_given("layer_types"):
            return None
        key = self.fields.spelling("layer_types")
        types, known = self.fields.sequence(key), self.family.layer_types
        if len(types) != layers:
            raise self.fields.error(
                key, "needs one type per layer", found=f"{len(types)}", allowed=f"{layers}"
            )
        for index, kind in enumerate(types):
            if not isinstance(kind, str) or kind not in known:
                raise self.fields.item_error(
                    key, index, "is not supported", found=kind, allowed=", ".join(known)
                )
            if known[kind] and "attention.window" not in self.family.sizes:
                raise self.fields.item_error(
                    key, index, "has no window in this family", found=kind, allowed="full_attention"
                )
        return [known[str(kind)] for kind in types]

    def _layer_shape(self, hidden: int, is_sliding: bool | None) -> LayerShape:
        if is_sliding is None:
            is_sliding = self.flag("attention.sliding", default=True)
        self._is_sliding = is_sliding
        mixer, mlp = self._mixer(is_sliding), self._mlp()
        if mixer is None and mlp is None:
            raise self._wrong("mlp.at", "has neither attention nor an MLP", f"layer {self._layer}", "either")
        return LayerShape(
            hidden=hidden,
            norm=self.choice("norm", cast("tuple[Norm, ...]", get_args(Norm)), "rms"),
            norm_placement=self.choice(
                "placement", cast("tuple[NormPlacement, ...]", get_args(NormPlacement)), "pre"
            ),
            attention=mixer,
            mlp=mlp,
            mixer=self._recurrent() if self.flag("recurrent.second") else None,
            dropout=self.is_positive("dropout"),
            eager=EagerModules(
                norm=self.count("eager.norm", default=0, low=0, high=10),
                qk_norm=self.count("eager.qk_norm", default=0, low=0, high=10),
                activation=self.count("eager.activation", default=0, low=0, high=10),
                router=self.count("eager.router", default=0, low=0, high=10),
                fused_qkv=self.flag("eager.fused_qkv"),
                copied_output=self.flag("eager.copied_output"),
            ),
        )

    def _mixer(self, is_sliding: bool) -> AttentionShape | RecurrentShape | None:
        if self.flag("recurrent.at"):
            return self._recurrent()
        if not self.flag("attention.at", default=True):
            return None
        is_latent = "attention.kv_rank" in self.family.sizes
        return self._latent() if is_latent else self._grouped_query(is_sliding)

    def _mlp(self) -> Mlp | RoutedMlp | None:
        if not self.flag("mlp.at", default=True):
            return None
        return self._routed() if self.flag("experts.at") else self._dense()

    def _recurrent(self) -> RecurrentShape:
        kind = self.choice("recurrent.kind", cast("tuple[Recurrence, ...]", get_args(Recurrence)), "ssd")
        heads = self.count("recurrent.heads")
        key_heads = self.count("recurrent.key_heads", default=1)
        if heads % key_heads:
            raise self._wrong(
                "recurrent.key_heads", "does not divide the heads", key_heads, f"a divisor of {heads}"
            )
        return RecurrentShape(
            kind=kind,
            heads=heads,
            head_dim=self.count("recurrent.head_dim"),
            key_heads=key_heads,
            key_dim=self.count("recurrent.key_dim", default=0, low=0),
            kernel=self.count("recurrent.kernel", default=0, low=0),
            chunk=self.count("recurrent.chunk", default=1),
            norm=self.choice("recurrent.norm", cast("tuple[MixerNorm, ...]", get_args(MixerNorm)), "none"),
            gate_rank=self.count("recurrent.gate_rank", default=0, low=0),
            bias=self.flag("recurrent.bias"),
            conv_bias=self.flag("recurrent.conv_bias"),
            dt_rank=self.count("recurrent.dt_rank", default=0, low=0),
            has_inner_norms=self.flag("recurrent.inner_norms"),
        )

    def _grouped_query(self, is_sliding: bool) -> GroupedQueryAttentionShape:
        window = self.optional_count("attention.window")
        qk_norm = self.value("attention.qk_norm", False)
        return GroupedQueryAttentionShape(
            heads=self.count("attention.heads"),
            head_dim=self.count("attention.head_dim"),
            kv_heads=self._kv_heads(),
            window=window if is_sliding else None,
            qkv_bias=self.flag("attention.qkv_bias"),
            out_bias=self.flag("attention.out_bias"),
            qk_norm=bool(qk_norm),
            qk_norm_kind=cast("QkNorm", qk_norm) if qk_norm in get_args(QkNorm) else "head",
            rotary=self.flag("attention.rotary", default=True),
            sinks=self.flag("attention.sinks"),
            softcap=self.is_positive("attention.softcap", high=MAX_SOFTCAP),
            gate=self.choice("attention.gate", _GATES, "none"),
            gate_bias=self.flag("attention.gate_bias"),
            shared_kv=self.flag("attention.shared_kv"),
        )

    def _kv_heads(self) -> int:
        heads, kv_heads = self.count("attention.heads"), self.count("attention.kv_heads")
        if heads % kv_heads:
            raise self._wrong(
                "attention.kv_heads", "does not divide the number of heads", kv_heads, f"a divisor of {heads}"
            )
        return kv_heads

    def _latent(self) -> LatentAttentionShape:
        self._kv_heads()
        return LatentAttentionShape(
            heads=self.count("attention.heads"),
            q_rank=self.optional_count("attention.q_rank"),
            kv_rank=self.count("attention.kv_rank"),
            nope_dim=self.count("attention.nope_dim"),
            rope_dim=self.count("attention.rope_dim"),
            v_dim=self.count("attention.v_dim"),
            bias=self.flag("attention.bias"),
            index_topk=self.optional_count("attention.index_topk"),
            index_heads=self.count("attention.index_heads", default=0, low=0),
            index_dim=self.count("attention.index_dim", default=0, low=0),
        )

    def _dense(self) -> Mlp:
        return Mlp(
            ffn=self.count("mlp.ffn"),
            gated=self.flag("mlp.gated", default=True),
            bias=self.flag("mlp.bias"),
            activation_weights=self.count("mlp.activation_weights", default=0, low=0),
        )

    def _routed(self) -> RoutedMlp:
        """The experts of a layer. ConfigError where a token has more experts than there are, or groups do not
        divide them."""
        count = self.count("experts.count", high=MAX_EXPERTS)
        top_k = self.count("experts.top_k", high=MAX_EXPERTS)
        groups = self.count("experts.groups", default=1, high=MAX_EXPERTS)
        per_token = self.count("experts.groups_per_token", default=1, high=MAX_EXPERTS)
        if top_k > count:
            raise self._wrong("experts.top_k", "is more than the number of experts", top_k, f"1 to {count}")
        if count % groups:
            raise self._wrong(
                "experts.groups", "does not divide the experts", groups, f"a divisor of {count}"
            )
        if per_token > groups:
            raise self._wrong(
                "experts.groups_per_token", "is more than the groups", per_token, f"1 to {groups}"
            )
        gated, bias = self.flag("experts.gated", default=True), self.flag("experts.bias")
        shared = self.count("experts.shared_ffn", default=0, low=0)
        return RoutedMlp(
            experts=count,
            top_k=top_k,
            expert=Mlp(ffn=self.count("experts.ffn"), gated=gated, bias=bias),
            shared=Mlp(ffn=shared, gated=gated, bias=self.flag("mlp.bias")) if shared else None,
            shared_gate=bool(shared) and self.flag("experts.shared_gate"),
            groups=groups,
            groups_per_token=per_token,
            router_bias=self.flag("experts.router_bias"),
            capacity_factor=self._capacity_factor(),
        )

    def _capacity_factor(self) -> float | None:
        value = self.value("experts.capacity_factor")
        low, high = CAPACITY_FACTORS
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high
        ):
            raise self._wrong(
                "experts.capacity_factor",
                "is not a number in range",
                value,
                f"a number from {low} to {high:g}",
            )
        return None if value is None else float(value)
