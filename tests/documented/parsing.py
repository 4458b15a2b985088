"""Parses command lines with the parser of `shardwise`, without running them."""

from __future__ import annotations

from typing import Any

from shardwise.app.cli.commands import command

NESTED = {"emulate": [], "launch": ["train", "PLAN"]}
"""Commands whose words after `--` are a command line of `shardwise`, with the words to put before them; an
empty list means that they begin with `shardwise` themselves. After `launch --target` they are those of other
software.
"""


def check(words: list[str], *, is_partial: bool) -> None:
    """Raises the parser's error for a command or option that does not exist.

    Arguments may be missing if `is_partial`.
    """
    _check(command(), "shardwise", words, None, is_partial)


def _check(node: Any, name: str, words: list[str], parent: Any, is_partial: bool) -> None:
    if hasattr(node, "commands"):
        assert words and words[0] in node.commands, f"{name} has no command {' '.join(words[:1])!r}"
        context = node.make_context(name, [], parent=parent, resilient_parsing=True)
        _check(node.commands[words[0]], words[0], words[1:], context, is_partial)
        return
    nested: list[str] = []
    if name in NESTED and "--" in words:
        at = words.index("--")
        words, nested = words[:at], words[at + 1 :]
        if nested[:1] == ["shardwise"]:
            check(nested[1:], is_partial=is_partial)
        elif NESTED[name] and "--target" not in words:
            check([*NESTED[name], *nested], is_partial=is_partial)
    given = [word for word in words if word not in ("...", "…")]
    try:
        node.make_context(name, given, parent=parent)
    except Exception as error:
        if not (is_partial and type(error).__name__ == "MissingParameter"):
            raise
