"""Operator graphs captured from PyTorch modules: export, translation of ATen operators, checks."""
