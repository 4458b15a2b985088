"""The command line: parses arguments, calls the library, prints. `main` is the command `shardwise`."""

from shardwise.app.cli.main import main

__all__ = ["main"]
