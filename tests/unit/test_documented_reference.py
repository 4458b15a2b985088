"""docs/reference/cli.md and docs/reference/api.md equal the generated pages."""

from __future__ import annotations

from tests.documented.reference import API_PAGE, CLI_PAGE, api_page, cli_page

import shardwise
from shardwise.app.cli.commands import command

REMAKE = "out of date: python -m tests.documented"


def test_command_line_is_up_to_date() -> None:
    assert CLI_PAGE.read_text("utf-8") == cli_page(), REMAKE


def test_python_interface_is_up_to_date() -> None:
    assert API_PAGE.read_text("utf-8") == api_page(), REMAKE


def test_every_command_and_name_is_there() -> None:
    page = cli_page()
    for name, node in command().commands.items():
        assert (f"\n## shardwise {name}" in page) != node.hidden
    assert all(f"\n## {name}\n" in api_page() for name in shardwise.__all__)
