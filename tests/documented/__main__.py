"""Writes the pages that are generated from the code, and the outputs of documented commands."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.documented.pages import ROOT, pages
from tests.documented.reference import API_PAGE, CLI_PAGE, api_page, cli_page
from tests.documented.running import is_run, rewritten

if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), "utf-8")
    API_PAGE.write_text(api_page(), "utf-8")
    named = [ROOT / Path(name) for name in sys.argv[1:]]
    for page in named or filter(is_run, pages()):
        page.write_text(rewritten(page), "utf-8")
