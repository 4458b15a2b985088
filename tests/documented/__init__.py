"""The commands and outputs that README.md and docs/ show, and the pages that are generated from the code.

`python -m tests.documented` writes these pages and the present outputs of the commands.
"""
