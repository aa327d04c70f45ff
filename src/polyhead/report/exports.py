"""Public names of `polyhead.report`."""

from polyhead.report.page import write_page
from polyhead.report.payload import page_of

__all__ = ["page_of", "write_page"]
