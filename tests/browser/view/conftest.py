"""The live viewer in a real browser: servers of small models, pages, and reference weights."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
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
from tests.browser.tabs import PATIENCE, SharedPage, Tab, Tabs
from tests.browser.view.map_page import go_anew, open_long
from tests.inspection import small_models

TOKEN = "a-token-of-this-test"
SENTENCE = "w1 w2 w3 . a w5 w1 w2 , w7 w8 w9 a w11 w12 . w3"
LONG_CONTEXT = 3_100


class Running:
    """The viewer's server in a thread of this process; without a viewer, that of the training run in a folder."""

    def __init__(self, viewer: Viewer | None, folder: Path, port: int = 0) -> None:
        import uvicorn

        from polyhead.report.viewer.app import create_app, create_run_app

        self.viewer, self.folder = viewer, folder
        self.listening = socket.socket()
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listening.bind(("127.0.0.1", port))
        self.port = self.listening.getsockname()[1]
        self.origin = f"http://127.0.0.1:{self.port}/"
        self.address = f"{self.origin}{TOKEN}/"
        app = create_run_app(folder, token=TOKEN) if viewer is None else create_app(viewer, token=TOKEN)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2)
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
        frame = sys._current_frames().get(self.thread.ident or 0) if self.thread.is_alive() else None
        assert not self.thread.is_alive(), f"the server did not end: {''.join(traceback.format_stack(frame))}"
        self.listening.close()

    @cached_property
    def eager(self) -> Any:
        """The same model with eager attention of transformers."""
        kind = self.viewer.model.loaded.kind
        auto = transformers.AutoModelForCausalLM if kind == "causal" else transformers.AutoModelForSeq2SeqLM
        return auto.from_pretrained(self.folder, attn_implementation="eager").eval()

    @torch.no_grad()
    def weights(self, slot: str = "A") -> torch.Tensor:
        """Return the weights of the text in a slot, [layers, heads, queries, keys]."""
        ids = torch.tensor([self.viewer.traces[slot].ids])
        return torch.cat(self.eager(ids, output_attentions=True).attentions)

    def tokens(self, slot: str = "A") -> tuple[str, ...]:
        return self.viewer.traces[slot].text.tokens


def small_viewer(folder: Path, name: str) -> tuple[Viewer, Path]:
    path = small_models.model_folder(folder, name)
    return Viewer(ViewedModel(load_model(path))), path


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Running]]:
    """Start one server per model for all tests: llama, t5, or long, with a context of 3,100 tokens."""
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
    """The page of the viewer in the browser, with its errors."""

    of: Tab
    server: Running

    def __post_init__(self) -> None:
        self.first_traces = dict(self.server.viewer.traces)

    @property
    def tab(self) -> Any:
        return self.of.page

    @property
    def problems(self) -> list[str]:
        return self.of.problems

    def go(self, view: str) -> None:
        self.tab.goto(f"{self.server.address}#/{view}")
        self.tab.wait_for_selector("main")

    def run_text(self, text: str = SENTENCE, slot: str = "A") -> None:
        """Type a text and wait until every head is drawn."""
        before = self.server.viewer.traces[slot]
        self.tab.locator(f"#text-{slot}").fill(text)
        with self.tab.expect_response("**/api/heads"):  # the maps of this text, not of the previous one
            self.tab.locator(f"form:has(#text-{slot}) button[type=submit]").click()
        self.wait(lambda: self.server.viewer.traces[slot] is not before)
        self.tab.wait_for_selector(f"[data-slot={slot}] .pictures-note[data-done=true]")

    def speed_up_timers(self) -> None:
        """Run the timers of the page ten times as fast, and record their delays."""
        self.tab.evaluate(
            """() => {
              const wait = window.setTimeout;
              window.restoreTimers = () => { window.setTimeout = wait; };
              window.delays = [];
              window.setTimeout = (call, milliseconds = 0, ...rest) => {
                window.delays.push(milliseconds);
                return wait(call, milliseconds / 10, ...rest);
              };
            }"""
        )

    def restore_timers(self) -> None:
        """Restore the speed of the timers."""
        self.tab.evaluate("window.restoreTimers?.()")

    def timer_delays(self) -> list[float]:
        """Return the milliseconds of all timers since `speed_up_timers`."""
        return self.tab.evaluate("window.delays")

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE / 1000
        while not is_so():
            assert time.monotonic() < deadline
            self.tab.wait_for_timeout(20)

    def check(self) -> None:
        if self.server.viewer.traces != self.first_traces:
            # A request for a text that was replaced meanwhile is refused, which the browser logs.
            self.problems[:] = [problem for problem in self.problems if "410 (Gone)" not in problem]
        assert [*self.problems, *self.tab.evaluate("window.violations ?? []")] == []


@contextmanager
def views(tabs: Tabs, running: Callable[[str], Running]) -> Iterator[Callable[..., Opened]]:
    """Open the viewer in an empty tab, and check it afterwards for errors, foreign requests and policy violations."""
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
def long_page(tabs: Tabs, running: Callable[[str], Running]) -> Iterator[SharedPage]:
    """A page of the long text, shared by tests that do not need a fresh page."""

    @contextmanager
    def opening() -> Iterator[Opened]:
        with views(tabs, running) as open_one:
            yield open_long(open_one, "head/1/2")

    shared = SharedPage(opening)
    yield shared
    shared.close()


@pytest.fixture
def opened_long(request: pytest.FixtureRequest, long_page: SharedPage) -> Iterator[Opened]:
    """Head 2 of layer 1 over the long text: the exact whole matrix and no tiles."""
    opened = long_page.take()
    opened.of.change_size((1280, 800))
    opened.of.change_scheme("light")
    opened.tab.mouse.move(0, 0)
    go_anew(opened, "head/1/2")
    yield opened
    try:
        opened.tab.unroute_all()
        opened.restore_timers()
    finally:
        long_page.leave(request.node.stash.get(HAS_FAILED, False))


@pytest.fixture(scope="session")
def sentence_page(tabs: Tabs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPage]:
    """A page of the sentence on a server of its own, shared by tests that change neither."""

    def no_other(name: str) -> Running:
        raise AssertionError(f"{name} is not the server of this page")

    @contextmanager
    def opening() -> Iterator[Opened]:
        with (
            Running(*small_viewer(tmp_path_factory.mktemp("sentence") / "llama", "llama")) as server,
            views(tabs, no_other) as open_one,
        ):
            opened = open_one(server)
            opened.run_text()
            yield opened

    shared = SharedPage(opening)
    yield shared
    shared.close()


@pytest.fixture
def read_sentence(request: pytest.FixtureRequest, sentence_page: SharedPage) -> Iterator[Callable[..., Opened]]:
    """All heads of the sentence, without a chosen word."""

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
