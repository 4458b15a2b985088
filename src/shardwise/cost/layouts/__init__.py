"""Operator graphs on a mesh of devices: what every way to lay them out costs, as a chain of choices."""
