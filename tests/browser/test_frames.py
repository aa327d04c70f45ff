"""The page in the frame of a notebook, which may have neither an address nor storage of its own."""

from __future__ import annotations

import html

import pytest
from playwright.sync_api import expect


@pytest.mark.parametrize("sandbox", ["allow-scripts", None])
def test_page_works_in_a_frame(open_page, small_page, tmp_path, sandbox):
    attribute = "" if sandbox is None else f'sandbox="{sandbox}"'
    inner = html.escape(small_page.read_text(encoding="utf-8"), quote=True)
    outer = tmp_path / "notebook.html"
    outer.write_text(
        "<!doctype html><title>notebook</title><main><h2>cell</h2></main>"
        f'<iframe {attribute} width="900" height="700" srcdoc="{inner}"></iframe>',
        encoding="utf-8",
    )
    tab = open_page(outer).tab
    frame = tab.frame_locator("iframe")
    frame.locator("a.cell[data-key='2.1']").click()
    expect(frame.locator("main h2")).to_have_text("L2H1 (Encoder)")
    frame.locator("nav.views a", has_text="Head importance").click()
    expect(frame.locator("main h2").first).to_have_text("Head importance")
    frame.get_by_label("Colours").select_option("dark")
    frame.get_by_label("Language").select_option("zh")
    expect(frame.locator("main h2").first).to_have_text("头的重要性")
    frame.get_by_role("button", name="复制链接").click()
    # Without access to the clipboard the link is shown for copying by hand.
    frame.locator(".copy").get_by_text("已复制").or_(frame.locator(".copy input")).first.wait_for(state="attached")
    expect(tab.locator("h2")).to_have_text("cell")  # the notebook itself did not navigate
