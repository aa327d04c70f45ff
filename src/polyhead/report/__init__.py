"""An inspection as a page: one self-contained HTML file that opens anywhere."""

from polyhead.report.page import write_page
from polyhead.report.payload import page_of

__all__ = ["page_of", "write_page"]
