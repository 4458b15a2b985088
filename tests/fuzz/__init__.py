"""Mutated inputs through every reader of shardwise.

A reader gives a value, or refuses its input with one error of one line; any other exception is a fault.
`python -m tests.fuzz --seconds 60` runs all readers; `test_fuzz_readers.py` a fixed number of inputs.
"""
