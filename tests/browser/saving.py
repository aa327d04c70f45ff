"""Figures saved as files, and checks of such files."""

from __future__ import annotations

import struct
import time
from collections import deque
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
# A picture is encoded when the browser is idle between two frames; a tab that draws none would wait for a second.
DRAW_FRAMES = """() => {
  if (window.drawsFrames) return;
  window.drawsFrames = true;
  const toBlob = HTMLCanvasElement.prototype.toBlob;
  HTMLCanvasElement.prototype.toBlob = function (done, ...options) {
    let waits = true;
    const next = () => waits && requestAnimationFrame(next);
    toBlob.call(this, (blob) => { waits = false; done(blob); }, ...options);
    next();
  };
}"""
BURST, BURST_SECONDS = 10, 1.1  # the browser ignores more than ten downloads per second
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


_latest: deque[float] = deque(maxlen=BURST)


def saved(tab: Any, button: Any) -> tuple[Path, str]:
    """Return the file that a button saves, and its name."""
    if len(_latest) == BURST:
        time.sleep(max(0.0, _latest[0] + BURST_SECONDS - time.monotonic()))
    button.click(trial=True)  # nothing covers it
    with tab.expect_download() as waiting:
        button.press("Enter")  # a click is lost if an answer of the server moves the button under the pointer
    _latest.append(time.monotonic())  # not before the click, which may have waited
    return Path(waiting.value.path()), waiting.value.suggested_filename


def number(text: str) -> float:
    return float(text.removesuffix("px"))


def saved_svg(tab: Any, figure: Any) -> ElementTree.Element:
    """Return the saved SVG of a figure, checked to be self-contained."""
    file, name = saved(tab, figure.get_by_role("button", name="as SVG"))
    assert name.endswith(".svg")
    root = ElementTree.parse(file).getroot()
    assert root.tag == f"{SVG}svg"
    text = file.read_text(encoding="utf-8")
    # No styles of the page, no scripts, no external resources.
    assert "var(" not in text
    assert "currentColor" not in text
    assert {element.tag.removeprefix(SVG) for element in root.iter()}.isdisjoint({"style", "script", "foreignObject"})
    links = [value for element in root.iter() for key, value in element.items() if key.endswith("href")]
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert len(list(root.iter())) > 5
    assert number(root.get("width")) >= 200
    assert number(root.get("height")) >= 60
    return root


def title_of(root: ElementTree.Element) -> str:
    """Return the title of a saved figure."""
    return "".join(element.text or "" for element in root.findall(f"{SVG}text"))


def check_png(tab: Any, figure: Any, root: ElementTree.Element) -> None:
    """Check that the saved PNG of a figure has twice the size of its SVG."""
    tab.evaluate(DRAW_FRAMES)
    file, name = saved(tab, figure.get_by_role("button", name="as PNG"))
    assert name.endswith(".png")
    data = file.read_bytes()
    assert data.startswith(PNG_MAGIC)
    size = tuple(round(2 * number(root.get(side))) for side in ("width", "height"))
    assert struct.unpack(">II", data[16:24]) == size
    assert len(data) > 1000  # a blank picture packs smaller
