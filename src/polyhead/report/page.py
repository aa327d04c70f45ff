"""`write_page`: one self-contained HTML file with an inspection's data, its script, and a strict security policy."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from polyhead.errors import OptionError
from polyhead.files import check_regular, refusing
from polyhead.inspection import Inspection
from polyhead.inspection.vocabulary import LANGUAGES, Language, Text
from polyhead.observation.saving import write_atomically
from polyhead.report.packing import json_in_html
from polyhead.report.payload import page_of
from polyhead.report.syntax import Syntax

# Text that an HTML parser takes for the end of a script, or for a comment that hides that end.
_ENDS_SCRIPT = re.compile(r"</script|<!--[^\0]*<script", re.IGNORECASE)
_ENDS_STYLE = re.compile(r"</style", re.IGNORECASE)
_DOCTYPE = b"<!doctype html"
_NEEDS_SCRIPT = Text("This page needs JavaScript, which is disabled here.", "此页面需要 JavaScript，而此处已将其禁用。")


@dataclass(frozen=True, slots=True)
class Assets:
    """The built script and style sheet of the page, and hashes of styles that the script adds at run time."""

    script: str
    style: str
    style_hashes: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Traversable | None = None) -> Assets:
        """Load the built assets from a folder, by default the package's own."""
        folder = resources.files("polyhead.report") / "assets" if folder is None else folder
        files = {name: folder / name for name in ("page.js", "page.css", "csp.json")}
        missing = [name for name in ("page.js", "page.css") if not files[name].is_file()]
        if missing:
            raise OptionError(
                f"a page needs built assets, got {folder} without {' and '.join(missing)}; "
                "in a checkout, `make frontend` builds them"
            )
        script, style = (files[name].read_text(encoding="utf-8") for name in ("page.js", "page.css"))
        policy = json.loads(files["csp.json"].read_text(encoding="utf-8")) if files["csp.json"].is_file() else {}
        assets = cls(script, style, tuple(f"'{x.strip(chr(39))}'" for x in policy.get("styles", ())))
        assets.check(str(folder))
        return assets

    def check(self, folder: str) -> None:
        """Check that script and style contain no markup that ends them early, so that their hashes match what runs."""
        if _ENDS_SCRIPT.search(self.script):
            raise OptionError(f"an inline script must not contain markup that ends it, got {folder}/page.js with it")
        if _ENDS_STYLE.search(self.style):
            raise OptionError(f"an inline style sheet must not contain </style, got {folder}/page.css with it")
        if "\0" in self.script + self.style:
            raise OptionError(f"assets must not contain NUL, which browsers replace, got {folder} with one")


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
    """
    if language not in LANGUAGES:
        raise OptionError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}")
    file = Path(path)
    check_place(file)
    text = html_of(page_of(inspection, language=language, syntax=syntax), assets or Assets.load())
    write_atomically(file, text.encode("utf-8"))
    return file.absolute()


def check_place(file: Path) -> None:
    """Check that a page may be written to a path: the file does not exist, is empty, or is an HTML page."""
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


def html_of(page: Mapping[str, Any], assets: Assets) -> str:
    """Return the HTML text of a page."""
    language: Language = "zh" if page["lang"] == "zh" else "en"
    findings = "".join(f"<li>{_shown(finding['text'][language])}</li>" for finding in page["findings"])
    return (
        "<!doctype html>\n"
        f'<html lang="{"zh-Hans" if language == "zh" else "en"}">\n'
        "<head>\n"
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy_of(assets)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_shown(page['title'])}</title>\n"
        f"<style>{assets.style}</style>\n"
        "</head>\n"
        "<body>\n"
        '<div id="polyhead-page"></div>\n'
        f"<noscript><p>{html.escape(_NEEDS_SCRIPT[language])}</p><ul>{findings}</ul></noscript>\n"
        f'<script type="application/json" id="polyhead-data">{json_in_html(page)}</script>\n'
        f"<script>{assets.script}</script>\n"
        "</body>\n"
        "</html>\n"
    )


def policy_of(assets: Assets) -> str:
    """Return the content security policy: this script and these styles by their hashes, and nothing else."""
    styles = " ".join([_hash(assets.style), *assets.style_hashes])
    return (
        f"default-src 'none'; script-src {_hash(assets.script)}; style-src {styles}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _shown(text: str) -> str:
    """Escape a text for HTML; control, format and surrogate characters become replacement characters."""
    return html.escape("".join("\ufffd" if unicodedata.category(x) in ("Cc", "Cf", "Cs") else x for x in text))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
