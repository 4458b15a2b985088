"""Vision towers: patches, tokens, work and frozen parts are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.model.vision_configs import QWEN25_VL_7B

from shardwise.errors import ConfigError
from shardwise.model import (
    Images,
    images_of_text,
    model_flop_per_token,
    model_from_config,
    parameters,
    trained_parameters,
)
from shardwise.operators import is_forward_only


def test_a_published_model_has_its_published_size() -> None:
    """8.29 billion, of which the text decoder has 7.62; and of an image of 448 x 448 pixels 32 x 32 patches,
    of which each square of 2 x 2 becomes a token."""
    assert parameters(model_from_config(QWEN25_VL_7B)) == 7_615_616_512
    model = model_from_config({**QWEN25_VL_7B, "images": {"count": 2, "height": 448, "width": 448}})
    assert parameters(model) == 8_292_166_656
    assert (model.patches, model.image_tokens) == (2 * 32 * 32, 2 * 16 * 16)
    # Sides are rounded to whole tokens, of 28 pixels: 1024 -> 37 x 28, so 74 x 74 patches.
    default = model_from_config({**QWEN25_VL_7B, "images": 1})
    assert (default.patches, default.image_tokens) == (74 * 74, 37 * 37)
    assert any(note.startswith("1 image a sequence, each of 5,476 patches") for note in default.notes)


def test_without_images_the_text_decoder_alone_is_counted() -> None:
    (note,) = model_from_config(QWEN25_VL_7B).notes
    assert note == (
        "the text decoder alone is counted, without vision_config; --images 1 counts its vision tower"
    )


FLOP_OF_A_PATCH = (
    2 * 1176 * 1280  # embedding of 3 x 2 x 14 x 14 numbers
    + 32 * (2 * (4 * 1280 * 1280) + 2 * 3 * 1280 * 3420)  # projections of attention, gated MLP
    + 28 * 2 * 16 * 160 * 64  # scores and values over windows of 8 x 8 patches
    + 4 * 2 * 16 * 160 * 1024  # and over whole images
)
FLOP_OF_A_TOKEN = 2 * (5120 * 5120 + 5120 * 3584)  # the projector


def test_work_by_hand() -> None:
    """The forward pass once, the gradients of inputs and of weights once each; attention has none of weights,
    its backward pass is twice the forward."""
    images = {"count": 1, "height": 448, "width": 448}
    text = model_flop_per_token(model_from_config(QWEN25_VL_7B), 4096) * 4096
    for frozen, passes_of_tower, passes_of_projector in (
        ([], 3, 3), (["vision"], 1, 3), (["vision", "projector"], 1, 1),
    ):  # fmt: skip
        given = {**QWEN25_VL_7B, "images": images, **({"freeze": frozen} if frozen else {})}
        found = model_flop_per_token(model_from_config(given), 4096) * 4096 - text
        expected = 1024 * FLOP_OF_A_PATCH * passes_of_tower + 256 * FLOP_OF_A_TOKEN * passes_of_projector
        assert found == pytest.approx(expected, rel=1e-9)


def test_what_is_before_all_trained_weights_has_no_backward_pass() -> None:
    given = {**QWEN25_VL_7B, "images": 1}
    tower = 8_292_166_656 - 7_615_616_512 - projector_elements()
    frozen = model_from_config({**given, "freeze": ["vision"]})
    assert trained_parameters(frozen) == 8_292_166_656 - tower
    assert all(is_forward_only(one) for one in frozen.embedding if one.name.startswith("vision."))
    assert not any(one.saved for one in frozen.embedding if one.name.startswith("vision."))
    assert not any(is_forward_only(one) for one in frozen.embedding if one.name.startswith("projector."))
    language = model_from_config({**given, "freeze": ["language"]})
    assert trained_parameters(language) == 8_292_166_656 - 7_615_616_512
    assert not any(is_forward_only(one) for one in language.embedding)
    # Adapters freeze all of both.
    adapted = model_from_config({**given, "lora": {"r": 8}})
    own = [one for one in adapted.embedding if one.name.startswith(("vision.", "projector."))]
    assert all(map(is_forward_only, own))


def projector_elements() -> int:
    """A norm of 1280, and products of 5120 x 5120 and 5120 x 3584 with biases."""
    return 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"images": 0}, "images.count", "is not a whole number in range"),
        ({"images": True}, "images.count", "is not a whole number in range"),
        ({"images": {"count": 1, "height": 28}}, "images", "has one side"),
        ({"images": {"number": 1}}, "images", "is not a known key"),
        ({"images": 1, "freeze": ["visual"]}, "freeze", "is no part of a model"),
        ({"freeze": ["vision"]}, "freeze", "the model has no vision tower that is counted"),
        ({"freeze": ["language"]}, "freeze", "nothing is trained"),
        ({"images": 1, "freeze": ["vision", "projector", "language"]}, "freeze", "nothing is trained"),
        ({"images": 1, "freeze": []}, "freeze", "is no list of parts"),
        ({"images": 1, "freeze": ["vision"], "lora": {"r": 8}}, "freeze", "cannot be combined with adapters"),
        ({"images": 1, "vision_config": None}, "vision_config", "the model has no vision tower"),
        ({"images": 1, "model_type": "qwen2"}, "model_type", "is a model whose vision tower cannot be"),
        (
            {"images": 1, "vision_config": {**QWEN25_VL_7B["vision_config"], "model_type": "radio"}},
            "vision_config.model_type",
            "is a vision tower that cannot be counted",
        ),
        (
            {"images": 1, "vision_config": {**QWEN25_VL_7B["vision_config"], "model_type": ["clip"]}},
            "vision_config.model_type",
            "is a vision tower that cannot be counted",
        ),
        (
            {"images": 1, "vision_config": {**QWEN25_VL_7B["vision_config"], "model_type": "qwen9_vl"}},
            "vision_config.model_type",
            "is a vision tower that cannot be counted",
        ),
        (
            {"images": 1, "vision_config": {**QWEN25_VL_7B["vision_config"], "num_experts": 8}},
            "vision_config.num_experts",
            "may change sizes and is not supported",
        ),
        (
            {"images": 1, "vision_config": {**QWEN25_VL_7B["vision_config"], "num_heads": 7}},
            "vision_config",
            "is not supported with the other keys",
        ),
    ],
    ids=[
        "none",
        "no number",
        "one side",
        "unknown key",
        "unknown part",
        "no tower",
        "all of a text model",
        "all",
        "no part",
        "with adapters",
        "no vision config",
        "no vision model",
        "unknown tower",
        "a list for a tower",
        "another tower",
        "unknown key of the tower",
        "heads",
    ],
)
def test_wrong_choices_are_refused(change: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_from_config({**QWEN25_VL_7B, **change})
    assert error.value.key == key and error.value.message.startswith(message)


def test_dimensions_have_no_images() -> None:
    plain = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "images": 1}
    with pytest.raises(ConfigError, match="plain dimensions have no vision tower"):
        model_from_config(plain)


def test_towers_of_fixed_size_have_no_other() -> None:
    llava = {
        "model_type": "llava",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "text_config": {"model_type": "llama"},
    }
    model = model_from_config({**llava, "images": {"count": 3, "height": 336, "width": 336}})
    # 24 x 24 patches and a class token, which the language model does not get.
    assert (model.patches, model.image_tokens) == (3 * 577, 3 * 576)
    with pytest.raises(ConfigError) as error:
        model_from_config({**llava, "images": {"count": 1, "height": 448, "width": 448}})
    assert error.value.allowed == "336x336, or no size"


def test_texts() -> None:
    assert images_of_text("2") == Images(2)
    assert images_of_text("3@1024x768") == Images(3, 1024, 768)
    assert images_of_text("1@448") == Images(1, 448, 448)
    for wrong in ("", "two", "1@", "1@448x", "-1", "1@axb"):
        with pytest.raises(ConfigError):
            images_of_text(wrong)
