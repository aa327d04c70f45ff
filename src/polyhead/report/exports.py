"""Public names of `polyhead.report`."""

from polyhead.report.page import write_page as write_page
from polyhead.report.payload import page_of as page_of
