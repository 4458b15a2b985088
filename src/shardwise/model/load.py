"""Loads a model (`load_model`) from a file, a folder, or a name of the catalogue.

The catalogue has the configs of published models with their sources, one JSON file each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import Fields, printable, read_mapping, short_repr, unknown
from shardwise.model.build import model_from_decoder
from shardwise.model.config_files import read_config, refuse_other_files
from shardwise.model.config_parts import TEXT_ALONE, text_config
from shardwise.model.counts import parameters
from shardwise.model.dimensions import decoder_from_dimensions
from shardwise.model.families import decoder_from_config
from shardwise.model.freezing import FREEZE_KEY, frozen_names, with_frozen_parts
from shardwise.model.hugging_face_cache import cached_config, is_repository_id
from shardwise.model.lora import LORA_KEY, adapted, lora_from_config
from shardwise.model.model import Lora, Model
from shardwise.model.shape import Decoder, GroupedQueryAttentionShape
from shardwise.model.vision import IMAGES_KEY, Images, images_from_config, vision_tower

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
    Hugging Face Hub (`meta-llama/Llama-3.1-8B`): its config is read from the local cache, else it is the
    model of the catalogue with its last part as name. A folder with the name of a catalogue entry needs a
    slash (`./llama-3.1-70b`). ConfigError names the file, the key, the value found and the allowed values.
    """
    name = text.casefold()
    if name in catalogue_names():
        return model_from_config(catalogue_entry(name).config, name=name)
    if not os.path.exists(text) and not _looks_like_path(text):
        raise unknown(
            "is neither a file nor a known model",
            text,
            catalogue_names(),
            key="MODEL",
            found=printable(text) or "nothing",
            allowed="a config.json, its folder, a YAML file, ORG/NAME of the Hugging Face Hub, or a name "
            "that `shardwise models` lists",
        )
    if is_repository_id(text):
        return _model_of_id(text)
    path = os.path.join(text, "config.json") if os.path.isdir(text) else text
    return _model_of_file(path, _name_from_path(path))


def _model_of_id(text: str) -> Model:
    """The model of an id of the Hugging Face Hub, from the local cache or the catalogue."""
    path = cached_config(text)
    if path is not None:
        return _model_of_file(str(path), text)
    name = _name_in_catalogue(text)
    if name is not None:
        return model_from_config(catalogue_entry(name).config, name=name)
    raise ConfigError(
        "is neither a file, nor in the local cache of the Hugging Face Hub, nor in the catalogue",
        key="MODEL",
        found=printable(text),
        allowed=f"any id after `hf download {printable(text)} config.json`",
    )


def _name_in_catalogue(text: str) -> str | None:
    """The catalogue's name for an id: that equal to its last part, else that whose source is the id."""
    last = text.rpartition("/")[2].casefold()
    if last in catalogue_names():
        return last
    at = f"huggingface.co/{text.casefold()}/"
    return next((name for name, entry in catalogue().items() if at in entry.source.casefold()), None)


def _model_of_file(path: str, named: str) -> Model:
    config = read_config(path)
    # `_name_or_path` is a former location of a config; a `name` among dimensions is the user's name for it.
    is_named = bool(config.get("name")) and not any(key in config for key in HUGGING_FACE_KEYS)
    try:
        refuse_other_files(config)
        return model_from_config(config, name=None if is_named else named)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None


def model_from_config(config: Mapping[str, object], *, name: str | None = None) -> Model:
    """The model of a Hugging Face config (with a `model_type`) or of plain dimensions (without).

    `name` defaults to the config's name (`_name_or_path`, or `name` among dimensions). The key `lora` has
    adapters under PEFT's keys, `images` the images of a sequence, for which the vision tower is counted, and
    `freeze` the parts that are not trained. The model's `config` includes the name, so that it rebuilds an
    equal model.
    Raises ConfigError for wrong configs.
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
    parts, adapters = config.get(FREEZE_KEY), config.get(LORA_KEY)
    if parts is not None and adapters is not None:
        raise ConfigError(
            "cannot be combined with adapters, which freeze all weights of the model", key=FREEZE_KEY,
            found=short_repr(parts), allowed=f"{FREEZE_KEY} or {LORA_KEY}",
        )  # fmt: skip
    if parts is not None:
        return with_frozen_parts(model, frozen_names(parts))
    if adapters is None:
        return model
    if not isinstance(adapters, Mapping):
        raise ConfigError(
            "is not a mapping", key=LORA_KEY, found=short_repr(adapters), allowed="r and target_modules"
        )
    try:
        return adapted(model, lora_from_config(adapters))
    except ConfigError as error:
        raise error.within(key=LORA_KEY) from None


def with_lora(model: Model, lora: Lora) -> Model:
    """The same model, trained by these adapters alone. Raises ConfigError where it cannot have them."""
    return model_from_config({**model.config, LORA_KEY: lora.config}, name=model.name)


def with_images(model: Model, images: Images) -> Model:
    """The same model with its vision tower, for sequences with these images. ConfigError where it has none
    that can be counted."""
    return model_from_config({**model.config, IMAGES_KEY: images.config}, name=model.name)


def with_frozen(model: Model, parts: Sequence[str]) -> Model:
    """The same model with these parts frozen. ConfigError where it does not have them."""
    return model_from_config({**model.config, FREEZE_KEY: list(parts)}, name=model.name)


def decoder_of(model: Model) -> Decoder:
    """The decoder (sizes, layer by layer) that the operators of `model` were built from."""
    return _decoder(model.config)[0]


def decoder_config(model: Model) -> Mapping[str, object]:
    """The keys of the config that `decoder_of` read: in a multimodal config those of its text decoder."""
    config = _of_base(model.config)
    is_plain = not any(key in config for key in HUGGING_FACE_KEYS)
    return config if is_plain else text_config(config).config


def _of_base(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config of the model without what a user chose: adapters, images, frozen parts."""
    chosen = {LORA_KEY, IMAGES_KEY, FREEZE_KEY} & {*config}
    return {key: value for key, value in config.items() if key not in chosen} if chosen else config


def has_plain_causal_attention(model: Model, seq_len: int) -> bool:
    """Whether every layer has plain causal attention at `seq_len`: no windows, soft caps or sinks."""
    return not any(
        (shape.attention.window or seq_len) < seq_len or shape.attention.sinks or shape.attention.softcap
        for shape in decoder_of(model).layers
        if isinstance(shape.attention, GroupedQueryAttentionShape)
    )


def _decoder(config: Mapping[str, object]) -> tuple[Decoder, str, str]:
    """The decoder of a config, the key of the config's name, and that name (empty where it has none)."""
    images = config.get(IMAGES_KEY)
    config = _of_base(config)
    if images is not None and not any(key in config for key in HUGGING_FACE_KEYS):
        raise ConfigError(
            "plain dimensions have no vision tower", key=IMAGES_KEY, found=short_repr(images),
            allowed="the config of a vision-language model",
        )  # fmt: skip
    if any(key in config for key in HUGGING_FACE_KEYS):
        fields = Fields(config)
        own = fields.text("_name_or_path", default="") if fields.any("_name_or_path", default="") else ""
        decoder = decoder_from_config(config)
        if images is not None:
            decoder = _with_tower(decoder, config, images_from_config(images))
        return decoder, "_name_or_path", own
    plain = Fields(config)
    own = plain.text("name", default="")
    return decoder_from_dimensions(plain), "name", own


def _with_tower(decoder: Decoder, config: Mapping[str, object], images: Images) -> Decoder:
    tower = vision_tower(config, decoder.hidden, images)
    notes = [note for note in decoder.notes if not note.startswith(TEXT_ALONE)]
    each = f"{tower.images} image{'s' * (tower.images > 1)} a sequence, each of {tower.patches:,} patches"
    notes.append(
        f"{each} that become {tower.tokens:,} tokens; every rank computes the vision tower for all images of"
        " its micro-batch, and recomputes nothing of it"
    )
    return replace(decoder, vision=tower, notes=tuple(notes))


def _looks_like_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith((".json", ".yaml", ".yml"))


def _name_from_path(path: str) -> str:
    """The name of the folder for a config.json, else that of the file without its suffix."""
    resolved = Path(path).absolute()
    name = resolved.parent.name if resolved.name == "config.json" else resolved.stem
    return printable(name)[:MAX_NAME] or "model"
