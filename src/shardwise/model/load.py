"""Loads a model (`load_model`) from a file, a folder, or a name of the catalogue.

The catalogue has the configs of published models with their sources, one JSON file each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import Fields, nearest, printable, read_mapping
from shardwise.model.build import model_from_decoder
from shardwise.model.counts import parameters
from shardwise.model.dimensions import decoder_from_dimensions
from shardwise.model.families import decoder_from_config
from shardwise.model.hugging_face_cache import cached_config, is_repository_id
from shardwise.model.hugging_face_config import ConfigFields
from shardwise.model.model import Model
from shardwise.model.shape import Decoder, GroupedQueryAttentionShape

# Catalogue
FOLDER: Final = Path(__file__).parent / "catalogue"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A published model: its `config` for `model_from_config`, and the `source` of its sizes."""

    name: str
    source: str
    config: Mapping[str, object] = field(hash=False)


def catalogue_names() -> tuple[str, ...]:
    """Names of all entries, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def catalogue_entry(name: str) -> CatalogueEntry:
    """The entry of one of `catalogue_names()`."""
    entry = read_mapping(str(FOLDER / f"{name}.json"))
    config, source = entry["config"], entry["source"]
    if not isinstance(config, Mapping) or not isinstance(source, str):
        raise InternalError(f"catalogue entry {name} is malformed")
    return CatalogueEntry(name=name, source=source, config=config)


def catalogue() -> dict[str, CatalogueEntry]:
    """All entries by name."""
    return {name: catalogue_entry(name) for name in catalogue_names()}


# Loading
MAX_PARAMETERS = 10**15
MAX_NAME = 200
HUGGING_FACE_KEYS = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "n_layer")


def load_model(text: str) -> Model:
    """The model that `text` names.

    A name of the catalogue (in any case) takes precedence. Other texts are the path of a Hugging Face
    `config.json`, of a folder with one, or of a YAML file of plain dimensions. Else the text is an id of the
    Hugging Face Hub (`meta-llama/Llama-3.1-8B`), whose config is read from the local cache. A folder with the
    name of a catalogue entry needs a slash (`./llama-3.1-70b`). ConfigError names the file, the key, the
    value found and the allowed values.
    """
    name = text.casefold()
    if name in catalogue_names():
        return model_from_config(catalogue_entry(name).config, name=name)
    if not os.path.exists(text) and not _looks_like_path(text):
        guess = nearest(text, catalogue_names())
        hint = f" (did you mean {guess}?)" if guess else ""
        raise ConfigError(
            f"is neither a file nor a known model{hint}",
            key="MODEL",
            found=printable(text) or "nothing",
            allowed="a config.json, its folder, a YAML file, ORG/NAME of the Hugging Face Hub, or a name "
            "that `shardwise models` lists",
        )
    if is_repository_id(text):
        path = str(cached_config(text))
    else:
        path = os.path.join(text, "config.json") if os.path.isdir(text) else text
    config = read_mapping(path)
    # `_name_or_path` is a former location of a config; a `name` among dimensions is the user's name for it.
    is_named = bool(config.get("name")) and not any(key in config for key in HUGGING_FACE_KEYS)
    try:
        named = text if is_repository_id(text) else _name_from_path(path)
        return model_from_config(config, name=None if is_named else named)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None


def model_from_config(config: Mapping[str, object], *, name: str | None = None) -> Model:
    """The model of a Hugging Face config (with a `model_type`) or of plain dimensions (without).

    `name` defaults to the config's name (`_name_or_path`, or `name` among dimensions). The model's `config`
    includes the name, so that it rebuilds an equal model. Raises ConfigError for wrong configs.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("is not a mapping", allowed="a config of keys and values")
    decoder, key, own = _decoder(config)
    chosen = name or own or decoder.family
    model = model_from_decoder(decoder, name=chosen, config={**config, key: chosen})
    if parameters(model) > MAX_PARAMETERS:
        raise ConfigError(
            "is too large", found=f"{parameters(model)} parameters", allowed=f"at most {MAX_PARAMETERS}"
        )
    return model


def decoder_of(model: Model) -> Decoder:
    """The decoder (sizes, layer by layer) that the operators of `model` were built from."""
    return _decoder(model.config)[0]


def has_plain_causal_attention(model: Model, seq_len: int) -> bool:
    """Whether every layer has plain causal attention at `seq_len`: no windows, soft caps or sinks."""
    return not any(
        (shape.attention.window or seq_len) < seq_len or shape.attention.sinks or shape.attention.softcap
        for shape in decoder_of(model).layers
        if isinstance(shape.attention, GroupedQueryAttentionShape)
    )


def _decoder(config: Mapping[str, object]) -> tuple[Decoder, str, str]:
    """The decoder of a config, the key of the config's name, and that name (empty where it has none)."""
    if any(key in config for key in HUGGING_FACE_KEYS):
        fields = ConfigFields(config)
        own = fields.text("_name_or_path", default="") if fields.any("_name_or_path", default="") else ""
        return decoder_from_config(fields), "_name_or_path", own
    plain = Fields(config)
    own = plain.text("name", default="")
    return decoder_from_dimensions(plain), "name", own


def _looks_like_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith((".json", ".yaml", ".yml"))


def _name_from_path(path: str) -> str:
    """The name of the folder for a config.json, else that of the file without its suffix."""
    resolved = Path(path).absolute()
    name = resolved.parent.name if resolved.name == "config.json" else resolved.stem
    return printable(name)[:MAX_NAME] or "model"
