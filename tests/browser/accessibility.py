"""Violations of accessibility rules, found by axe."""

from __future__ import annotations

from functools import cache
from typing import Any

SERIOUS = ("serious", "critical")
# Passed rules are not listed per node, which would take most of the time.
ONLY = {"resultTypes": ["violations"]}
# Rules about languages, names and text alternatives, which a translation can break.
OF_WORDS = ("cat.language", "cat.name-role-value", "cat.forms", "cat.text-alternatives")
# One of the elements that have words of their own for each tag, class, colour and size of the words, and everything
# that is painted behind them. Contrast takes three quarters of axe's time, so much for each element.
ONE_OF_A_KIND = """() => {
  const kinds = new Map();
  for (const element of document.body.querySelectorAll("*")) {
    if (![...element.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim())) continue;
    const { color, fill, fontSize, fontWeight } = getComputedStyle(element);
    const kind = [element.getAttribute("class"), color, fill, fontSize, fontWeight];
    for (let at = element; at; at = at.parentElement) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(at);
      kind.push(at.tagName, backgroundColor, backgroundImage, opacity);
    }
    if (!kinds.has(kind.join())) kinds.set(kind.join(), element);
  }
  return [...kinds.values()];
}"""


@cache
def _script() -> str:
    from axe_playwright_python.sync_playwright import Axe

    return Axe().axe_script


def serious_violations(tab: Any) -> list[str]:
    """Return each serious violation of any of axe's rules, with its element."""
    return _violations(tab, "document", {})


def bad_contrasts(tab: Any) -> list[str]:
    """Return the kinds of elements with insufficient contrast, which another colour scheme can break."""
    assert tab.evaluate(f"({ONE_OF_A_KIND})().length") > 10
    return _violations(tab, f"({ONE_OF_A_KIND})()", {"runOnly": ["color-contrast"]})


def bad_words(tab: Any) -> list[str]:
    """Return the serious violations of rules about languages, names and texts, which another language can break."""
    return _violations(tab, "document", {"runOnly": list(OF_WORDS)})


def violations_in_dark_and_chinese(opened: Any) -> list[str]:
    """Switch the page to dark and then to Chinese, and return the violations that each can cause."""
    tab = opened.tab
    opened.of.change_scheme("dark")
    tab.locator("html[data-theme=dark]").wait_for()
    found = bad_contrasts(tab)
    tab.get_by_label("Language").select_option("zh")
    assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
    return found + bad_words(tab)


def _violations(tab: Any, context: str, options: dict[str, Any]) -> list[str]:
    """Run axe on a part of the page; it is loaded once a page."""
    if tab.evaluate("typeof axe") == "undefined":
        tab.evaluate(_script())
    found = tab.evaluate(f"(options) => axe.run({context}, options)", {**ONLY, **options})["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]}" for rule in found if rule["impact"] in SERIOUS for node in rule["nodes"]
    ]
