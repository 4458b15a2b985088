"""Reading a Hugging Face config: spellings, sizes, and the refusal of sizes that nobody understood."""

from __future__ import annotations

import re
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs import REQUIRED, Fields, join_key, nearest, short_repr

MAX_COUNT: Final = 10_000_000
MAX_LAYERS: Final = 10_000

# A key with one of these words in it may change sizes, and is refused where its family does not read it.
SIZE_WORD: Final = re.compile(
    r"(?:^|_)(?:num|n|d|sizes?|dims?|rank|channels|width|depth|heads?|layers?|experts?|moe|lora|bias|vocab"
    r"|window|kv|qk|norm|layernorms?|shared|mtp|nextn|mamba|ssm|conv|state|gated?|inner|embed|embd|hidden|ffn"
    r"|feed|intermediate|tie|tied|config|altup|laurel|types|adapter)(?:_|$)"
)

# Keys with such a word that are known to leave every size alone.
# fmt: off
HARMLESS: Final = frozenset({
    "_name_or_path", "apply_residual_connection_post_layernorm", "bias_dropout_fusion",
    "chunk_size_feed_forward", "compression_config", "cross_attention_hidden_size", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "ep_size", "generation_config", "hidden_act", "hidden_activation",
    "hidden_dropout", "hidden_dropout_prob", "layer_norm_eps", "layer_norm_epsilon", "n_ctx",
    "no_repeat_ngram_size", "norm_eps", "norm_epsilon", "norm_topk_prob", "num_beam_groups", "num_beams",
    "num_labels", "num_logits_to_keep", "num_return_sequences", "output_hidden_states",
    "quantization_config", "rms_norm_eps", "rms_norm_epsilon", "scale_attn_by_inverse_layer_idx",
    "skip_bias_add", "skip_bias_add_qkv",
})
# fmt: on


class ConfigFields(Fields):
    """Fields of a config. Null counts as absent, except in `nullable_count`."""

    def spelling(self, *names: str) -> str:
        """The one of several spellings that is given, else the first; all count as read.

        Raises ConfigError where two are given and differ.
        """
        given = [name for name in names if self.has(name)]
        for other in given[1:]:
            if self.any(other) != self.any(given[0]):
                raise self.error(
                    other,
                    f"contradicts {given[0]}",
                    found=short_repr(self.any(other)),
                    allowed=short_repr(self.any(given[0])),
                )
        return given[0] if given else names[0]

    def count(self, *names: str, default: int | None = None, high: int = MAX_COUNT) -> int:
        """An integer from 1 to `high` under one of the spellings; required where `default` is None."""
        name = self.spelling(*names)
        if default is None and not self.has(name):
            raise self._missing(names)
        return self.integer(name, low=1, high=high, default=REQUIRED if default is None else default)

    def nullable_count(self, name: str, *, absent: int | None, high: int = MAX_COUNT) -> int | None:
        """A count, None where the key is null, `absent` where it is not there."""
        if not self.has(name):
            return None if name in self.names else absent
        return self.count(name, high=high)

    def is_positive(self, name: str, *, default: float = 0.0, high: float = 1.0) -> bool:
        """Whether a rate such as a dropout, or a cap, is above zero."""
        return self.number(name, low=0.0, high=high, default=default) > 0

    def require(self, name: str, value: bool | int, why: str) -> None:
        """The key, where it is given, has this one value."""
        found = self.any(name, default=value)
        if found != value:
            raise self.error(name, why, found=short_repr(found), allowed=short_repr(value))

    def item_error(self, name: str, index: int, message: str, *, found: object, allowed: str) -> ConfigError:
        """A ConfigError located at item `index` of the list at `name`."""
        key = f"{join_key(self.key, name)}[{index}]"
        return ConfigError(message, file=self.file, key=key, found=short_repr(found), allowed=allowed)

    def refuse_unread_sizes(self, family: str) -> None:
        """Refuse by name what may change sizes and was not read; null, false, 0 and empty change nothing."""
        for name in self.unread:
            if name in HARMLESS or not self._mapping[name]:
                continue
            if SIZE_WORD.search(name.lower()):
                guess = nearest(name, [known for known in self._read if known not in self.names])
                hint = f" (did you mean {guess}?)" if guess else ""
                raise self.error(
                    name,
                    f"may change sizes and is not understood for {family}{hint}",
                    found=short_repr(self._mapping[name]),
                    allowed="the sizes that this family has in Transformers",
                )

    def _missing(self, names: tuple[str, ...]) -> ConfigError:
        guess = nearest(names[0], [name for name in self.unread if name not in HARMLESS])
        hint = f" (is {guess} meant?)" if guess else ""
        return self.error(names[0], f"is missing{hint}", allowed="an integer under " + " or ".join(names))
