"""Exports plans to other training software, and reads back how that software understands them."""

__all__: list[str] = []
