"""The viewer as a real server: disconnects, a thousand clients, slow readers, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from polyhead.errors import OptionError
from polyhead.report.viewer import app as viewer_app
from polyhead.report.viewer import endpoint, tiles
from polyhead.report.viewer import jobs as jobs_module
from polyhead.report.viewer.serve import serve
from polyhead.report.viewer.viewing import Viewer
from tests.forked import Forked
from tests.inspection import small_models

TOKEN = "a-token-of-this-test"


class Running:
    """A server in a thread of this process."""

    def __init__(self, viewer, assets):
        import uvicorn

        from polyhead.report.viewer.app import create_app

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/{TOKEN}/"
        app = create_app(viewer, token=TOKEN, assets=assets)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.socket.close()

    def post(self, path, **body):
        return httpx.post(f"{self.address}api/{path}", json=body, timeout=60)

    def trace(self, text="w1 w2 w3"):
        return json.loads(self.post("trace", slot="A", text=text).text.splitlines()[-1])["trace"]

    def raw(self, path, body):
        """Send a request on a new socket, and return the socket."""
        data = json.dumps(body).encode()
        head = (
            f"POST /{TOKEN}/api/{path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(head.encode() + data)
        return connection


class Endless:
    """A computation without end."""

    def __init__(self):
        self.begun, self.closed, self.produced = threading.Event(), threading.Event(), 0

    def __call__(self, job, *_):
        try:
            while True:
                self.begun.set()
                self.produced += 1
                time.sleep(0.001)
                yield {"line": "x" * 100_000}
        finally:
            self.closed.set()


@pytest.fixture
def running(viewer, assets):
    with Running(viewer, assets) as server:
        yield server


def wait_for(is_so, seconds=30):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_disconnect_ends_the_computation(running, viewer, monkeypatch):
    trace = running.trace()["id"]
    endless = Endless()
    monkeypatch.setattr(viewer, "heads", endless)
    connection = running.raw("heads", {"trace": trace})
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    assert endless.closed.wait(20)
    assert httpx.get(f"{running.address}api/state").status_code == 200


def test_disconnect_stops_a_picture_between_strips(running, viewer, monkeypatch):
    """The strips that are computed are counted."""
    trace = running.trace(" ".join(["w1 w2 w3 w4 ."] * 25))["id"]
    monkeypatch.setattr(tiles, "STRIP_PAIRS", {"cpu": 1})  # a strip is a row
    begun, ended, made = threading.Event(), threading.Event(), []
    window, picture = tiles.window, viewer.picture

    def counted(*arguments):
        made.append(arguments)
        begun.set()
        time.sleep(0.02)
        return window(*arguments)

    def watched(*arguments):
        try:
            yield from picture(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(tiles, "window", counted)
    monkeypatch.setattr(viewer, "picture", watched)
    connection = running.raw("picture", {"trace": trace, "layer": 0, "head": 1})
    assert begun.wait(20)
    connection.close()
    assert ended.wait(20)
    assert 0 < len(made) < 126
    assert len(viewer.cache) == 0  # an incomplete picture is not cached
    monkeypatch.setattr(tiles, "window", window)
    assert running.post("tile", trace=trace, layer=0, head=1, level=0, row=0, column=0).status_code == 200


def test_disconnect_before_the_first_line_ends_the_computation(running, viewer, monkeypatch):
    trace = running.trace()["id"]
    begun, closed = threading.Event(), threading.Event()

    def silent(job, *_):
        try:
            while True:
                begun.set()
                time.sleep(0.001)
                yield {}
        finally:
            closed.set()

    monkeypatch.setattr(viewer, "tile", silent)
    connection = running.raw("tile", {"trace": trace, "layer": 0, "head": 0, "level": 0, "row": 0, "column": 0})
    assert begun.wait(20)
    connection.close()
    assert closed.wait(20)


def test_disconnect_during_the_body_has_no_effect(running):
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    head = f"POST /{TOKEN}/api/trace HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
    connection.close()
    assert running.trace()["text"]["tokens"] == ["[CLS]", "w1", "w2", "w3"]


def test_incomplete_body_times_out(running, monkeypatch):
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.2)
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    head = f"POST /{TOKEN}/api/trace HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
    assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    connection.close()


def test_slow_reader_does_not_block_others(running, viewer, monkeypatch):
    monkeypatch.setattr(jobs_module, "UNREAD_SECONDS", 0.5)
    trace = running.trace()["id"]
    endless = Endless()
    monkeypatch.setattr(viewer, "heads", endless)
    connection = running.raw("heads", {"trace": trace})
    assert endless.begun.wait(20)
    # The answer is not read; others are served, and the computation is cancelled.
    requested = {"trace": trace, "layer": 0, "head": 0, "rows": [0, 1], "columns": [0, 1]}
    assert running.post("window", **requested).status_code == 200
    assert endless.closed.wait(20)
    assert endless.produced < 1000  # buffered in the sockets, and a few more
    connection.close()


def test_a_thousand_requests_at_once(running, viewer):
    trace = running.trace(" ".join(["w1 w2 w3 w4 ."] * 25))["id"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = {"trace": trace}

    async def request():
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        data = json.dumps(body).encode()
        head = (
            f"POST /{TOKEN}/api/heads HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head, rest

    async def all_requests():
        return await asyncio.wait_for(asyncio.gather(*(request() for _ in range(1000))), 300)

    with ThreadPoolExecutor(1) as pool:  # a browser of other tests may have left an event loop in this thread
        answers = pool.submit(asyncio.run, all_requests()).result()
    statuses = [status for status, _, _ in answers]
    assert len(statuses) == 1000
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 64
    for status, head, rest in answers:
        if status == 200:
            assert b'{"done":true}' in rest
        else:
            assert b"retry-after: 1" in head.lower()
            assert b"accepts 64 requests at a time" in rest
    assert viewer.cache.bytes <= viewer.cache.max_bytes
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 400 << 20  # includes the clients
    assert running.post("heads", **body).status_code == 200


# ---- as a command


def test_only_loopback_is_listened_to(viewer, assets, monkeypatch):
    import uvicorn

    requested, listened = [], []

    async def no_startup(self, sockets=None):
        listened.extend(x.getsockname()[0] for x in sockets)
        self.should_exit = True

    monkeypatch.setattr(uvicorn.Server, "startup", no_startup)
    with ThreadPoolExecutor(1) as pool:  # a browser of other tests may have left an event loop in this thread
        pool.submit(serve, viewer, assets=assets, ready=requested.append).result()
    assert listened == ["127.0.0.1"]
    assert requested == []  # `ready` is not called if the server did not start


def test_missing_assets_are_reported(viewer, tmp_path):
    with pytest.raises(OptionError, match="make frontend"):
        serve(viewer, assets=tmp_path)


def test_occupied_port_is_reported(viewer, assets):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"got {port}: Address already in use"):
            serve(viewer, port=port, assets=assets)
    with pytest.raises(OptionError, match="got 70000"):
        serve(viewer, port=70_000, assets=assets)


def test_missing_package_is_reported(viewer, assets, monkeypatch):
    monkeypatch.setattr("polyhead.report.viewer.serve.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs starlette and uvicorn.*polyhead\[report\]"):
        serve(viewer, assets=assets)


@pytest.fixture
def command(assets):
    """Start the command in a fork of this process, and return it with its address once that is printed."""
    started: list[Forked] = []

    def start(*arguments: object) -> tuple[Forked, str]:
        one = Forked(arguments, before=lambda: setattr(viewer_app, "ASSETS", assets))
        started.append(one)
        one.wait_for(lambda: "\n" in one.printed())
        assert one.printed().startswith("Viewer running at http://127.0.0.1:"), one.end(signal.SIGKILL)
        return one, one.printed().splitlines()[0].split()[-1]

    yield start
    for one in started:
        if one.poll() is None:
            one.end(signal.SIGKILL)


def test_command_prints_its_address_and_ends_with_ctrl_c(tmp_path, command):
    folder = small_models.model_folder(tmp_path / "llama", "llama")
    (tmp_path / "text.txt").write_text("w1 w2 w3", encoding="utf-8")
    viewing, address = command(
        "view", folder, "--no-open", "--text", tmp_path / "text.txt", "--context", 50, "--lang", "zh"
    )
    token = address.rstrip("/").rpartition("/")[2]
    assert len(token) >= 32
    with urllib.request.urlopen(address + "api/state", timeout=30) as answer:
        state = json.load(answer)
    assert (state["context"], state["lang"]) == (50, "zh")
    assert state["traces"]["A"]["text"]["tokens"] == ["[CLS]", "w1", "w2", "w3"]
    _, errors = viewing.end(signal.SIGINT)  # what Ctrl-C sends
    assert viewing.returncode == 0, errors
    assert "Traceback" not in errors
    assert token not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="other systems always have a display")
@pytest.mark.parametrize("display", ["DISPLAY", "WAYLAND_DISPLAY", "BROWSER", None])
def test_a_browser_is_opened_only_where_it_can_show_a_window(tmp_path, assets, monkeypatch, display):
    from typer.testing import CliRunner

    from polyhead.cli import app

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if display is not None:
        monkeypatch.setenv(display, "something")
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    monkeypatch.setattr("polyhead.report.viewer.serve.serve", lambda *_, ready, **__: ready("http://127.0.0.1:1/x/"))
    folder = small_models.model_folder(tmp_path / "llama", "llama")
    shown = CliRunner().invoke(app, ["view", str(folder), "--device", "cpu"])
    assert shown.stdout.startswith("Viewer running at http://127.0.0.1:1/x/\n"), shown.output
    assert opened == ([] if display is None else ["http://127.0.0.1:1/x/"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "131"], "at most 130"),
        (["--text", "nowhere.txt"], "--text must be a"),
        (["--port", "70000"], "must be from 0 to 65535"),
    ],
)
def test_invalid_options_are_reported(tmp_path, assets, arguments, message, capsys, monkeypatch):
    from typer.testing import CliRunner

    from polyhead.cli import app

    monkeypatch.setattr("polyhead.report.viewer.app.ASSETS", assets)
    folder = small_models.model_folder(tmp_path / "llama", "llama")
    result = CliRunner().invoke(app, ["view", str(folder), "--no-open", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_run_is_opened_with_its_model_and_roles(tmp_path, assets, monkeypatch):
    from typer.testing import CliRunner

    from polyhead.cli import app
    from polyhead.inspection import Settings, save_inspection
    from polyhead.workflows.inspecting import inspect_model

    folder = small_models.model_folder(tmp_path / "bert", "bert")
    settings = Settings(
        model=str(folder), text=str(small_models.text_folder(tmp_path / "texts")), context=64, importance="none",
        chance=False,
    )  # fmt: skip
    save_inspection(tmp_path / "run", inspect_model(settings))
    served, loaded = [], []
    monkeypatch.setattr("polyhead.report.viewer.serve.serve", lambda viewer, **options: served.append(viewer))
    from polyhead.workflows import model_loading

    true = model_loading.load_model
    monkeypatch.setattr(model_loading, "load_model", lambda *a, **x: loaded.append(x) or true(*a, **x))
    result = CliRunner().invoke(app, ["view", str(tmp_path / "run"), "--no-open"])
    assert result.exit_code == 0, result.output
    (viewer,) = served
    assert isinstance(viewer, Viewer)
    assert viewer.model.loaded.name == "bert"
    assert len(viewer.run["heads"]) == 8
    assert viewer.traces["A"] is not None  # the example
    json.dumps(viewer.run, allow_nan=False)
    assert loaded[0]["allow_pickle"] is False  # permissions of a run are not inherited


def test_view_opens_with_an_example_that_the_model_can_read(tmp_path, monkeypatch):
    from transformers import ByT5Tokenizer
    from typer.testing import CliRunner

    from polyhead.cli import app

    folder = small_models.model_folder(tmp_path / "llama", "llama")
    config = json.loads((folder / "config.json").read_text())
    for file in folder.glob("*token*"):
        file.unlink()
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "vocab_size": 259})).save_pretrained(folder)
    served = []
    monkeypatch.setattr("polyhead.report.viewer.serve.serve", lambda viewer, **options: served.append(viewer))
    result = CliRunner().invoke(app, ["view", str(folder), "--no-open", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "Reading an example ..." in result.stderr
    (viewer,) = served
    shown = viewer.traces["A"]
    assert shown is not None
    assert "".join(shown.text.tokens).startswith("When Mary and John")


# ---- robustness


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """A model whose forward pass takes minutes."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("patient") / "llama"
    torch.manual_seed(0)
    sizes = {**small_models.SIZES, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=40_000)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    small_models.tokenizer().save_pretrained(folder)
    return folder


def test_ctrl_c_during_a_forward_pass_ends_within_three_seconds(slow_model, command):
    viewing, address = command("view", slow_model, "--no-open", "--device", "cpu")
    text = " ".join(f"w{number % 90}" for number in range(30_000))
    answers: list[int] = []

    def read():
        body = {"slot": "A", "text": text}
        with httpx.stream("POST", address + "api/trace", json=body, timeout=60) as answer:
            answers.append(answer.status_code)
            for _ in answer.iter_lines():
                pass

    reader = threading.Thread(target=read)
    reader.start()
    idle = cpu_seconds(viewing.pid)
    wait_for(lambda: cpu_seconds(viewing.pid) > idle + 0.5)
    assert reader.is_alive()  # still running
    began = time.monotonic()
    _, errors = viewing.end(signal.SIGINT)
    took = time.monotonic() - began
    reader.join(10)
    assert viewing.returncode == 0, errors
    assert "Traceback" not in errors
    assert answers in ([200], [503])
    assert took < 3, took


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _accepts(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
    except OSError:
        return False
    return True


def test_incomplete_headers_do_not_block_others_and_time_out(viewer, assets, monkeypatch):
    from polyhead.report.viewer import connections

    monkeypatch.setattr(connections, "HEADER_SECONDS", 1.0)
    addresses: list[str] = []
    servers: list[object] = []
    import uvicorn

    true = uvicorn.Server.__init__
    monkeypatch.setattr(uvicorn.Server, "__init__", lambda self, config: (servers.append(self), true(self, config))[1])
    monkeypatch.setattr(uvicorn.Server, "install_signal_handlers", lambda self: None, raising=False)
    thread = threading.Thread(target=serve, args=(viewer,), kwargs={"assets": assets, "ready": addresses.append})
    thread.start()
    half: list[socket.socket] = []
    try:
        wait_for(lambda: addresses)
        port = int(addresses[0].split(":")[2].split("/")[0])
        for number in range(600):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            half.append(one)
            if number % 100 == 99:
                began = time.monotonic()
                assert httpx.get(addresses[0] + "api/state", timeout=10).status_code == 200
                assert time.monotonic() - began < 5
        assert len(servers[0].server_state.connections) <= connections.MAX_CONNECTIONS + 1
        # An occasional byte does not keep a connection open.
        last = half[-1]
        last.settimeout(10)
        began = time.monotonic()
        while time.monotonic() - began < 8 and _accepts(last):
            time.sleep(0.05)
        assert time.monotonic() - began < 6
        wait_for(lambda: not servers[0].server_state.connections)
        assert httpx.get(addresses[0] + "api/state", timeout=10).status_code == 200
    finally:
        for one in half:
            one.close()
        servers[0].should_exit = True
        thread.join(30)
    assert not thread.is_alive()
