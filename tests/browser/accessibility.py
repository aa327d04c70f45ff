"""Violations of accessibility rules that axe finds in a page."""

from __future__ import annotations

from functools import cache
from typing import Any

SERIOUS = ("serious", "critical")
# What passes is not listed node by node, which takes most of the time.
ONLY = {"resultTypes": ["violations"]}


@cache
def _script() -> str:
    from axe_playwright_python.sync_playwright import Axe

    return Axe().axe_script


def serious_violations(tab: Any) -> list[str]:
    """Return each serious violation of any of axe's rules, with its element; axe is loaded once a page."""
    if tab.evaluate("typeof axe") == "undefined":
        tab.evaluate(_script())
    found = tab.evaluate("(options) => axe.run(document, options)", ONLY)["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]}" for rule in found if rule["impact"] in SERIOUS for node in rule["nodes"]
    ]
