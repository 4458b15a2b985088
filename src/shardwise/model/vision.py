"""Reads the vision tower of a multimodal config, and its projector: `vision_tower`.

`data/vision_towers.json` says, for each `model_type` of a vision config, which key decides which size, as
files of families do; `data/vision_projectors.json` has the steps from the tower to the language model for
each `model_type` of a whole config. Names in their expressions are keys of the vision config, then of the
whole config, or one of `RESERVED`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, cast

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.model.config_keys import MAX_COUNT, MAX_LAYERS, ConfigFields
from shardwise.model.expressions import InexactDivision, parse_expression
from shardwise.model.family_files import (
    DATA,
    config_class,
    vision_class,
    vision_type,
)
from shardwise.model.shape import (
    EagerModules,
    GroupedQueryAttentionShape,
    LayerShape,
    Mlp,
    Norm,
    ProjectorStep,
    VisionTower,
)

IMAGES_KEY: Final = "images"
"""The key of a model's config that says how many images a sequence has, and their size."""

VISION_KEY: Final = "vision_config"
DEFAULT_PIXELS: Final = 1024
"""Height and width of an image where neither the user nor the tower says it."""

MAX_IMAGES: Final = 100_000
MAX_PIXELS: Final = 65_536

RESERVED: Final = ("hidden", "layers", "heads", "ffn", "patches", "merge", "text_hidden")
"""Names in expressions that are sizes: of the tower, patches of an image, side in patches of what becomes a
token, and width of the language model."""


@dataclass(frozen=True, slots=True)
class Images:
    """How many images a sequence has; `height` and `width` in pixels, None for the default."""

    count: int
    height: int | None = None
    width: int | None = None

    @property
    def config(self) -> dict[str, object]:
        """The same as a value of a config."""
        size = {} if self.height is None else {"height": self.height, "width": self.width}
        return {"count": self.count, **size}


def images_of_text(text: str) -> Images:
    """The images of a text: `2`, or `2@1024x768` with height and width (`2@448`: both). ConfigError for any
    other."""
    allowed = "a number of images, or NUMBER@HEIGHTxWIDTH such as 2@1024x768"
    number, at, size = text.strip().partition("@")
    height, by, width = size.partition("x")
    digits = [number, *([height, width] if by else [height] if at else [])]
    if not all(each.isdecimal() and len(each) < 10 for each in digits):
        raise ConfigError("is not understood", key=IMAGES_KEY, found=short_repr(text), allowed=allowed)
    sizes = {"height": int(height), "width": int(width if by else height)} if at else {}
    return images_from_config({"count": int(number), **sizes})


def images_from_config(value: object) -> Images:
    """The images that a value of a config names: a number, or a mapping with `count`, `height`, `width`."""
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"count": value}
    for key in given:
        if key not in ("count", "height", "width"):
            raise unknown("is not a known key", str(key), ("count", "height", "width"), key=IMAGES_KEY)
    sides = [
        _whole(given.get(key), key, MAX_PIXELS) for key in ("height", "width") if given.get(key) is not None
    ]
    if len(sides) == 1:
        raise ConfigError("has one side", key=IMAGES_KEY, found=short_repr(value), allowed="height and width")
    return Images(_whole(given.get("count"), "count", MAX_IMAGES), *sides)


def _whole(value: object, key: str, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(
            "is not a whole number in range", key=f"{IMAGES_KEY}.{key}", found=short_repr(value),
            allowed=f"1 to {high}",
        )  # fmt: skip
    return value


@cache
def _data(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((DATA / f"vision_{name}.json").read_text("utf-8"))
    return content


def _entry(name: str, of: str) -> Mapping[str, Any]:
    """An entry over the one that it is `like`."""
    own: Mapping[str, Any] = _data(name)[of]
    parent = _entry(name, own["like"]) if "like" in own else {}
    return {**parent, **{key: value for key, value in own.items() if key != "like"}}


def vision_types() -> tuple[str, ...]:
    """The `model_type` of each whole config whose vision tower can be counted, sorted."""
    return tuple(sorted(_data("projectors")))


def has_vision_tower(config: Mapping[str, object]) -> bool:
    """Whether a config has a vision tower that can be counted."""
    return config.get("model_type") in vision_types() and isinstance(config.get(VISION_KEY), Mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionClasses:
    """Names in Transformers: the classes of the layers of tower and decoder (`decoder` empty where it is that
    of its family), and the modules of the parts of a model; those of the projector may be in the tower."""

    tower: str
    decoder: str
    modules: Mapping[str, tuple[str, ...]]


def vision_classes(config: Mapping[str, object]) -> VisionClasses:
    """The names of a whole config that `vision_tower` reads."""
    projector = _entry("projectors", str(config["model_type"]))
    modules = {name: (of,) if isinstance(of, str) else tuple(of) for name, of in projector["modules"].items()}
    tower = _tower_type(config)
    return VisionClasses(
        tower=_entry("towers", tower)["layer_class"],
        decoder=projector.get("decoder_class", ""),
        modules=modules,
    )


def vision_tower(config: Mapping[str, object], text_hidden: int, images: Images) -> VisionTower:
    """The tower of a whole config in front of a language model of width `text_hidden`. ConfigError where it
    has none, or one that is not known."""
    whole, part = config.get("model_type"), config.get(VISION_KEY)
    if not isinstance(part, Mapping):
        raise ConfigError(
            "the model has no vision tower", key=VISION_KEY, found="nothing",
            allowed="a config of a vision-language model, or no images",
        )  # fmt: skip
    if not isinstance(whole, str) or whole not in vision_types():
        raise unknown(
            "is a model whose vision tower cannot be counted", str(whole), vision_types(), key="model_type"
        )
    return _Sizes(config, whole, part, _tower_type(config), text_hidden, images).tower()


def _tower_type(config: Mapping[str, object]) -> str:
    """The `model_type` of the tower: that of the vision config, or where it has none, or that of the whole
    config, that of the class of the whole config."""
    part: Any = config[VISION_KEY]
    whole, own = str(config["model_type"]), part.get("model_type")
    known = [name for name in _data("towers") if not name.startswith("_")]
    tower = vision_type(whole) if own is None or own == whole else own
    if not isinstance(tower, str) or tower not in known:
        raise unknown(
            "is a vision tower that cannot be counted", str(own), known, key=f"{VISION_KEY}.model_type",
            found=short_repr(own),
        )  # fmt: skip
    return tower


class _Sizes:
    """Evaluates the expressions of a tower and of its projector."""

    def __init__(
        self, config: Mapping[str, object], whole: str, part: Mapping[str, object], tower: str,
        text_hidden: int, images: Images,
    ) -> None:  # fmt: skip
        of_tower, of_whole = vision_class(tower), config_class(whole)
        self._sizes, self._projector = _entry("towers", tower), _entry("projectors", whole)
        self._part = ConfigFields(
            part, key=VISION_KEY, defaults=of_tower.defaults,
            spellings={name: (other,) for other, name in of_tower.spellings.items()},
        )  # fmt: skip
        self._whole = ConfigFields(config, defaults={} if of_whole is None else of_whole.defaults)
        self._own_keys = {*of_tower.defaults, *part}
        self._type, self._defaults = tower, of_tower.defaults
        self._images = images
        self._known: dict[str, Any] = {"text_hidden": text_hidden}

    def tower(self) -> VisionTower:
        known, value, count = self._known, self.value, self.count
        known["hidden"], known["heads"] = count("hidden"), count("heads")
        known["layers"], known["ffn"] = count("layers", high=MAX_LAYERS), count("ffn")
        known["merge"] = self.count("merge", self._projector)
        height, width = self._grid()
        known["patches"] = height * width
        tokens = self.count("tokens", self._projector)
        patches = height * width + bool(value("class_token"))
        norm = cast("Norm", value("norm"))
        unused = int(value("unused") or 0) + int(self.value("unused", self._projector) or 0)
        found = VisionTower(
            hidden=known["hidden"],
            text_hidden=known["text_hidden"],
            images=self._images.count,
            patches=patches,
            tokens=tokens,
            patch_elements=count("channels") * count("patch_size") ** 2,
            patch_bias=bool(value("patch_bias")),
            norm=norm,
            layers=self._layers(norm, patches),
            layer_scale=bool(value("layer_scale")),
            positions=count("positions", low=0),
            class_token=bool(value("class_token")),
            first_norm=bool(value("first_norm")),
            last_norm=bool(value("last_norm")),
            unused=unused,
            projector=tuple(self._step(step) for step in self._projector["steps"]),
        )
        for key in self._sizes["ignored"]:
            self._part.is_given(key)
        self._part.refuse_unread_sizes(f"the tower {self._type}", self._defaults)
        return found

    def _grid(self) -> tuple[int, int]:
        """Patches of an image by height and width: of the tower's fixed size, or of the user's rounded to
        whole tokens."""
        patch = self.count("patch_size")
        if "image_size" in self._sizes:
            fixed, height = self.count("image_size"), self._images.height
            if height is not None and (height, self._images.width) != (fixed, fixed):
                raise ConfigError(
                    "is not the size of this tower's images", key=IMAGES_KEY,
                    found=f"{height}x{self._images.width}", allowed=f"{fixed}x{fixed}, or no size",
                )  # fmt: skip
            return fixed // patch, fixed // patch
        multiple = self.count("multiple")
        sides = (self._images.height or DEFAULT_PIXELS, self._images.width or DEFAULT_PIXELS)
        height, width = (max((side + multiple // 2) // multiple, 1) * multiple // patch for side in sides)
        return height, width

    def _layers(self, norm: Norm, patches: int) -> tuple[tuple[LayerShape, int, int], ...]:
        """All layers, with those of windows apart from those in which all patches attend to each other."""
        heads = self.count("heads")
        attention = GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=self.count("head_dim"),
            qkv_bias=bool(self.value("qkv_bias")),
            out_bias=bool(self.value("out_bias")),
            qk_norm=bool(self.value("qk_norm")),
            qk_norm_kind="full",
            rotary=bool(self.value("rotary")),
        )
        mlp = Mlp(ffn=self.count("ffn"), gated=bool(self.value("gated")), bias=bool(self.value("mlp_bias")))
        # Views of joined queries, keys and values keep all of them, and the output is copied.
        is_fused = bool(self.value("fused_qkv"))
        eager = EagerModules(
            activation=int(self.value("more_activations") or 0), fused_qkv=is_fused, copied_output=is_fused
        )
        shape = LayerShape(
            hidden=self.count("hidden"), norm=norm, norm_placement="pre", attention=attention, mlp=mlp,
            eager=eager,
        )  # fmt: skip
        layers = self.count("layers", high=MAX_LAYERS)
        if "window" not in self._sizes:
            return ((shape, patches, layers),)
        full, window = self.count("full_layers", low=0, high=layers), self.count("window")
        parts = ((shape, min(window * window, patches), layers - full), (shape, patches, full))
        return tuple(part for part in parts if part[2])

    def _step(self, step: Mapping[str, Any]) -> ProjectorStep:
        k, n = step.get("product", [step.get("width", step.get("activation")), 0])
        return ProjectorStep(
            kind="product" if "product" in step else "norm" if "norm" in step else "activation",
            k=self._count(k, "width"),
            n=self._count(n, "width", low=0),
            norm=cast("Norm", self._of(step.get("norm", "'layer'"))),
            bias=bool(self._of(step.get("bias", False))),
            rows=cast('Literal["patches", "images"]', step.get("rows", "images")),
            times=self._count(step.get("times", 1), "times", low=0),
        )

    def value(self, size: str, of: Mapping[str, Any] | None = None) -> Any:
        """The value of a size, None where the tower does not have it."""
        return self._of((self._sizes if of is None else of).get(size), size)

    def count(
        self, size: str, of: Mapping[str, Any] | None = None, *, low: int = 1, high: int = MAX_COUNT
    ) -> int:
        if size in self._known and of is None:
            return int(self._known[size])
        return self._count((self._sizes if of is None else of)[size], size, low=low, high=high)

    def _count(self, text: object, size: str, *, low: int = 1, high: int = MAX_COUNT) -> int:
        value = self._of(text, size)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # height and width of a square
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value % 1
            or not low <= value <= high
        ):
            raise ConfigError(
                "is not a whole number in range", key=f"{VISION_KEY}: {text}", found=short_repr(value),
                allowed=f"{low} to {high}",
            )  # fmt: skip
        return int(value)

    def _of(self, text: object, size: str = "") -> Any:
        if not isinstance(text, str):
            return text
        try:
            return parse_expression(text).value(self._lookup)
        except (ArithmeticError, AttributeError, InexactDivision, LookupError, TypeError, ValueError):
            raise ConfigError(
                "is not supported with the other keys", key=VISION_KEY, found=size or text, allowed=text
            ) from None

    def _lookup(self, name: str) -> Any:
        if name in RESERVED:
            return self._known[name]
        fields = self._part if name in self._own_keys else self._whole
        if name not in ("patch_size", "image_size"):
            return fields.value(name)
        given = fields.any(name, default=None)  # of both sides, or a list of height and width
        value = fields.default(name) if given is None else given
        return value[0] if isinstance(value, list) and len({*value}) == 1 else value
