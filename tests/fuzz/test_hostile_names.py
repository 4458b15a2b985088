"""Names with a line break, a tab, U+2028 or an escape in every place of every input: an error is one line,
whatever it quotes; and so it is where the name of the file has one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fuzz.readers import Reader, readers
from tests.fuzz.runner import judged

READERS = readers()

NAME = "a\nb\tc\u2028d\x85e\x1b[31m"

PLACES = {"checked plan": 6, "rehashed plan": 12, "plan": 12, "graph": 20}
"""Places of a text that are changed for a slow reader; 60 for others."""


def parsed(text: str) -> Any:
    """The mapping or list that a text is; None where it is neither."""
    try:
        value = json.loads(text) if text.lstrip().startswith(("{", "[")) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return None
    return value if isinstance(value, dict | list) else None


def renamed(value: Any) -> Iterator[Any]:
    """The value with NAME instead of one key, or of one text, for each in turn."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield {NAME if other == key else other: each for other, each in value.items()}
            yield from ({**value, key: changed} for changed in renamed(one))
    elif isinstance(value, list):
        for place, one in enumerate(value[:3]):
            yield from ([*value[:place], changed, *value[place + 1 :]] for changed in renamed(one))
    elif isinstance(value, str):
        yield NAME


def hostile(reader: Reader) -> Iterator[str]:
    """The first text of a reader with a hostile name in one place, for each in turn."""
    text = reader.seeds()[0]
    value = parsed(text)
    if value is not None:
        is_json = text.lstrip().startswith(("{", "["))
        for changed in renamed(value):
            yield json.dumps(changed) if is_json else yaml.safe_dump(changed, sort_keys=False)
    for word in dict.fromkeys(text.replace(",", " ").replace("=", " ").split()):
        for sign in ("\t", "\u2028", "\x1b"):
            yield text.replace(word, f"{word[:1]}{sign}{word[1:]}", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_an_error_is_one_line_whatever_the_name(tmp_path: Path, name: str) -> None:
    texts = list(islice(hostile(READERS[name]), PLACES.get(name, 60)))
    assert len(texts) >= 3
    faults = [fault for text in texts if (fault := judged(READERS[name], text, tmp_path)[0])]
    assert faults == []


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.suffix])
def test_an_error_is_one_line_whatever_the_name_of_the_file(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    suffix = f"-a\nb\tc\u2028d\x1b[31m{reader.suffix}"
    fault, refused = judged(replace(reader, suffix=suffix), "\x00{", tmp_path)
    assert fault == "" and refused
