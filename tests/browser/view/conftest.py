"""The live viewer in a real browser: a server on small models, a page that types into it, and weights to hold it to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.viewing import Viewer
from polyhead.workflows.model_loading import load_model
from tests.browser.conftest import HAS_FAILED
from tests.browser.tabs import PATIENCE, Kept, Tab, Tabs
from tests.browser.view.map_page import go_anew, open_long
from tests.inspection import small_models

TOKEN = "a-token-of-this-test"
SENTENCE = "w1 w2 w3 . a w5 w1 w2 , w7 w8 w9 a w11 w12 . w3"
LONG_CONTEXT = 3_100


class Running:
    """The viewer's server in a thread of this process."""

    def __init__(self, viewer: Viewer, folder: Path, port: int = 0) -> None:
        import uvicorn

        from polyhead.report.viewer.app import create_app

        self.viewer, self.folder = viewer, folder
        self.listening = socket.socket()
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listening.bind(("127.0.0.1", port))
        self.port = self.listening.getsockname()[1]
        self.origin = f"http://127.0.0.1:{self.port}/"
        self.address = f"{self.origin}{TOKEN}/"
        config = uvicorn.Config(create_app(viewer, token=TOKEN), log_level="error", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listening]}, daemon=True)

    def __enter__(self) -> Running:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.listening.close()

    @cached_property
    def eager(self) -> Any:
        """The same model as transformers itself runs it."""
        kind = self.viewer.model.loaded.kind
        auto = transformers.AutoModelForCausalLM if kind == "causal" else transformers.AutoModelForSeq2SeqLM
        return auto.from_pretrained(self.folder, attn_implementation="eager").eval()

    @torch.no_grad()
    def weights(self, slot: str = "A") -> torch.Tensor:
        """Of the decoder's text in that slot, [layers, heads, queries, keys]."""
        ids = torch.tensor([self.viewer.readings[slot].ids])
        return torch.cat(self.eager(ids, output_attentions=True).attentions)

    def tokens(self, slot: str = "A") -> tuple[str, ...]:
        return self.viewer.readings[slot].text.tokens


def small_viewer(folder: Path, name: str) -> tuple[Viewer, Path]:
    path = small_models.model_folder(folder, name)
    return Viewer(ViewedModel(load_model(path))), path


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Running]]:
    """A server on the small model of a name, one for all tests: llama, t5, or long, which reads 3,100 tokens."""
    servers: dict[str, Running] = {}

    def start(name: str) -> Running:
        if name not in servers:
            servers[name] = Running(*small_viewer(tmp_path_factory.mktemp("view") / name, name))
            servers[name].__enter__()
        return servers[name]

    def long_llama() -> transformers.LlamaForCausalLM:
        sizes = {**small_models.SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=LONG_CONTEXT))

    small_models.MAKERS["long"] = long_llama
    try:
        yield start
    finally:
        del small_models.MAKERS["long"]
        for server in servers.values():
            server.__exit__()


@dataclass
class Opened:
    """The viewer's page in the browser, with all that went wrong in it."""

    of: Tab
    server: Running

    def __post_init__(self) -> None:
        self.first_readings = dict(self.server.viewer.readings)

    @property
    def tab(self) -> Any:
        return self.of.page

    @property
    def problems(self) -> list[str]:
        return self.of.problems

    def go(self, view: str) -> None:
        self.tab.goto(f"{self.server.address}#/{view}")
        self.tab.wait_for_selector("main")

    def read(self, text: str = SENTENCE, slot: str = "A") -> None:
        """Type a text and wait until every head is drawn."""
        before = self.server.viewer.readings[slot]
        self.tab.locator(f"#text-{slot}").fill(text)
        with self.tab.expect_response("**/api/heads"):  # the pictures of this text, not of the one before
            self.tab.locator(f"form:has(#text-{slot}) button[type=submit]").click()
        self.wait(lambda: self.server.viewer.readings[slot] is not before)
        self.tab.wait_for_selector(f"[data-slot={slot}] .pictures-note[data-done=true]")

    def hurry(self) -> None:
        """Let the timers of the page run ten times as fast until it may walk again, and note how long each was."""
        self.tab.evaluate(
            """() => {
              const wait = window.setTimeout;
              window.walk = () => { window.setTimeout = wait; };
              window.pauses = [];
              window.setTimeout = (call, milliseconds = 0, ...rest) => {
                window.pauses.push(milliseconds);
                return wait(call, milliseconds / 10, ...rest);
              };
            }"""
        )

    def walk(self) -> None:
        """End a hurry, if there is one."""
        self.tab.evaluate("window.walk?.()")

    def pauses(self) -> list[float]:
        """The milliseconds of every timer since `hurry`, as the page set it."""
        return self.tab.evaluate("window.pauses")

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE / 1000
        while not is_so():
            assert time.monotonic() < deadline
            self.tab.wait_for_timeout(20)

    def check(self) -> None:
        if self.server.viewer.readings != self.first_readings:
            # A question on its way while its text was replaced is refused, which the browser itself writes down.
            self.problems[:] = [problem for problem in self.problems if "410 (Gone)" not in problem]
        assert [*self.problems, *self.tab.evaluate("window.violations ?? []")] == []


@contextmanager
def views(tabs: Tabs, running: Callable[[str], Running]) -> Iterator[Callable[..., Opened]]:
    """Opens the viewer in an empty tab; afterwards no error, no foreign request, no violation of its policy."""
    all_opened: list[Opened] = []

    def opening(server: str | Running = "llama", view: str = "", **options: Any) -> Opened:
        chosen = running(server) if isinstance(server, str) else server
        opened = Opened(tabs.take(lambda address: address.startswith(chosen.address), **options), chosen)
        all_opened.append(opened)
        opened.go(view)
        opened.tab.wait_for_selector("#text-A")
        return opened

    try:
        yield opening
        for opened in all_opened:
            opened.check()
    finally:
        tabs.give_back([opened.of for opened in all_opened])


@pytest.fixture
def open_view(tabs: Tabs, running: Callable[[str], Running]) -> Iterator[Callable[..., Opened]]:
    with views(tabs, running) as opening:
        yield opening


@pytest.fixture(scope="session")
def long_page(tabs: Tabs, running: Callable[[str], Running]) -> Iterator[Kept]:
    """A page on the long text, one for the tests that ask nothing of a page just loaded."""

    @contextmanager
    def opening() -> Iterator[Opened]:
        with views(tabs, running) as open_one:
            yield open_long(open_one, "head/1/2")

    kept = Kept(opening)
    yield kept
    kept.close()


@pytest.fixture
def opened_long(request: pytest.FixtureRequest, long_page: Kept) -> Iterator[Opened]:
    """Head 2 of layer 1 over a long text, its whole matrix computed and no tile of it in the page."""
    opened = long_page.take()
    opened.of.change_size((1280, 800))
    opened.of.change_scheme("light")
    opened.tab.mouse.move(0, 0)
    go_anew(opened, "head/1/2")
    yield opened
    try:
        opened.tab.unroute_all()
        opened.walk()
    finally:
        long_page.leave(request.node.stash.get(HAS_FAILED, False))


@pytest.fixture(scope="session")
def sentence_page(tabs: Tabs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A page on a server of its own that has read the sentence, one for the tests that change neither."""

    def no_other(name: str) -> Running:
        raise AssertionError(f"{name} is not the server of this page")

    @contextmanager
    def opening() -> Iterator[Opened]:
        with (
            Running(*small_viewer(tmp_path_factory.mktemp("sentence") / "llama", "llama")) as server,
            views(tabs, no_other) as open_one,
        ):
            opened = open_one(server)
            opened.read()
            yield opened

    kept = Kept(opening)
    yield kept
    kept.close()


@pytest.fixture
def read_sentence(request: pytest.FixtureRequest, sentence_page: Kept) -> Iterator[Callable[..., Opened]]:
    """All heads of the sentence, as a reader comes to them from one head: no word is chosen."""

    def opening(viewport: tuple[int, int] = (1280, 800)) -> Opened:
        opened = sentence_page.take()
        opened.of.change_size(viewport)
        opened.tab.mouse.move(0, 0)
        opened.go("head/0/0")
        opened.tab.locator(".head-panel[data-head='0.0']").wait_for()
        opened.go("")
        opened.tab.locator(".pictures-note[data-done=true]").wait_for()
        return opened

    yield opening
    sentence_page.leave(request.node.stash.get(HAS_FAILED, False))
