"""Signals at random moments to every command that writes files.

Whatever ends a command, a file is complete or absent, its exit code is as documented, and no process of it
lives on. `python -m tests.kill --times 2000` does so at length; `test_kill_commands.py` a few times.
"""
