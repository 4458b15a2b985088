"""Text that the font of a picture can draw: it has no letters of Chinese, Japanese or Korean, nor emoji."""

from __future__ import annotations

import unicodedata
from functools import cache


def drawable(text: str) -> str:
    """`text` with every character that the font lacks as its escape: matplotlib would warn, and draw a box.

    Pages show names as they are; only pictures have escapes. The same text gives the same picture on every
    machine, because no other font is searched for.
    """
    if text.isascii() and text.isprintable():
        return text
    known = _characters()
    return "".join(
        sign if ord(sign) in known and unicodedata.category(sign)[0] != "C" else ascii(sign)[1:-1]
        for sign in text
    )


@cache
def _characters() -> frozenset[int]:
    """The code points that both weights of matplotlib's own font have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    found = [get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight))) for weight in (400, 700)]
    return frozenset(found[0].get_charmap()) & frozenset(found[1].get_charmap())
