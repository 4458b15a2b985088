"""Finds what to plan in a Hugging Face config: its text decoder, the family that reads it, and its head.

A multimodal config has the text decoder one level or more down; its other parts are not counted, which is a
note. `architectures` names the family where `model_type` is not known, and the head: a causal language model
has the vocabulary, a classifier or a reward model has labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.inputs import join_key, nearest, short_repr, unknown
from shardwise.model.config_keys import ConfigFields
from shardwise.model.family_files import (
    ConfigClass,
    ModelFamily,
    config_class,
    family_of,
    model_type_of_class,
    model_types,
    not_planned,
)
from shardwise.model.vision import has_vision_tower

TEXT_KEYS: Final = (
    "text_config", "llm_config", "language_config", "language_model_config", "text_model_config",
    "thinker_config",
)  # fmt: skip
"""Keys of a config that have the text decoder, or a part of the model that contains it."""

SOME_TYPES: Final = (
    "llama", "qwen3", "qwen3_moe", "deepseek_v3", "mistral", "mixtral", "gemma3", "gpt_oss", "gpt2",
)  # fmt: skip
"""Types that errors list."""

_OTHER_PART: Final = re.compile(
    r"(vision|visual|audio|speech|image|video|talker|code2wav|projector)\w*_config|mm_\w+"
)
_LABEL_HEADS: Final = {
    "SequenceClassification": False, "RewardModel": False, "TokenClassification": True,
}  # fmt: skip
"""Endings of classes whose head has one output a label, and whether it has a bias."""

_CAUSAL_CLASS: Final = re.compile(r"\w*(ForCausalLM|LMHeadModel|ForConditionalGeneration|HeadModel|Decoder)")
_MODEL_CLASS: Final = re.compile(r"\w*Model")
MAX_LABELS: Final = 1_000_000
TEXT_ALONE: Final = "the text decoder alone is counted"
"""Start of the note on a multimodal config whose other parts are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text decoder of a config.

    `config` are its keys, at `key` of the whole config (empty where they are the whole config). The class of
    Transformers has `class_defaults` and `class_spellings`. `other_parts` are the keys of parts that are not
    counted. `tied` is what the whole config says, None where it says nothing; `labels` is the number of
    outputs of a head of labels.
    """

    config: Mapping[str, object]
    key: str
    family: ModelFamily
    class_defaults: Mapping[str, object]
    class_spellings: Mapping[str, str]
    other_parts: tuple[str, ...]
    tied: bool | None
    labels: int | None
    has_label_bias: bool
    notes: tuple[str, ...]


def text_config(config: Mapping[str, object]) -> TextConfig:
    """The text decoder of a config. ConfigError where no family reads it."""
    whole = ConfigFields(config)
    if _type(config) in not_planned():
        raise _unknown(config, "", _type(config))
    inner, key = _nested(config)
    top_class = config_class(_type(config))
    inherited = top_class.text[1] if top_class is not None and top_class.text is not None else ""
    family, model_type, notes = _family(inner, key, _type(config), inherited, _first_architecture(config))
    found = config_class(model_type) or config_class(family.config_class)
    others = tuple(name for name in config if _OTHER_PART.fullmatch(name) and config[name])
    if others or key:
        without = f", without {', '.join(others)}" if others else ""
        counted = "; --images 1 counts its vision tower" if has_vision_tower(config) else ""
        notes += (f"{TEXT_ALONE}{without}{counted}",)
    labels, has_bias, of_head = _head(whole, config, key)
    tied, of_tied = _tied(config, inner, top_class, found) if key else (None, ())
    return TextConfig(
        config=inner,
        key=key,
        family=family,
        class_defaults={} if found is None else found.defaults,
        class_spellings={} if found is None else found.spellings,
        other_parts=others,
        tied=tied,
        labels=labels,
        has_label_bias=has_bias,
        notes=(*notes, *of_tied, *of_head),
    )


def _tied(
    config: Mapping[str, object],
    inner: Mapping[str, object],
    top_class: ConfigClass | None,
    text_class: ConfigClass | None,
) -> tuple[bool | None, tuple[str, ...]]:
    """Whether a multimodal config ties the embeddings of its text decoder (None: as the decoder has it).

    Where neither config says it and their classes differ, the class of the decoder decides, which is a note.
    """
    name = "tie_word_embeddings"
    for each in (config, inner):
        value = each.get(name)
        if isinstance(value, bool):
            return value, ()
    defaults = [None if each is None else each.defaults.get(name) for each in (top_class, text_class)]
    whole, text = defaults
    if not isinstance(text, bool):
        return (whole if isinstance(whole, bool) else None), ()
    differs = isinstance(whole, bool) and whole != text
    how = "tied" if text else "not tied"
    note = f"embeddings are counted as {how}, the default of the text decoder: set {name}"
    return text, ((note,) if differs else ())


def _type(config: Mapping[str, object]) -> str:
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def _first_architecture(config: Mapping[str, object]) -> str:
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""


def _nested(config: Mapping[str, object], key: str = "") -> tuple[Mapping[str, object], str]:
    """The innermost config of the text decoder, and its dotted key.

    A config of a known family with sizes of its own is the text decoder itself.
    """
    own = family_of(_type(config))
    if own is not None and own.name and any(name in config for name in own.keys & _SIZE_KEYS):
        return config, key
    for name in TEXT_KEYS:
        if config.get(name) is not None:
            inner: Any = config[name]
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    "is not a mapping", key=join_key(key, name), found=short_repr(inner), allowed="a mapping"
                )
            return _nested(inner, join_key(key, name))
    return config, key


_SIZE_KEYS: Final = frozenset(
    {"hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers"}
)


def _family(
    inner: Mapping[str, object], key: str, top: str, inherited: str, top_architecture: str
) -> tuple[ModelFamily, str, tuple[str, ...]]:
    """The family of a text decoder, the `model_type` whose class has its defaults, and notes."""
    own = _type(inner)
    if inner.get("model_type") is not None and not own:
        raise _unknown(inner, key, inner["model_type"])
    candidates = [own] if own and own != top else []
    for model_type in dict.fromkeys((*candidates, *((inherited, top) if own in ("", top) else ()))):
        family = family_of(model_type) if model_type else None
        if family is not None:
            return family, model_type, ()
    if not key and not own:
        raise _unknown(inner, key, None)
    architecture = _first_architecture(inner) or top_architecture
    by_class = model_type_of_class(architecture) if architecture else None
    family = family_of(by_class) if by_class else None
    near = nearest(own, model_types(), cutoff=0.8) if own else None
    if family is None or by_class is None or near is not None or own in not_planned():
        raise _unknown(inner, key, own or top)
    return family, by_class, (f"{own or top} is read as {by_class}, by architectures ({architecture})",)


def _unknown(inner: Mapping[str, object], key: str, found: object) -> ConfigError:
    """The error for a model that no family reads, with its reason where it is known."""
    types = model_types()
    known = f"one of {len(types)} types, such as {', '.join(SOME_TYPES)} (docs/reference/model-families.md)"
    where = join_key(key, "model_type")
    if found is None:
        return ConfigError("is missing", key=where, allowed=known)
    reason = reason_against(found, inner) if isinstance(found, str) else None
    if reason is not None:
        return ConfigError(f"cannot be planned: {reason}", key=where, found=short_repr(found), allowed=known)
    return unknown("is not a known family", found, types, key=where, allowed=known)


def reason_against(model_type: str, config: Mapping[str, object]) -> str | None:
    """Why a model cannot be planned; None where no reason is known."""
    reason = not_planned().get(model_type)
    of_class = config_class(model_type)
    is_pair = config.get("is_encoder_decoder") is True or (of_class and of_class.is_encoder_decoder)
    return "an encoder-decoder" if reason is None and is_pair else reason


def _head(
    whole: ConfigFields, config: Mapping[str, object], key: str
) -> tuple[int | None, bool, tuple[str, ...]]:
    """The labels of the head (None for a language model), whether it has a bias, and notes.

    ConfigError for a class whose head is not known: its parameters would be counted wrongly.
    """
    architecture = _first_architecture(config)
    for ending, has_bias in _LABEL_HEADS.items():
        if architecture.endswith(ending):
            named = config.get("id2label")
            default = len(named) if isinstance(named, Mapping) and named else 2
            labels = whole.integer("num_labels", low=1, high=MAX_LABELS, default=default)
            return labels, has_bias, (f"{architecture}: the head has {labels} outputs, not the vocabulary",)
    if key or not architecture or _CAUSAL_CLASS.fullmatch(architecture):
        return None, False, ()
    if _MODEL_CLASS.fullmatch(architecture):
        return None, False, (f"{architecture} names no head: that of a language model is counted",)
    raise ConfigError(
        "names a head that cannot be counted", key="architectures[0]", found=short_repr(architecture),
        allowed="a class that ends in ForCausalLM, " + ", ".join(f"For{ending}" for ending in _LABEL_HEADS),
    )  # fmt: skip
