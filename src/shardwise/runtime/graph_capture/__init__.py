"""Captures PyTorch modules as operator graphs: export, translation of ATen calls, checks."""
