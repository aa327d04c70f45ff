"""Strings of the viewer in both languages, with the same placeholders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STRINGS = Path(__file__).parents[2] / "frontend" / "src" / "view" / "strings.ts"


@pytest.mark.skipif(not STRINGS.is_file(), reason="the front end's sources are in a checkout only")
def test_every_string_of_the_viewer_exists_in_both_languages():
    text = re.sub(r'"\s*\+\s*"', "", STRINGS.read_text(encoding="utf-8"))  # long strings span several lines
    entries = re.findall(r"([\w\"-]+): \{\s*en:\s*\"((?:[^\"\\]|\\.)*)\",\s*zh: \"((?:[^\"\\]|\\.)*)\",?\s*\}", text)
    assert len(entries) == len(re.findall(r"\ben:\s*\"", text)) > 80
    for name, english, chinese in entries:
        has_words = re.search("[a-z]", re.sub(r"\{\w+\}", "", english))
        assert not has_words or re.search("[\u4e00-\u9fff]", chinese), f"{name} must be Chinese, got {chinese!r}"
        places = [sorted(re.findall(r"\{\w+\}", words)) for words in (english, chinese)]
        assert places[0] == places[1], f"{name} must fill in the same values in both languages"
