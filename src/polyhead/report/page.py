"""`write_page`: one self-contained HTML file with an inspection's data, its script, and a strict security policy."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.errors import OptionError
from polyhead.files import check_regular, refusing
from polyhead.inspection.vocabulary import LANGUAGES, Language, Text
from polyhead.report.packing import json_in_html, text_in_html

if TYPE_CHECKING:
    from polyhead.inspection import Inspection
    from polyhead.report.syntax_results import Syntax

# Text that an HTML parser takes for the end of a script, or for a comment that hides that end.
_ENDS_SCRIPT = re.compile(r"</script|<!--[^\0]*<script", re.IGNORECASE)
_ENDS_STYLE = re.compile(r"</style", re.IGNORECASE)
_DOCTYPE = b"<!doctype html"
TAGS: Mapping[Language, str] = {"en": "en", "zh": "zh-Hans"}  # of HTML
_VIEWS = Text("Views", "视图")
_NO_CHARTS = Text("The charts need JavaScript, which is disabled here.", "图表需要 JavaScript，而此处已将其禁用。")
_NEEDS_SCRIPT = Text("This page needs JavaScript, which is disabled here.", "此页面需要 JavaScript，而此处已将其禁用。")


@dataclass(frozen=True, slots=True)
class Assets:
    """The built script and style sheet of a page."""

    script: str
    style: str

    @classmethod
    def load(cls, folder: Traversable | None = None, *, name: str = "page") -> Assets:
        """Load the built assets of a page, "page" or "plan", from a folder, by default the package's own."""
        place = resources.files("polyhead.report") / "assets" if folder is None else folder
        files = [place / f"{name}.{ending}" for ending in ("js", "css")]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise OptionError(
                f"a page needs built assets, got {place} without {' and '.join(missing)}; "
                "in a checkout, `make frontend` builds them"
            )
        script, style = (file.read_text(encoding="utf-8") for file in files)
        assets = cls(script, style)
        assets.check(f"{place / name}")
        return assets

    def check(self, place: str) -> None:
        """Check that script and style contain no markup that ends them early, so that their hashes match what runs."""
        if _ENDS_SCRIPT.search(self.script):
            raise OptionError(f"an inline script must not contain markup that ends it, got {place}.js with it")
        if _ENDS_STYLE.search(self.style):
            raise OptionError(f"an inline style sheet must not contain </style, got {place}.css with it")
        if "\0" in self.script + self.style:
            raise OptionError(f"assets must not contain NUL, which browsers replace, got {place} with one")


def write_page(
    path: str | os.PathLike[str],
    inspection: Inspection,
    *,
    language: Language = "en",
    syntax: Syntax | None = None,
    assets: Assets | None = None,
) -> Path:
    """Write an inspection as one HTML file that needs no network, and return its absolute path.

    Args:
        path: the file; an earlier page is replaced atomically.
        inspection: the inspection to show.
        language: "en" or "zh", the initial language; the page has a switch.
        syntax: a table of `polyhead syntax` for the same model, to be shown as well.
        assets: script and style of the page; the package's own by default.

    Returns:
        The absolute path of the page.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import tempfile
    >>> from polyhead.report import write_page
    >>> text, options = ["the cat sat on the mat. " * 20], {"context": 64, "tokens": 256, "importance": "none"}
    >>> found = polyhead.inspect(model, text, tokenizer=tokenizer, chance=False, **options)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_page(f"{folder}/heads.html", found)
    >>> page.name
    'heads.html'
    """
    from polyhead.report.payload import page_of

    if language not in LANGUAGES:
        raise OptionError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}")
    return write_html(
        path, lambda: html_of(page_of(inspection, language=language, syntax=syntax), assets or Assets.load())
    )


def check_place(file: Path) -> None:
    """Check that a page may be written to a path: the file does not exist, or is another page."""
    if file.is_dir():
        raise OptionError(
            f"a page is one file, got the folder {file}; pass a file in it, such as {file / 'heads.html'}"
        )
    with refusing(file, "a page is written to a new file, or over another page"):
        if file.exists():
            check_regular(file)
            with file.open("rb") as opened:
                start = opened.read(len(_DOCTYPE))
            if start and start.lower() != _DOCTYPE:
                raise OptionError("it contains something else; choose another file")


def write_html(path: str | os.PathLike[str], text: Callable[[], str]) -> Path:
    """Write the text of a page, if the path is free for one, and return its absolute path."""
    from polyhead.observation.saving import write_atomically

    file = Path(path)
    check_place(file)
    write_atomically(file, text().encode("utf-8"))
    return file.absolute()


def html_of(page: Mapping[str, Any], assets: Assets) -> str:
    """Return the HTML text of an inspection's page."""
    language: Language = page["lang"]
    findings = "".join(f"<li>{text_in_html(finding['text'][language])}</li>" for finding in page["findings"])
    body = (
        '<div id="polyhead-page"></div>\n'
        f"<noscript><p>{html.escape(_NEEDS_SCRIPT[language])}</p><ul>{findings}</ul></noscript>"
    )
    return document(page["title"], body, page, assets, language)


def document(title: str, body: str, data: Mapping[str, Any], assets: Assets, language: Language = "en") -> str:
    """Return a whole HTML document: a title, markup, the data of its script as JSON, script and style."""
    return (
        "<!doctype html>\n"
        f'<html lang="{TAGS[language]}">\n'
        "<head>\n"
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy_of(assets)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{text_in_html(title)}</title>\n"
        f"<style>{assets.style}</style>\n"
        "</head>\n"
        "<body>\n"
        f"{body}\n"
        f'<script type="application/json" id="polyhead-data">{json_in_html(data)}</script>\n'
        f"<script>{assets.script}</script>\n"
        "</body>\n"
        "</html>\n"
    )


def in_both_languages(
    name: str, facts: Text, views: Callable[[Language], Mapping[str, tuple[str, str]]], language: Language
) -> str:
    """Return the body of a page of charts in both languages, the other one hidden.

    `views` returns the heading and the content of each view by its name; without a script, the links lead to the views
    in the language that is shown.
    """
    bodies = []
    for shown in sorted(LANGUAGES, key=lambda other: other != language):
        links, sections, is_first = "", "", shown == language
        for view, (heading, content) in views(shown).items():
            title, anchor = text_in_html(heading), f' id="/{view}"' if is_first else ""
            links += f'<a href="#/{view}">{title}</a>'
            sections += f'<section data-view="{view}"{anchor}><h2 tabindex="-1">{title}</h2>{content}</section>'
        bodies.append(
            f'<div data-language="{shown}" lang="{TAGS[shown]}"{"" if is_first else " hidden"}>'
            f'<header class="page-head"><div class="title"><h1>{text_in_html(name)}</h1>'
            f'<p class="facts">{text_in_html(facts[shown])}</p></div><div class="switches"></div></header>'
            f'<nav class="views" aria-label="{_VIEWS[shown]}">{links}</nav><main>{sections}</main></div>'
        )
    return "\n".join(bodies)


def charts_of(view: str, language: Language) -> str:
    """Return the place of a view's charts, which its script draws."""
    return f'<div data-charts="{view}"></div><noscript><p>{html.escape(_NO_CHARTS[language])}</p></noscript>'


def policy_of(assets: Assets) -> str:
    """Return the content security policy: this script and this style sheet by their hashes, and nothing else."""
    return (
        f"default-src 'none'; script-src {_hash(assets.script)}; style-src {_hash(assets.style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
