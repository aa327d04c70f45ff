"""The viewer's routes: who is answered, what is refused and in which words, and that answers are the exact numbers."""

from __future__ import annotations

import base64
import json
import time

import pytest
import torch
from starlette.testclient import TestClient

from polyhead.report.viewer import tiles
from polyhead.report.viewer.app import create_app
from polyhead.report.viewer.viewing import Viewer
from tests.report.viewer.conftest import TEXT

TOKEN = "a-token-of-this-test"
ADDRESS = "http://127.0.0.1:8123"


class Page:
    """A page of the viewer, as far as its requests go."""

    def __init__(self, client):
        self.client = client

    def get(self, path, **options):
        return self.client.get(f"/{TOKEN}/{path}", **options)

    def post(self, path, **body):
        headers = {"content-type": "application/json"}
        return self.client.post(f"/{TOKEN}/api/{path}", content=json.dumps(body).encode(), headers=headers)

    def lines(self, path, **body):
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.text.splitlines()]

    def one(self, path, **body):
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path, status, **body):
        response = self.post(path, **body)
        error = response.json()["error"]
        assert response.status_code == error["status"] == status
        return error["message"]

    def read(self, text=TEXT, slot="A", **options):
        return self.lines("read", slot=slot, text=text, **options)[-1]["reading"]


def opened(viewer, assets, **options):
    return TestClient(create_app(viewer, token=TOKEN, assets=assets, **options), base_url=ADDRESS)


@pytest.fixture
def page(viewer, assets):
    with opened(viewer, assets) as client:
        yield Page(client)


def numbers(packed):
    data = bytearray(base64.b64decode(packed["data"]))
    if packed["type"] == "f32":
        return torch.frombuffer(data, dtype=torch.float32).view(packed["shape"])
    shares = torch.frombuffer(data, dtype=torch.uint8).view(packed["shape"]).double() / 255
    return shares * torch.tensor(packed["scale"]).view(-1, *(1 for _ in packed["shape"][1:]))


def weights_of(viewer, number, place):
    attention = viewer.reading(number).attentions[place]
    return tiles.window(attention, (0, attention.queries), (0, attention.keys), 0, "sum")


# ---- who is answered


@pytest.mark.parametrize(
    "path", ["/", "/api/state", "/wrong/api/state", f"/{TOKEN}", f"/{TOKEN}x/", f"//{TOKEN}/", "/é/"]
)
def test_without_the_token_nothing_is_answered(page, path):
    response = page.client.get(path, follow_redirects=False)
    assert response.status_code == 403
    assert "token that `polyhead view` printed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:9999", "127.0.0.1.evil.example:8123", ""]
)
def test_another_name_for_this_machine_is_refused(page, host):
    response = page.get("api/state", headers={"host": host})
    assert response.status_code == 421
    assert "127.0.0.1:8123" in response.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:8123", "LOCALHOST:8123", "[::1]:8123"])
def test_names_of_this_machine_are_answered(page, host):
    assert page.get("api/state", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8123"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_origin_is_refused(page, headers):
    for response in (
        page.get("api/state", headers=headers),
        page.client.post(f"/{TOKEN}/api/cancel", json={"client": "x"}, headers=headers),
        page.client.options(f"/{TOKEN}/api/cancel", headers=headers),
    ):
        assert response.status_code == 403
        assert "its own page only" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers


def test_its_own_page_is_answered(page):
    headers = {"origin": ADDRESS, "sec-fetch-site": "same-origin"}
    assert page.get("api/state", headers=headers).status_code == 200
    assert page.get("", headers={"sec-fetch-site": "none"}).status_code == 200


def test_a_link_to_the_page_may_stand_on_another_site(page):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert page.get("", headers=link).status_code == 200
    for path, headers in (
        ("api/state", link),
        ("view.js", link),
        ("", {**link, "sec-fetch-dest": "iframe"}),
        ("", {**link, "sec-fetch-dest": "script"}),
    ):
        assert page.get(path, headers=headers).status_code == 403
    assert page.client.post(f"/{TOKEN}/", headers=link).status_code == 403


def test_websockets_are_closed(page):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect) as caught, page.client.websocket_connect(f"/{TOKEN}/api/state"):
        pass
    assert caught.value.code == 1008


def test_every_answer_carries_a_strict_policy(page):
    answers = [page.get(""), page.get("view.js"), page.get("api/state"), page.get("nothing"), page.client.get("/")]
    for response in (*answers, page.post("tile"), page.post("read", slot="A", text="w1")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"


def test_styles_that_the_build_lists_are_allowed_by_their_hash(viewer, assets):
    (assets / "csp.json").write_text(json.dumps({"styles": ["sha256-abc="]}))
    with opened(viewer, assets) as client:
        policy = Page(client).get("").headers["content-security-policy"]
    assert "style-src 'self' 'sha256-abc=';" in policy


# ---- files


def test_the_page_holds_no_script_of_its_own(page):
    response = page.get("")
    assert response.headers["content-type"].startswith("text/html")
    assert response.text.count("<script") == 1
    assert '<script src="view.js" defer></script>' in response.text
    assert 'id="polyhead-view"' in response.text
    assert "style=" not in response.text
    assert "onload" not in response.text
    assert page.get("view.js").text == "'the script'"
    assert page.get("view.js").headers["content-type"].startswith("text/javascript")
    assert page.get("view.css").headers["content-type"].startswith("text/css")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "..%5csecret.txt",
        "view.js/../../secret.txt",
        "assets/../../secret.txt",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "page.js",
        "csp.json",
        "view.js%00",
        "view.js/",
        "app.py",
        "static/view.js",
    ],
)
def test_no_other_file_is_served(page, path):
    response = page.client.get(f"{ADDRESS}/{TOKEN}/{path}", follow_redirects=False)
    assert response.status_code in (307, 403, 404)
    assert not any(words in response.text for words in ("a secret", "root:", "another page"))


def test_a_missing_script_says_how_to_build_it(page, assets):
    (assets / "view.js").unlink()
    response = page.get("view.js")
    assert response.status_code == 404
    assert "make frontend" in response.json()["error"]["message"]


# ---- malformed questions


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"a": 1' + b"}" * 9, b"NaN"]
)
def test_what_is_no_json_object_is_refused(page, body):
    response = page.client.post(f"/{TOKEN}/api/tile", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "a request must be a JSON object" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_other_content_types_are_refused(page, kind):
    response = page.client.post(f"/{TOKEN}/api/tile", content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415


def test_bodies_have_a_bound(page):
    large = json.dumps({"reading": 1, "junk": "x" * 70_000}).encode()
    headers = {"content-type": "application/json"}
    assert page.client.post(f"/{TOKEN}/api/tile", content=large, headers=headers).status_code == 413

    def endless():
        for _ in range(100):
            yield b"x" * 1000

    response = page.client.post(f"/{TOKEN}/api/tile", content=endless(), headers=headers)
    assert response.status_code == 413
    assert "at most 65536 bytes" in response.json()["error"]["message"]
    lying = {**headers, "content-length": "9" * 30}
    assert page.client.post(f"/{TOKEN}/api/tile", content=b"{}", headers=lying).status_code == 413


def test_fields_are_held_against_their_rules(page):
    reading = page.read()["id"]
    head = {"reading": reading, "place": 0, "head": 0}
    tile = {**head, "level": 0, "row": 0, "column": 0}
    assert "reading is required, and is missing" in page.refused("tile", 422)
    assert "place must be an integer from 0 to 1, got 2" in page.refused("tile", 422, **{**tile, "place": 2})
    assert "head must be an integer from 0 to 3, got -1" in page.refused("tile", 422, **{**tile, "head": -1})
    assert "got true" in page.refused("tile", 422, **{**tile, "head": True})
    assert "got 0.0" in page.refused("tile", 422, **{**tile, "head": 0.0})
    assert "level must be 0 to 0" in page.refused("tile", 422, **{**tile, "level": 10**12})
    assert "level must be an integer" in page.refused("tile", 422, **{**tile, "level": 10**300})
    assert 'pool must be one of sum, max, got "mean"' in page.refused("tile", 422, **tile, pool="mean")
    assert "this request has the fields" in page.refused("tile", 422, **tile, levle=1)
    assert 'got "levle" as well' in page.refused("tile", 422, **tile, levle=1)
    assert "client must have at most 64 characters" in page.refused("tile", 413, **tile, client="x" * 65)
    assert "rows must be [first" in page.refused("window", 422, **head, rows=[3, 3], columns=[0, 1])
    assert "rows must be [first" in page.refused("window", 422, **head, rows=[0, 10**9], columns=[0, 1])
    assert "rows must be [first" in page.refused("window", 422, **head, rows="all", columns=[0, 1])
    assert "token must be an integer from 0 to 17" in page.refused("word", 422, reading=reading, token=18)
    assert "places must be distinct" in page.refused("word", 422, reading=reading, token=1, places=[1, 1])
    assert "heads [place, head] that this model has, got [0, 4]" in page.refused(
        "effect", 422, reading=reading, off=[[0, 4]]
    )
    assert "off must be a list" in page.refused("effect", 422, reading=reading, off="all")
    assert 'slot must be one of A, B, got "C"' in page.refused("read", 422, slot="C", text="w1")
    assert "text must be a text, got a list" in page.refused("read", 422, slot="A", text=["w1"])
    assert "a lone surrogate" in page.refused("read", 422, slot="A", text="\ud800")
    assert "one must be an object" in page.refused("distance", 422, one=3, other={})
    assert "grid must be an integer from 16 to 128" in page.refused("heads", 422, reading=reading, grid=100_000)


def test_addresses_and_methods_that_there_are_not(page):
    assert page.post("nothing").status_code == 404
    assert page.get("api/tile").status_code == 405
    assert page.client.post(f"/{TOKEN}/api/state", json={}).status_code == 405
    assert page.client.delete(f"/{TOKEN}/api/read").status_code == 405
    assert "no such address" in page.get("api/nothing").json()["error"]["message"]


# ---- answers


def test_the_state_tells_of_the_model_and_its_places(page):
    state = page.get("api/state").json()
    assert state["model"]["kind"] == "causal"
    assert (state["context"], state["context_reason"], state["generates"]) == (130, "trained", True)
    assert [place["layer"] for place in state["places"]] == [0, 1]
    assert state["stacks"] == [{"name": "model.layers.*.self_attn", "kind": "self", "places": [0, 1]}]
    assert state["readings"] == {"A": None, "B": None}
    assert state["run"] is False
    assert page.get("api/run").status_code == 404


def test_a_run_is_shown_beside_its_model(viewed, assets):
    site = {"name": "model.layers.1.self_attn", "kind": "self", "originals": ["0", "1", "2", "3"]}
    viewer = Viewer(viewed("llama"), run={"sites": [{**site, "name": "elsewhere"}, site], "roles": ["previous"]})
    with opened(viewer, assets) as client:
        state = Page(client).get("api/state").json()
        assert [place["run_site"] for place in state["places"]] == [None, 1]
        assert Page(client).get("api/run").json()["roles"] == ["previous"]


def test_every_weight_of_a_short_text_at_once(page, viewer):
    reading = page.read()
    first, *places, last = page.lines("heads", reading=reading["id"])
    assert first["how"] == {"kind": "weights", "exact": True, "block": 1, "rule": None}
    assert last == {"done": True}
    for number, line in enumerate(places):
        assert line["place"] == number
        expected = weights_of(viewer, reading["id"], number).double()
        step = expected.flatten(1).amax(1)[:, None, None] / 255
        assert ((numbers(line["weights"]) - expected).abs() <= 0.51 * step).all()


def test_all_heads_of_a_longer_text_are_exact_blocks_or_say_that_they_are_not(page, viewer, monkeypatch):
    reading = page.read(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    assert len(viewer.reading(reading).ids) == 130
    first, *places, _ = page.lines("heads", reading=reading, grid=16, pool="max")
    assert first["how"] == {"kind": "blocks", "exact": True, "block": 16, "rule": None}
    expected = weights_of(viewer, reading, 1)[:, 16:32, :16].amax((1, 2))
    torch.testing.assert_close(numbers(places[1]["weights"])[:, 1, 0], expected)
    monkeypatch.setattr("polyhead.report.viewer.viewing.EXACT_PAIRS", 1)
    monkeypatch.setattr("polyhead.report.viewer.viewing.ROUGH_PAIRS", 1)
    first, *places, _ = page.lines("heads", reading=reading, grid=16)
    assert first["how"]["kind"] == "estimate"
    assert first["how"]["exact"] is False
    assert first["how"]["rule"]["every"] == 16
    assert first["how"]["rule"]["rows"] == 1
    assert [line["exact"] for line in places] == [False, False]
    middle = weights_of(viewer, reading, 0)[:, 24] * 16  # of the rows 16 to 31
    torch.testing.assert_close(numbers(places[0]["weights"])[:, 1, 1], middle[:, 16:32].sum(1))


def test_a_picture_is_an_estimate_first_and_then_exact(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "PICTURE_CELLS", 40)
    monkeypatch.setattr(tiles, "ESTIMATE_CELLS", 10)
    monkeypatch.setattr(tiles, "ESTIMATE_PAIRS", {"cpu": 1})
    monkeypatch.setattr(tiles, "STRIP_PAIRS", {"cpu": 2000})
    reading = page.read(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    requested = {"reading": reading, "place": 1, "head": 2}
    rough, begins, *strips, last = page.lines("picture", **requested)
    assert rough["how"]["kind"] == "estimate"
    assert rough["level"] == 4
    assert rough["how"]["rule"]["every"] == 16
    assert numbers(rough["weights"]).shape == (9, 9)
    assert begins == {"how": {"kind": "blocks", "exact": True, "block": 4, "rule": None}, "level": 2}
    assert [x["progress"]["done"] for x in strips] == list(range(1, len(strips) + 1))
    assert strips[-1]["progress"]["total"] == len(strips) > 5
    picture = torch.zeros(33, 33)
    for strip in strips:
        cells = numbers(strip["strip"]["weights"])
        picture[strip["strip"]["first"] : strip["strip"]["first"] + len(cells)] = cells
    weights = torch.nn.functional.pad(weights_of(viewer, reading, 1)[2], (0, 2, 0, 2))
    expected = weights.unflatten(1, (33, 4)).unflatten(0, (33, 4)).sum((1, 3))
    torch.testing.assert_close(picture, expected, atol=1e-6, rtol=1e-5)
    assert last == {"done": True}
    again, done = page.lines("picture", **requested)
    assert again["how"]["exact"] is True
    assert torch.equal(numbers(again["weights"]), picture)
    assert done == {"done": True}


def test_a_tile_is_exact_and_costs_nothing_the_second_time(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 16)
    reading = page.read(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    requested = {"reading": reading, "place": 1, "head": 3, "pool": "max", "level": 1, "row": 2, "column": 1}
    found = page.one("tile", **requested)
    assert (found["rows"], found["columns"], found["block"]) == ([64, 96], [32, 64], 2)
    window = weights_of(viewer, reading, 1)[3, 64:96, 32:64]
    expected = window.unflatten(1, (16, 2)).unflatten(0, (16, 2)).amax((1, 3))
    torch.testing.assert_close(numbers(found["weights"]), expected, atol=1e-7, rtol=1e-6)
    monkeypatch.setattr(tiles, "window", None)  # nobody computes
    assert page.one("tile", **requested) == found
    # Another text in the same slot: what was kept of the first is gone.
    monkeypatch.undo()
    page.read("w1 w2")
    assert len(viewer.cache) == 0
    assert "was removed" in page.refused("tile", 410, **requested)


def test_a_coarse_tile_is_cut_out_of_a_picture_that_is_known(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 16)
    monkeypatch.setattr(tiles, "PICTURE_CELLS", 64)
    reading = page.read(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    head = {"reading": reading, "place": 0, "head": 1}
    requested = {**head, "level": 3, "row": 1, "column": 0}
    computed = numbers(page.one("tile", **requested)["weights"])
    viewer.cache.clear()
    page.lines("picture", **head)
    monkeypatch.setattr(tiles, "window", None)  # nobody computes
    torch.testing.assert_close(numbers(page.one("tile", **requested)["weights"]), computed, atol=1e-6, rtol=1e-5)


def test_a_window_is_single_weights(page, viewer):
    reading = page.read()["id"]
    found = page.one("window", reading=reading, place=1, head=2, rows=[3, 11], columns=[2, 9])
    expected = weights_of(viewer, reading, 1)[2, 3:11, 2:9]
    torch.testing.assert_close(numbers(found["weights"]), expected, atol=1e-7, rtol=1e-5)


def test_a_word_in_every_head(page, viewer):
    reading = page.read()["id"]
    *places, last = page.lines("word", reading=reading, token=7)
    assert last == {"done": True}
    for line in places:
        weights = weights_of(viewer, reading, line["place"])
        torch.testing.assert_close(numbers(line["attends"]["weights"]), weights[:, 7])
        torch.testing.assert_close(numbers(line["attended"]["weights"]), weights[:, :, 7])
        assert line["attends"]["top"]["tokens"][2][0] == int(weights[2, 7].argmax())
    (only, _) = page.lines("word", reading=reading, token=7, places=[1], side="keys")
    assert only["place"] == 1
    assert only["attends"] is None
    assert only["attended"] is not None


def test_a_word_of_the_source_and_one_of_the_target(viewed, assets):
    with opened(Viewer(viewed("t5")), assets) as client:
        page = Page(client)
        reading = page.read()
        *places, _ = page.lines("word", reading=reading["id"], token=0, axis="target")
        told = [(x["attends"] is not None, x["attended"] is not None) for x in places]
        assert told == [(False, False)] * 2 + [(True, True), (True, False)] * 2
        *places, _ = page.lines("word", reading=reading["id"], token=5)
        told = [(x["attends"] is not None, x["attended"] is not None) for x in places]
        assert told == [(True, True)] * 2 + [(False, False), (False, True)] * 2


def test_heads_are_switched_off(page, viewer):
    reading = page.read()
    progress, last = [], None
    for line in page.lines("effect", reading=reading["id"], off=[[0, 1], [1, 2]]):
        progress += [line["progress"]["done"]] if "progress" in line else []
        last = line
    assert progress == [1, 2]
    expected = viewer.model.output_without(viewer.reading(reading["id"]), {(0, 1), (1, 2)}, lambda done, total: None)
    assert last["after"] == expected.to_dict()
    assert last["before"] == reading["output"]
    assert last["divergence"] > 0
    gated = page.read(slot="B", off=[[0, 1], [1, 2]])
    assert gated["off"] == [[0, 1], [1, 2]]
    assert gated["output"] == expected.to_dict()
    compared = page.one("compare", one=reading["id"], other=gated["id"])
    assert compared["divergence"] == last["divergence"]


def test_two_texts_are_held_and_compared(page):
    one, other = page.read("w1 w2 w3 a"), page.read("w1 w2 w3 .", slot="B")
    readings = page.get("api/state").json()["readings"]
    assert [readings[slot]["id"] for slot in "AB"] == [one["id"], other["id"]]
    ends = {
        "one": {"reading": one["id"], "place": 0, "head": 1},
        "other": {"reading": other["id"], "place": 1, "head": 0},
    }
    found = page.lines("distance", **ends)[-1]
    assert found["done"]
    assert found["rows"] == 5
    assert 0 < found["divergence"] < 0.7
    same = page.lines("distance", one=ends["one"], other=ends["one"])[-1]
    assert same["divergence"] == 0.0
    page.lines("close", slot="B")
    assert page.get("api/state").json()["readings"]["B"] is None
    assert "was removed" in page.refused("compare", 410, one=one["id"], other=other["id"])


def test_generation_goes_on_token_by_token(page, viewer):
    reading = page.read("w1 w2 w3")
    stepped = page.lines("step", reading=reading["id"])[-1]
    greedy = reading["output"]["top"][0]
    assert stepped["token"]["id"] == reading["output"]["greedy"] == greedy["id"]
    assert stepped["token"]["probability"] == greedy["probability"]
    assert stepped["reading"]["generated"] == 1
    assert len(stepped["reading"]["text"]["tokens"]) == 5
    for row in stepped["rows"]:
        expected = weights_of(viewer, stepped["reading"]["id"], row["place"])[:, -1]
        torch.testing.assert_close(numbers(row["attends"]["weights"]), expected)
    assert "was removed" in page.refused("step", 410, reading=reading["id"])
    chosen = page.lines("step", reading=stepped["reading"]["id"], token=40)[-1]
    assert chosen["token"]["id"] == 40
    assert "token must be from 0 to 97" in page.refused("step", 422, reading=chosen["reading"]["id"], token=98)
    back = page.lines("back", reading=chosen["reading"]["id"])[-1]["reading"]
    assert back["text"] == stepped["reading"]["text"]
    assert back["output"] == stepped["reading"]["output"]


def test_hostile_text_comes_back_as_text(viewed, assets):
    text = "w1 </script><script>alert(1)</script> \u202e\u200b\x00\x1b[31m " + "x" * 100_000
    with opened(Viewer(viewed("bert")), assets) as client:
        page = Page(client)
        response = page.post("read", slot="A", text=text)
        assert response.status_code == 200
        assert response.text.isascii()
        tokens = page.get("api/state").json()["readings"]["A"]["text"]["tokens"]
    assert max(map(len, tokens)) == 201
    assert "script" in tokens
    assert "\u202e\u200b\x00\x1b[" in "".join(tokens)


# ---- memory, and what goes wrong


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_model_without_memory_is_told_and_the_viewer_lives(page, viewer, monkeypatch, error):
    reading = page.read()["id"]
    page.one("tile", reading=reading, place=0, head=0, level=0, row=0, column=0)
    assert len(viewer.cache) == 1

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(viewer.model.model, "forward", fail)
        message = page.refused("read", 507, slot="A", text="w1 w2")
    assert "ran out of memory" in message
    _wait_for(lambda: len(viewer.cache) == 0)
    assert page.get("api/state").json()["readings"]["A"]["id"] == reading
    assert page.read("w1 w2")["id"] > reading


def test_memory_that_runs_out_in_the_middle_of_a_stream_is_its_last_line(page, viewer, monkeypatch):
    reading = page.read()["id"]
    true, calls = tiles.window, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return true(*args, **kwargs)

    monkeypatch.setattr(tiles, "window", fail)
    *_, last = page.lines("heads", reading=reading)
    assert last["error"]["status"] == 507


def test_a_model_that_breaks_tells_no_secrets(page, viewer, monkeypatch, log):
    def fail(*args, **kwargs):
        raise ValueError("somebody/private")

    monkeypatch.setattr(viewer.model.model, "forward", fail)
    message = page.refused("read", 500, slot="A", text="w1 w2")
    assert "ValueError" in message
    assert "private" not in message
    assert "private" in log.getvalue()


def test_a_model_that_says_nan_is_shown_as_it_is(page, viewer):
    with torch.no_grad():
        before = viewer.model.model.lm_head.weight.clone()
        viewer.model.model.lm_head.weight.fill_(torch.nan)
    try:
        output = page.read()["output"]
    finally:
        with torch.no_grad():
            viewer.model.model.lm_head.weight.copy_(before)
    assert output["entropy"] is None
    assert output["top"][0]["probability"] is None


def test_weights_that_are_nan_are_told_as_nothing(page, viewer):
    reading = page.read()["id"]
    viewer.reading(reading).attentions[0].query[:, 1].fill_(torch.nan)
    first, *_, last = page.lines("word", reading=reading, token=7)
    assert last == {"done": True}
    assert first["attends"]["top"]["weights"][1][0] is None
    assert first["attends"]["top"]["weights"][0][0] > 0
    head = {"reading": reading, "place": 0, "head": 1}
    assert page.lines("distance", one=head, other={**head, "head": 0})[-1]["divergence"] is None


def test_a_reading_that_was_called_off_changes_nothing(page, viewer, monkeypatch):
    reading = page.read()["id"]
    true = viewer.model.read

    def read_while_the_page_moves_on(*arguments):
        found = true(*arguments)
        page.one("cancel", client="page")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(viewer.model, "read", read_while_the_page_moves_on)
        *_, last = page.lines("read", slot="A", text="w5", client="page")
    assert last["error"]["kind"] == "superseded"
    assert page.get("api/state").json()["readings"]["A"]["id"] == reading


def test_an_older_turn_is_not_taken_up_again(page):
    reading = page.read()["id"]
    assert page.one("cancel", client="page") == {"cancelled": 0}
    assert "lane must be a text" in page.refused("cancel", 422, client="page", lane=3)
    # Nothing of the newer turn is left, so that an older one is answered: turns order what is on its way.
    for turn in (7, 3):
        page.one("window", reading=reading, place=0, head=0, rows=[0, 1], columns=[0, 1], client="page", turn=turn)


def _wait_for(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_same_tokens_are_read_again_with_other_heads_off(page, viewer):
    first = page.read(off=[[0, 1]])
    again = page.lines("again", reading=first["id"], off=[[1, 0]])[-1]["reading"]
    assert again["text"]["tokens"] == first["text"]["tokens"]
    assert again["off"] == [[1, 0]]
    assert again["id"] != first["id"]
    fresh = page.read(off=[[1, 0]], slot="B")
    for place in range(2):
        one, other = (weights_of(viewer, reading["id"], place) for reading in (again, fresh))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert page.refused("again", 410, reading=first["id"], off=[])
