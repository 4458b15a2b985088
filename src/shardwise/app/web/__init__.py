"""The report of plans: one self-contained HTML page (`report_page`) over one JSON document
(`report_document`); and pages of other answers with the same parts (`page_of`)."""

from shardwise.app.web.document import measured_report_document, report_document, timeline_page_document
from shardwise.app.web.page import page_of, page_suffix_checked, report_page

__all__ = [
    "measured_report_document",
    "page_of",
    "page_suffix_checked",
    "report_document",
    "report_page",
    "timeline_page_document",
]
