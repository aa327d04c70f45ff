"""polyhead: multi-head attention you can run, watch and reshape, one head at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports
from polyhead.version import VERSION

if TYPE_CHECKING:
    from polyhead.exports import *

__version__ = VERSION
__getattr__, __dir__ = lazy_exports(__name__)
