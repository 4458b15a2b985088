"""The commands and outputs that README.md and docs/ show, and the pages that are made from the code.

`python -m tests.documented` writes these pages anew, and the outputs as the commands print them today.
"""
