"""`ConfigFields`: reads the keys of a Hugging Face config, with the spellings and defaults of its class.

It records the keys that were read. `refuse_unread_sizes` rejects a config with a key that may change sizes
and was not read, unless it has the default value of the configuration class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, join_key, misspelt, nearest, short_repr, unknown
from shardwise.model.family_files import common_keys

MAX_COUNT: Final = 10_000_000
MAX_LAYERS: Final = 10_000
MAX_EXPERTS: Final = 100_000
MAX_SEQ_LEN: Final = 10**9

# A key with one of these words may change sizes; it is an error where its family does not read it.
SIZE_WORD: Final = re.compile(
    r"(?:^|_)(?:num|n|d|sizes?|dims?|rank|channels|width|depth|heads?|layers?|experts?|moe|lora|bias|vocab"
    r"|window|kv|qk|norm|layernorms?|shared|mtp|nextn|mamba|ssm|conv|state|gated?|inner|embed|embd|hidden|ffn"
    r"|feed|intermediate|tie|tied|config|altup|laurel|types|adapter)(?:_|$)"
)


@cache
def _harmless() -> frozenset[str]:
    """Keys with such a word that do not change sizes."""
    return frozenset(key for keys in common_keys()["harmless"].values() for key in keys)


class ConfigFields(Fields):
    """Fields of a config. Null counts as absent, except where the default or `nullable` makes it a value.

    `defaults` are those of the configuration class and of the family; `spellings` are the other spellings of
    a key. A key of `required` has no default.
    """

    def __init__(
        self,
        mapping: Mapping[str, object],
        *,
        key: str = "",
        defaults: Mapping[str, object] | None = None,
        spellings: Mapping[str, Sequence[str]] | None = None,
        required: Collection[str] = (),
    ) -> None:
        super().__init__(mapping, key=key)
        self._defaults = defaults or {}
        self._spellings = spellings or {}
        self._required = required

    def spelling(self, name: str) -> str:
        """The spelling of `name` that the config has, else `name`; all spellings count as read.

        Raises ConfigError where the config has two spellings with different values.
        """
        given = [each for each in (name, *self._spellings.get(name, ())) if self.has(each)]
        for other in given[1:]:
            if self.any(other) != self.any(given[0]):
                raise self.error(
                    other,
                    f"contradicts {given[0]}",
                    found=short_repr(self.any(other)),
                    allowed=short_repr(self.any(given[0])),
                )
        return given[0] if given else name

    def value(self, name: str) -> Any:
        """The value of `name`, of the type of its default; the default where the config has none."""
        given, default = self.spelling(name), self._defaults.get(name)
        if not self.has(given):
            is_null = any(each in self.names for each in (name, *self._spellings.get(name, ())))
            if name in self._required and not (is_null and name in common_keys()["nullable"]):
                raise self._missing((name, *self._spellings.get(name, ())))
            return None if is_null and name in common_keys()["nullable"] else default
        if isinstance(default, bool):
            return self.boolean(given)
        if isinstance(default, int) and isinstance(self.any(given), list):
            return self.sequence(given)  # one value for each layer
        if isinstance(default, int):
            return self.integer(given)
        if isinstance(default, float):
            return self.number(given, low=-1e30)
        return self.sequence(given) if isinstance(default, list) else self.any(given)

    def default(self, name: str) -> Any:
        """The default of `name`; None where there is none."""
        return self._defaults.get(name)

    def is_given(self, name: str) -> bool:
        """Whether the config has `name`, in any spelling, with a value other than null."""
        return any([self.has(each) for each in (name, *self._spellings.get(name, ()))])

    def item_error(self, name: str, index: int, message: str, *, found: object, allowed: str) -> ConfigError:
        """A ConfigError located at item `index` of the list at `name`."""
        key = f"{join_key(self.key, name)}[{index}]"
        return ConfigError(message, file=self.file, key=key, found=short_repr(found), allowed=allowed)

    def refuse_unread_sizes(self, family: str, class_defaults: Mapping[str, object]) -> list[str]:
        """Raises ConfigError for a key that may change sizes and was not read.

        A key changes nothing where it has its value in `class_defaults`, or is null, false, 0 or empty and
        the class does not have it. Returns notes on keys with a value that were ignored.
        """
        notes = [
            f"{name} is ignored: {why}"
            for name, why in common_keys()["markers"].items()
            if name in self.unread and self.any(name, default=None)
        ]
        absent = [name for name in self._read if name not in self.names]
        for name in self.unread:
            if name in _harmless():
                continue
            if name not in class_defaults and (meant := misspelt(name, absent)):
                raise unknown(
                    "is not a known key",
                    name,
                    absent,
                    file=self.file,
                    key=join_key(self.key, name),
                    found=None,
                    guess=meant,
                )
            if not SIZE_WORD.search(name.lower()):
                continue
            found = self._mapping[name]
            if name in class_defaults and (found is None or found == class_defaults[name]):
                if found:
                    notes.append(f"{name} is ignored: {short_repr(found)} is its default")
                continue
            if not found and name not in class_defaults:
                continue
            raise self._unread_size(name, family, class_defaults)
        return notes

    def _unread_size(self, name: str, family: str, class_defaults: Mapping[str, object]) -> ConfigError:
        allowed = "the sizes that this family has in Transformers"
        if name in class_defaults:
            allowed = f"{short_repr(class_defaults[name])}, the default, or no such key"
        return unknown(
            f"may change sizes and is not supported for {family}",
            name,
            [known for known in self._read if known not in self.names],
            file=self.file,
            key=join_key(self.key, name),
            found=short_repr(self._mapping[name]),
            allowed=allowed,
        )

    def _missing(self, names: Iterable[str]) -> ConfigError:
        first, *_ = names
        guess = nearest(first, [name for name in self.unread if name not in _harmless()])
        hint = f" (is {guess} meant?)" if guess else ""
        return self.error(first, f"is missing{hint}", allowed="a value under " + " or ".join(names))
