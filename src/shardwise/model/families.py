"""The families of Hugging Face configs, by `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from shardwise.inputs import nearest, short_repr
from shardwise.model import classic_families, expert_families, gated_families
from shardwise.model.config_fields import ConfigFields
from shardwise.model.shape import Decoder

FAMILIES: Final[Mapping[str, Callable[[ConfigFields], Decoder]]] = MappingProxyType(
    {
        "bloom": classic_families.bloom,
        "deepseek_v2": expert_families.deepseek_v2,
        "deepseek_v3": expert_families.deepseek_v3,
        "falcon": classic_families.falcon,
        "gemma2": gated_families.gemma2,
        "gemma3": gated_families.gemma3,
        "gemma3_text": gated_families.gemma3,
        "gpt2": classic_families.gpt2,
        "gpt_neox": classic_families.gpt_neox,
        "gpt_oss": expert_families.gpt_oss,
        "llama": gated_families.llama,
        "mistral": gated_families.mistral,
        "mixtral": expert_families.mixtral,
        "opt": classic_families.opt,
        "phi3": gated_families.phi3,
        "qwen2": gated_families.qwen2,
        "qwen3": gated_families.qwen3,
        "qwen3_moe": expert_families.qwen3_moe,
    }
)


def decoder_from_config(fields: ConfigFields) -> Decoder:
    """Sizes from a config with a `model_type`; ConfigError for an unknown one and for wrong keys."""
    family = fields.any("model_type", allowed=", ".join(FAMILIES))
    if not isinstance(family, str) or family not in FAMILIES:
        guess = nearest(family, FAMILIES) if isinstance(family, str) else None
        hint = f" (did you mean {guess}?)" if guess else ""
        raise fields.error(
            "model_type",
            f"is not a known family{hint}",
            found=short_repr(family),
            allowed=", ".join(FAMILIES),
        )
    decoder = FAMILIES[family](fields)
    fields.refuse_unread_sizes(family)
    return decoder
