"""Violations of accessibility rules, found by axe."""

from __future__ import annotations

from functools import cache
from typing import Any

SERIOUS = ("serious", "critical")
# Passed rules are not listed per node, which would take most of the time; no rule needs a style sheet or a video.
ONLY = {"resultTypes": ["violations"], "preload": False}
# Rules about languages, names and text alternatives, which a translation can break.
OF_WORDS = ("cat.language", "cat.name-role-value", "cat.forms", "cat.text-alternatives")
# Visible elements with words of their own, one for each tag, class, colour and size of the words, and everything that
# is painted behind them, without those returned before in this page: contrast takes three quarters of axe's time, so
# much for each element. axe does not judge a single character or what is disabled, which are kinds of their own.
NEW_KINDS = """() => {
  const measured = (window.measuredKinds ??= new Set());
  return [...document.body.querySelectorAll("*")].filter((element) => {
    const texts = [...element.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE);
    const words = texts.map((text) => text.data.trim()).join("");
    if (!words || !element.checkVisibility({ visibilityProperty: true })) return false;
    const { color, fill, fontSize, fontWeight } = getComputedStyle(element);
    const kind = [element.getAttribute("class"), color, fill, fontSize, fontWeight, words.length > 1];
    for (let at = element; at; at = at.parentElement) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(at);
      kind.push(at.tagName, backgroundColor, backgroundImage, opacity, at.matches(":disabled, [aria-disabled=true]"));
    }
    const before = measured.size;
    return measured.add(kind.join()).size > before;
  });
}"""


@cache
def _script() -> str:
    from axe_playwright_python.sync_playwright import Axe

    return Axe().axe_script


def serious_violations(tab: Any) -> list[str]:
    """Return each serious violation of any of axe's rules, with its element."""
    return _violations(tab, "document", {"rules": {"color-contrast": {"enabled": False}}}) + bad_contrasts(tab)


def bad_contrasts(tab: Any) -> list[str]:
    """Return the kinds of elements with insufficient contrast, of those that were not measured before in this page."""
    found = _violations(tab, f"({NEW_KINDS})()", {"runOnly": ["color-contrast"]})
    assert tab.evaluate("window.measuredKinds.size") > 10
    return found


def bad_words(tab: Any) -> list[str]:
    """Return the serious violations of rules about languages, names and texts, which another language can break."""
    return _violations(tab, "document", {"runOnly": list(OF_WORDS)})


def violations_after_switch(opened: Any) -> list[str]:
    """Switch the page to the other colour scheme and the other language, and return the violations that these cause."""
    tab, scheme = opened.tab, "dark" if opened.of.color_scheme == "light" else "light"
    opened.of.change_scheme(scheme)
    language = tab.locator(".switches select:has(option[value=zh])")
    other = "zh" if language.input_value() == "en" else "en"
    language.select_option(other)
    assert tab.evaluate("document.documentElement.lang").startswith(other)
    tab.locator(f"html[data-theme={scheme}]").wait_for()
    return bad_contrasts(tab) + bad_words(tab)


def _violations(tab: Any, context: str, options: dict[str, Any]) -> list[str]:
    """Run axe on a part of the page; it is loaded once a page."""
    if tab.evaluate("typeof axe") == "undefined":
        tab.evaluate(_script())
    found = tab.evaluate(
        f"""async (options) => {{
          const context = {context};
          return context.length === 0 ? [] : (await axe.run(context, options)).violations;
        }}""",
        {**ONLY, **options},
    )
    return [
        f"{rule['id']}: {node['html'][:200]}" for rule in found if rule["impact"] in SERIOUS for node in rule["nodes"]
    ]
