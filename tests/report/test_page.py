"""The page as a file: self-contained, small, and with a strict security policy."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import transformers

from polyhead.errors import OptionError
from polyhead.inspection import Inspection, Settings
from polyhead.inspection.example_weights import Example
from polyhead.inspection.probing import Probes
from polyhead.inspection.wording import Reason
from polyhead.report import page_of, write_page
from polyhead.report.page import Assets, html_of, policy_of
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import NAMES, text_folder, tokenizer
from tests.report.test_packing import HOSTILE

LARGEST = 5_000_000  # bytes, of a page of 12 x 12 heads


class Parts(HTMLParser):
    """The elements of a page, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside.append((f"after {tag}", ""))

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, before = self.inside[-1]
            self.inside[-1] = (tag, before + data)

    def texts(self, tag: str) -> list[str]:
        return [text for found, text in self.inside if found == tag]


def data_of(text: str) -> dict:
    data, _ = Parts(text).texts("script")
    return json.loads(data)


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_page_is_self_contained(inspections, assets, tmp_path):
    written = write_page(tmp_path / "page.html", inspections["bert"], assets=assets)
    assert written == tmp_path / "page.html"
    text = written.read_text(encoding="utf-8")
    parts = Parts(text)
    assert data_of(text) == page_of(inspections["bert"])
    assert parts.texts("script")[1] == assets.script
    assert parts.texts("style") == [assets.style]
    assert [attributes.get("id") for tag, attributes in parts.elements if tag == "div"] == ["polyhead-page"]
    for tag, attributes in parts.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "style"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert list(tmp_path.glob(".page.html*")) == []


def test_policy_allows_only_the_own_script_and_style(inspections, assets):
    text = html_of(page_of(inspections["bert"]), assets)
    parts = Parts(text)
    (policy,) = [x["content"] for tag, x in parts.elements if x.get("http-equiv") == "Content-Security-Policy"]
    assert policy == policy_of(assets)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": sha256(parts.texts("script")[1]),
        "style-src": sha256(parts.texts("style")[0]),
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    # A policy in a <meta> element applies only to what follows it.
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")


def hostile(inspection: Inspection) -> Inspection:
    site = inspection.table.sites[0]
    tokens = (*HOSTILE, "x" * 100_000, "\ud800")
    weights = torch.full((site.num_heads, len(tokens), len(tokens)), 1 / len(tokens))
    examples = tuple(Example(text, tokens, tokens, {site: weights}) for text in HOSTILE)
    facts = {
        **inspection.facts,
        "model": "".join(HOSTILE),
        "left_out": [Reason("text", {"text": text}) for text in HOSTILE],
    }
    return dataclasses.replace(inspection, examples=examples, facts=facts)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_hostile_text_adds_no_element(inspections, assets, language):
    tame = html_of(page_of(inspections["bert"], language=language), assets)
    page = page_of(hostile(inspections["bert"]), language=language)
    wild = html_of(page, assets)
    wild.encode("utf-8")
    assert Parts(wild).elements == Parts(tame).elements
    assert data_of(wild) == page
    assert "\0" not in wild
    assert not re.search("[\0-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b-\u200f\ufeff]", wild)


def test_the_language_is_that_of_the_page(inspections, assets, tmp_path):
    text = write_page(tmp_path / "page.html", inspections["t5"], language="zh", assets=assets).read_text("utf-8")
    assert '<html lang="zh-Hans">' in text
    assert data_of(text)["lang"] == "zh"
    assert "此页面需要 JavaScript，而此处已将其禁用。" in text
    with pytest.raises(OptionError, match="language must be one of en, zh; got 'fr'"):
        write_page(tmp_path / "page.html", inspections["t5"], language="fr", assets=assets)


def test_findings_are_readable_without_javascript(inspections, assets):
    page = page_of(inspections["bert"])
    shown = html_of(page, assets).split("<noscript>")[1].split("</noscript>")[0]
    assert shown.count("<li>") == len(page["findings"])


@pytest.mark.parametrize(
    ("script", "style", "words"),
    [
        ("let a='</script>'", "", "an inline script must not contain markup that ends it"),
        ("let a='<!-- <SCRIPT>'", "", "an inline script must not contain markup that ends it"),
        ("let a='<!-- alone'", "", None),
        ("1", "a{content:'</STYLE>'}", "must not contain </style"),
        ("1\0", "", "must not contain NUL"),
    ],
)
def test_assets_that_end_their_element_are_refused(tmp_path, script, style, words):
    (tmp_path / "page.js").write_bytes(script.encode())
    (tmp_path / "page.css").write_bytes(style.encode())
    if words is None:
        assert Assets.load(tmp_path) == Assets(script, style)
    else:
        with pytest.raises(OptionError, match=words):
            Assets.load(tmp_path)


def test_missing_assets_and_unwritable_paths_are_reported(inspections, assets, tmp_path):
    with pytest.raises(OptionError, match=r"without page.js and page.css; in a checkout, `make frontend`"):
        Assets.load(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="a page is one file, got the folder"):
        write_page(tmp_path, inspections["bert"], assets=assets)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="must be writable and fit on the disk"):
        write_page(tmp_path / "file" / "page.html", inspections["bert"], assets=assets)


@pytest.fixture(scope="module")
def twelve_by_twelve(tmp_path_factory) -> Inspection:
    """An inspection of as many heads as BERT has, with maps of 512 tokens."""
    folder: Path = tmp_path_factory.mktemp("twelve")
    config = transformers.BertConfig(
        vocab_size=len(NAMES), hidden_size=48, num_hidden_layers=12, num_attention_heads=12, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    text = text_folder(folder / "text", documents=3, words=62)
    with pytest.MonkeyPatch.context() as patch:  # without the probes of roles, which take half of the time
        patch.setattr(Probes, "repeated", lambda *_: None)
        patch.setattr(Probes, "pronouns", lambda *_: {})
        return inspect_model(Settings(str(folder / "model"), str(text), importance="none", chance=False))


def test_a_page_of_twelve_layers_of_twelve_heads_is_small(twelve_by_twelve, tmp_path):
    page = page_of(twelve_by_twelve)
    assert len(page["heads"]) == 144
    assert page["maps"]["0"]["shape"] == [12, 64, 64]
    assert len(page["examples"]) == 3
    assert page["examples"][0]["sites"]["11"]["shape"] == [12, 32, 32]
    written = write_page(tmp_path / "page.html", twelve_by_twelve)  # with the assets of the package
    assert 1_000_000 < written.stat().st_size < LARGEST
