"""Configs of vision-language models for tests."""

from __future__ import annotations

import json
from typing import Any

QWEN25_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
"""huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json: 8,292,166,656 parameters."""

SMALL_VISION = {
    "hidden_size": 512, "embed_dim": 512, "num_hidden_layers": 4, "depth": 4, "num_attention_heads": 8,
    "num_heads": 8, "intermediate_size": 1536, "mlp_ratio": 3, "image_size": 112, "patch_size": 14,
}  # fmt: skip
SMALL_TEXT = {
    "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip


def small_config(model_type: str) -> Any:
    """A small config of Transformers for a vision-language `model_type`, with images of 8 x 8 patches."""
    import transformers as package

    transformers: Any = package
    config = transformers.AutoConfig.for_model(model_type)
    vision, text = config.vision_config, config.get_text_config()
    is_pair = isinstance(getattr(vision, "patch_size", None), list | tuple)
    for part, small in ((vision, SMALL_VISION), (text, SMALL_TEXT)):
        for key, value in small.items():
            if hasattr(part, key):
                pair = is_pair and key in ("image_size", "patch_size")
                setattr(part, key, [value, value] if pair else value)
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(text, key, None):
            setattr(text, key, getattr(text, key)[:1])
    own: dict[str, Any] = {
        "fullatt_block_indexes": [0, 1, 2, 3],
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 64,
        "out_hidden_size": 1536 if model_type.startswith("glm4v") else 256,
    }
    for key, value in own.items():
        if hasattr(vision, key):
            setattr(vision, key, value)
    if model_type == "qwen2_vl":
        vision.hidden_size = 256
    if model_type == "llama4":
        vision.intermediate_size = 2048
        vision.projector_input_dim = vision.projector_output_dim = vision.vision_output_dim = 256
        text.num_local_experts, text.moe_layers = 2, [0]
    if model_type == "mistral3":
        vision.head_dim = 64
    if model_type == "paligemma":
        text.use_bidirectional_attention = False
        vision.projection_dim = config.projection_dim = 256
    vision._attn_implementation = config._attn_implementation = "sdpa"
    return config


def as_mapping(config: Any) -> dict[str, Any]:
    """The config as a file has it."""
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return found
