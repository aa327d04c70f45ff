"""Routes of the viewer: access, error messages, and exact numbers."""

from __future__ import annotations

import base64
import json
import time

import pytest
import torch
from starlette.testclient import TestClient

from polyhead.report.viewer import tiles
from polyhead.report.viewer.app import create_app, create_run_app
from polyhead.report.viewer.failures import RequestError, cancelled
from polyhead.report.viewer.viewing import Viewer
from polyhead.training import HeadLocation, RunDirectory, StepRecord
from tests.report.viewer.conftest import TEXT

TOKEN = "a-token-of-this-test"
ADDRESS = "http://127.0.0.1:8123"


class Page:
    """The requests of a page of the viewer."""

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

    def trace(self, text=TEXT, slot="A", **options):
        return self.lines("trace", slot=slot, text=text, **options)[-1]["trace"]


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


def weights_of(viewer, number, layer):
    attention = viewer.find(number).attentions[layer]
    return tiles.window(attention, (0, attention.queries), (0, attention.keys), 0, "sum")


# ---- access


@pytest.mark.parametrize(
    "path", ["/", "/api/state", "/wrong/api/state", f"/{TOKEN}", f"/{TOKEN}x/", f"//{TOKEN}/", "/é/"]
)
def test_requests_without_the_token_are_refused(page, path):
    response = page.client.get(path, follow_redirects=False)
    assert response.status_code == 403
    assert "token that `polyhead view` printed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:9999", "127.0.0.1.evil.example:8123", ""]
)
def test_other_host_names_are_refused(page, host):
    response = page.get("api/state", headers={"host": host})
    assert response.status_code == 421
    assert "127.0.0.1:8123" in response.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:8123", "LOCALHOST:8123", "[::1]:8123"])
def test_loopback_host_names_are_accepted(page, host):
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
        page.client.post(f"/{TOKEN}/api/tile", json={}, headers=headers),
        page.client.options(f"/{TOKEN}/api/tile", headers=headers),
    ):
        assert response.status_code == 403
        assert "its own page only" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers


def test_requests_of_the_own_page_are_accepted(page):
    headers = {"origin": ADDRESS, "sec-fetch-site": "same-origin"}
    assert page.get("api/state", headers=headers).status_code == 200
    assert page.get("", headers={"sec-fetch-site": "none"}).status_code == 200


def test_links_from_other_sites_may_open_the_page_only(page):
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


def test_every_response_has_a_strict_policy(page):
    answers = [page.get(""), page.get("view.js"), page.get("api/state"), page.get("nothing"), page.client.get("/")]
    for response in (*answers, page.post("tile"), page.post("trace", slot="A", text="w1")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"


# ---- files


def test_page_has_no_inline_script(page):
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


# ---- malformed requests


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"a": 1' + b"}" * 9, b"NaN"]
)
def test_body_that_is_no_json_object_is_refused(page, body):
    response = page.client.post(f"/{TOKEN}/api/tile", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "a request must be a JSON object" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_other_content_types_are_refused(page, kind):
    response = page.client.post(f"/{TOKEN}/api/tile", content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415


def test_body_size_is_limited(page):
    large = json.dumps({"trace": 1, "junk": "x" * 70_000}).encode()
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


@pytest.mark.parametrize("length", ["abc", "-5", "1e3", "2, 2", "", "\xb2"])
def test_invalid_content_length_is_refused_as_such(page, length):
    headers = {"content-type": "application/json", "content-length": length.encode("latin-1")}
    response = page.client.post(f"/{TOKEN}/api/tile", content=b"{}", headers=headers)
    assert response.status_code == 400
    assert "Content-Length must be a number of bytes, got '" in response.json()["error"]["message"]


def test_invalid_fields_are_refused_with_their_rule(page):
    trace = page.trace()["id"]
    head = {"trace": trace, "layer": 0, "head": 0}
    tile = {**head, "level": 0, "row": 0, "column": 0}
    assert "trace is required, and is missing" in page.refused("tile", 422)
    assert "layer must be an integer from 0 to 1, got 2" in page.refused("tile", 422, **{**tile, "layer": 2})
    assert "head must be an integer from 0 to 3, got -1" in page.refused("tile", 422, **{**tile, "head": -1})
    assert "got true" in page.refused("tile", 422, **{**tile, "head": True})
    assert "got 0.0" in page.refused("tile", 422, **{**tile, "head": 0.0})
    assert "level must be 0 to 0" in page.refused("tile", 422, **{**tile, "level": 10**12})
    assert "level must be an integer" in page.refused("tile", 422, **{**tile, "level": 10**300})
    assert 'pool must be one of sum, max, got "mean"' in page.refused("tile", 422, **tile, pool="mean")
    assert "this request has the fields" in page.refused("tile", 422, **tile, levle=1)
    assert 'got "levle" as well' in page.refused("tile", 422, **tile, levle=1)
    assert "rows must be [first" in page.refused("window", 422, **head, rows=[3, 3], columns=[0, 1])
    assert "rows must be [first" in page.refused("window", 422, **head, rows=[0, 10**9], columns=[0, 1])
    assert "rows must be [first" in page.refused("window", 422, **head, rows="all", columns=[0, 1])
    assert "token must be an integer from 0 to 17" in page.refused("word", 422, trace=trace, token=18)
    assert "heads [layer, head] that this model has, got [0, 4]" in page.refused(
        "effect", 422, trace=trace, ablated=[[0, 4]]
    )
    assert "ablated must be a list" in page.refused("effect", 422, trace=trace, ablated="all")
    assert 'slot must be one of A, B, got "C"' in page.refused("trace", 422, slot="C", text="w1")
    assert "text must be a text, got a list" in page.refused("trace", 422, slot="A", text=["w1"])
    assert "a lone surrogate" in page.refused("trace", 422, slot="A", text="\ud800")
    assert "one must be an object" in page.refused("distance", 422, one=3, other={})
    assert 'got "levle" as well' in page.refused("distance", 422, one=head, other={**head, "levle": 1})


def test_unknown_routes_and_methods_are_refused(page):
    assert page.post("nothing").status_code == 404
    assert page.get("api/tile").status_code == 405
    assert page.client.post(f"/{TOKEN}/api/state", json={}).status_code == 405
    assert page.client.delete(f"/{TOKEN}/api/trace").status_code == 405
    assert "no such address" in page.get("api/nothing").json()["error"]["message"]


# ---- answers


def test_state_describes_the_model_and_its_layers(page):
    state = page.get("api/state").json()
    assert state["model"]["kind"] == "causal"
    assert (state["context"], state["context_reason"], state["generates"]) == (130, "trained", True)
    assert [layer["depth"] for layer in state["layers"]] == [0, 1]
    assert state["stacks"] == [{"name": "model.layers.*.self_attn", "kind": "self", "layers": [0, 1]}]
    assert state["traces"] == {"A": None, "B": None}
    assert state["run"] is False
    assert page.get("api/run").status_code == 404


def test_run_is_matched_to_the_layers_of_the_model(viewed, assets):
    site = {"name": "model.layers.1.self_attn", "kind": "self", "originals": ["0", "1", "2", "3"]}
    viewer = Viewer(viewed("llama"), run={"sites": [{**site, "name": "elsewhere"}, site], "roles": ["previous"]})
    with opened(viewer, assets) as client:
        state = Page(client).get("api/state").json()
        assert [layer["run_site"] for layer in state["layers"]] == [None, 1]
        assert Page(client).get("api/run").json()["roles"] == ["previous"]


def test_heads_of_a_short_text_have_all_weights(page, viewer):
    trace = page.trace()
    first, *layers, last = page.lines("heads", trace=trace["id"])
    assert first["precision"] == {"kind": "weights", "exact": True, "block": 1, "rule": None}
    assert last == {"done": True}
    for number, line in enumerate(layers):
        assert line["layer"] == number
        expected = weights_of(viewer, trace["id"], number).double()
        step = expected.flatten(1).amax(1)[:, None, None] / 255
        assert ((numbers(line["weights"]) - expected).abs() <= 0.51 * step).all()


def test_heads_of_a_longer_text_are_exact_blocks_or_labelled_estimates(page, viewer, monkeypatch):
    trace = page.trace(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    assert len(viewer.find(trace).ids) == 130
    monkeypatch.setattr("polyhead.report.viewer.viewing.HEADS_CELLS", 16)
    first, *layers, _ = page.lines("heads", trace=trace)
    assert first["precision"] == {"kind": "blocks", "exact": True, "block": 16, "rule": None}
    expected = weights_of(viewer, trace, 1)[:, 16:32, :16].sum((1, 2))
    torch.testing.assert_close(numbers(layers[1]["weights"])[:, 1, 0], expected)
    monkeypatch.setattr("polyhead.report.viewer.viewing.EXACT_PAIRS", 1)
    monkeypatch.setattr("polyhead.report.viewer.viewing.ROUGH_PAIRS", 1)
    first, *layers, _ = page.lines("heads", trace=trace)
    assert first["precision"]["kind"] == "estimate"
    assert first["precision"]["exact"] is False
    assert first["precision"]["rule"]["every"] == 16
    assert first["precision"]["rule"]["rows"] == 1
    assert [line["exact"] for line in layers] == [False, False]
    middle = weights_of(viewer, trace, 0)[:, 24] * 16  # of the rows 16 to 31
    torch.testing.assert_close(numbers(layers[0]["weights"])[:, 1, 1], middle[:, 16:32].sum(1))


def test_a_picture_is_an_estimate_first_and_then_exact(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "PICTURE_CELLS", 40)
    monkeypatch.setattr(tiles, "ESTIMATE_CELLS", 10)
    monkeypatch.setattr(tiles, "ESTIMATE_PAIRS", {"cpu": 1})
    monkeypatch.setattr(tiles, "STRIP_PAIRS", {"cpu": 2000})
    trace = page.trace(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    requested = {"trace": trace, "layer": 1, "head": 2}
    rough, begins, *strips, last = page.lines("picture", **requested)
    assert rough["precision"]["kind"] == "estimate"
    assert rough["level"] == 4
    assert rough["precision"]["rule"]["every"] == 16
    assert numbers(rough["weights"]).shape == (9, 9)
    assert begins == {"precision": {"kind": "blocks", "exact": True, "block": 4, "rule": None}, "level": 2}
    assert [x["progress"]["done"] for x in strips] == list(range(1, len(strips) + 1))
    assert strips[-1]["progress"]["total"] == len(strips) > 5
    picture = torch.zeros(33, 33)
    for strip in strips:
        cells = numbers(strip["strip"]["weights"])
        picture[strip["strip"]["first"] : strip["strip"]["first"] + len(cells)] = cells
    weights = torch.nn.functional.pad(weights_of(viewer, trace, 1)[2], (0, 2, 0, 2))
    expected = weights.unflatten(1, (33, 4)).unflatten(0, (33, 4)).sum((1, 3))
    torch.testing.assert_close(picture, expected, atol=1e-6, rtol=1e-5)
    assert last == {"done": True}
    again, done = page.lines("picture", **requested)
    assert again["precision"]["exact"] is True
    assert torch.equal(numbers(again["weights"]), picture)
    assert done == {"done": True}


def test_tile_is_exact_and_cached(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 16)
    trace = page.trace(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    requested = {"trace": trace, "layer": 1, "head": 3, "pool": "max", "level": 1, "row": 2, "column": 1}
    found = page.one("tile", **requested)
    assert (found["rows"], found["columns"], found["block"]) == ([64, 96], [32, 64], 2)
    window = weights_of(viewer, trace, 1)[3, 64:96, 32:64]
    expected = window.unflatten(1, (16, 2)).unflatten(0, (16, 2)).amax((1, 3))
    torch.testing.assert_close(numbers(found["weights"]), expected, atol=1e-7, rtol=1e-6)
    monkeypatch.setattr(tiles, "window", None)  # nothing is computed
    assert page.one("tile", **requested) == found
    # Another text in the same slot: the tiles of the first are removed.
    monkeypatch.undo()
    page.trace("w1 w2")
    assert len(viewer.cache) == 0
    assert "was removed" in page.refused("tile", 410, **requested)


def test_coarse_tile_is_pooled_from_a_cached_picture(page, viewer, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 16)
    monkeypatch.setattr(tiles, "PICTURE_CELLS", 64)
    trace = page.trace(" ".join(["w1 w2 w3 w4 ."] * 26))["id"]
    head = {"trace": trace, "layer": 0, "head": 1}
    requested = {**head, "level": 3, "row": 1, "column": 0}
    computed = numbers(page.one("tile", **requested)["weights"])
    viewer.cache.clear()
    page.lines("picture", **head)
    monkeypatch.setattr(tiles, "window", None)  # nothing is computed
    torch.testing.assert_close(numbers(page.one("tile", **requested)["weights"]), computed, atol=1e-6, rtol=1e-5)


def test_a_window_is_single_weights(page, viewer):
    trace = page.trace()["id"]
    found = page.one("window", trace=trace, layer=1, head=2, rows=[3, 11], columns=[2, 9])
    expected = weights_of(viewer, trace, 1)[2, 3:11, 2:9]
    torch.testing.assert_close(numbers(found["weights"]), expected, atol=1e-7, rtol=1e-5)


def test_a_window_may_be_long_but_not_large(page, monkeypatch):
    monkeypatch.setattr("polyhead.report.viewer.handlers.WINDOW_CELLS", 14)
    head = {"trace": page.trace()["id"], "layer": 1, "head": 2}
    assert page.one("window", **head, rows=[3, 4], columns=[0, 14])["weights"]["shape"] == [1, 14]
    assert "rows must have at most 14 tokens, got 15" in page.refused(
        "window", 413, **head, rows=[0, 15], columns=[0, 1]
    )
    message = page.refused("window", 413, **head, rows=[0, 3], columns=[0, 5])
    assert "columns must have at most 4 tokens, got 5" in message


def test_a_word_in_every_head(page, viewer):
    trace = page.trace()["id"]
    *layers, last = page.lines("word", trace=trace, token=7)
    assert last == {"done": True}
    for line in layers:
        weights = weights_of(viewer, trace, line["layer"])
        torch.testing.assert_close(numbers(line["attends"]["weights"]), weights[:, 7])
        torch.testing.assert_close(numbers(line["attended"]["weights"]), weights[:, :, 7])
        assert line["attends"]["top"]["tokens"][2][0] == int(weights[2, 7].argmax())


def test_a_word_of_the_source_and_one_of_the_target(viewed, assets):
    with opened(Viewer(viewed("t5")), assets) as client:
        page = Page(client)
        trace = page.trace()
        *layers, _ = page.lines("word", trace=trace["id"], token=0, axis="target")
        sides = [(x["attends"] is not None, x["attended"] is not None) for x in layers]
        assert sides == [(False, False)] * 2 + [(True, True), (True, False)] * 2
        *layers, _ = page.lines("word", trace=trace["id"], token=5)
        sides = [(x["attends"] is not None, x["attended"] is not None) for x in layers]
        assert sides == [(True, True)] * 2 + [(False, False), (False, True)] * 2


def test_effect_of_ablated_heads(page, viewer):
    trace = page.trace()
    progress, last = [], None
    for line in page.lines("effect", trace=trace["id"], ablated=[[0, 1], [1, 2]]):
        progress += [line["progress"]["done"]] if "progress" in line else []
        last = line
    assert progress == [1, 2]
    expected = viewer.model.output_without(viewer.find(trace["id"]), {(0, 1), (1, 2)}, lambda done, total: None)
    assert last["after"] == expected.to_dict()
    assert last["before"] == trace["output"]
    assert last["divergence"] > 0
    gated = page.trace(slot="B", ablated=[[0, 1], [1, 2]])
    assert gated["ablated"] == [[0, 1], [1, 2]]
    assert gated["output"] == expected.to_dict()
    compared = page.one("compare", one=trace["id"], other=gated["id"])
    assert compared["divergence"] == last["divergence"]


def test_two_texts_are_loaded_and_compared(page):
    one, other = page.trace("w1 w2 w3 a"), page.trace("w1 w2 w3 .", slot="B")
    traces = page.get("api/state").json()["traces"]
    assert [traces[slot]["id"] for slot in "AB"] == [one["id"], other["id"]]
    ends = {
        "one": {"trace": one["id"], "layer": 0, "head": 1},
        "other": {"trace": other["id"], "layer": 1, "head": 0},
    }
    found = page.lines("distance", **ends)[-1]
    assert found["done"]
    assert found["rows"] == 5
    assert 0 < found["divergence"] < 0.7
    same = page.lines("distance", one=ends["one"], other=ends["one"])[-1]
    assert same["divergence"] == 0.0
    page.lines("close", slot="B")
    assert page.get("api/state").json()["traces"]["B"] is None
    assert "was removed" in page.refused("compare", 410, one=one["id"], other=other["id"])


def test_generation_step_by_step(page, viewer):
    trace = page.trace("w1 w2 w3")
    stepped = page.lines("step", trace=trace["id"])[-1]
    greedy = trace["output"]["top"][0]
    assert stepped["token"]["id"] == trace["output"]["greedy"] == greedy["id"]
    assert stepped["token"]["probability"] == greedy["probability"]
    assert stepped["trace"]["generated"] == 1
    assert len(stepped["trace"]["text"]["tokens"]) == 5
    for row in stepped["rows"]:
        expected = weights_of(viewer, stepped["trace"]["id"], row["layer"])[:, -1]
        torch.testing.assert_close(numbers(row["attends"]["weights"]), expected)
    assert "was removed" in page.refused("step", 410, trace=trace["id"])
    chosen = page.lines("step", trace=stepped["trace"]["id"], token=40)[-1]
    assert chosen["token"]["id"] == 40
    assert "token must be from 0 to 97" in page.refused("step", 422, trace=chosen["trace"]["id"], token=98)
    back = page.lines("undo", trace=chosen["trace"]["id"])[-1]["trace"]
    assert back["text"] == stepped["trace"]["text"]
    assert back["output"] == stepped["trace"]["output"]


def test_hostile_text_is_returned_as_text(viewed, assets):
    text = "w1 </script><script>alert(1)</script> \u202e\u200b\x00\x1b[31m " + "x" * 100_000
    with opened(Viewer(viewed("bert")), assets) as client:
        page = Page(client)
        response = page.post("trace", slot="A", text=text)
        assert response.status_code == 200
        assert response.text.isascii()
        tokens = page.get("api/state").json()["traces"]["A"]["text"]["tokens"]
    assert max(map(len, tokens)) == 201
    assert "script" in tokens
    assert "\u202e\u200b\x00\x1b[" in "".join(tokens)


# ---- errors


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_is_reported_and_the_viewer_continues(page, viewer, monkeypatch, error):
    trace = page.trace()["id"]
    page.one("tile", trace=trace, layer=0, head=0, level=0, row=0, column=0)
    assert len(viewer.cache) == 1

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(viewer.model.model, "forward", fail)
        message = page.refused("trace", 507, slot="A", text="w1 w2")
    assert "ran out of memory" in message
    _wait_for(lambda: len(viewer.cache) == 0)
    assert page.get("api/state").json()["traces"]["A"]["id"] == trace
    assert page.trace("w1 w2")["id"] > trace


def test_out_of_memory_during_a_stream_is_its_last_line(page, viewer, monkeypatch):
    trace = page.trace()["id"]
    true, calls = tiles.window, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return true(*args, **kwargs)

    monkeypatch.setattr(tiles, "window", fail)
    *_, last = page.lines("heads", trace=trace)
    assert last["error"]["status"] == 507


def test_error_of_the_model_is_logged_and_not_disclosed(page, viewer, monkeypatch, log):
    def fail(*args, **kwargs):
        raise ValueError("secret/path")

    monkeypatch.setattr(viewer.model.model, "forward", fail)
    message = page.refused("trace", 500, slot="A", text="w1 w2")
    assert "ValueError" in message
    assert "secret/path" not in message
    assert "secret/path" in log.getvalue()


def test_nan_outputs_become_null(page, viewer):
    with torch.no_grad():
        before = viewer.model.model.lm_head.weight.clone()
        viewer.model.model.lm_head.weight.fill_(torch.nan)
    try:
        output = page.trace()["output"]
    finally:
        with torch.no_grad():
            viewer.model.model.lm_head.weight.copy_(before)
    assert output["entropy"] is None
    assert output["top"][0]["probability"] is None


def test_nan_weights_become_null(page, viewer):
    trace = page.trace()["id"]
    viewer.find(trace).attentions[0].query[:, 1].fill_(torch.nan)
    first, *_, last = page.lines("word", trace=trace, token=7)
    assert last == {"done": True}
    assert first["attends"]["top"]["weights"][1][0] is None
    assert first["attends"]["top"]["weights"][0][0] > 0
    head = {"trace": trace, "layer": 0, "head": 1}
    assert page.lines("distance", one=head, other={**head, "head": 0})[-1]["divergence"] is None


class CancellableJob:
    is_cancelled = False

    def send(self, message):
        pass

    def check(self):
        if self.is_cancelled:
            raise cancelled()


def test_text_whose_run_was_cancelled_is_not_loaded(page, viewer, monkeypatch):
    trace, job, run = page.trace()["id"], CancellableJob(), viewer.model.trace

    def run_and_cancel(*arguments):
        finished = run(*arguments)
        job.is_cancelled = True
        return finished

    monkeypatch.setattr(viewer.model, "trace", run_and_cancel)
    with pytest.raises(RequestError, match="was cancelled"):
        list(viewer.trace(job, "A", "w5", frozenset()))
    assert page.get("api/state").json()["traces"]["A"]["id"] == trace


def _wait_for(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_retrace_runs_the_same_tokens_with_other_heads_ablated(page, viewer):
    first = page.trace(ablated=[[0, 1]])
    again = page.lines("retrace", trace=first["id"], ablated=[[1, 0]])[-1]["trace"]
    assert again["text"]["tokens"] == first["text"]["tokens"]
    assert again["ablated"] == [[1, 0]]
    assert again["id"] != first["id"]
    fresh = page.trace(ablated=[[1, 0]], slot="B")
    for layer in range(2):
        one, other = (weights_of(viewer, trace["id"], layer) for trace in (again, fresh))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert page.refused("retrace", 410, trace=first["id"], ablated=[])


def test_a_training_run_is_one_page_with_the_steps_so_far_and_runs_no_other_script(tmp_path):
    pytest.importorskip("pyarrow")
    heads = tuple(HeadLocation("layers.0.attn", "self", 0, head, str(head), 3) for head in range(3))
    client = TestClient(create_run_app(tmp_path, token=TOKEN), base_url=ADDRESS, raise_server_exceptions=False)
    assert "without steps" in client.get(f"/{TOKEN}/").json()["error"]["message"]
    callback = RunDirectory(tmp_path)
    for step in (0, 7):
        callback.on_record(StepRecord(step, 2.5, heads, ("max_logit",), torch.ones(1, 3)))
        callback.state_dict()  # writes
        response = client.get(f"/{TOKEN}/")
        assert f"3 heads, {1 + step // 7} steps from 0 to {step}" in response.text
    callback.on_exit()
    policy = response.headers["content-security-policy"]
    assert "'self'" not in policy
    assert policy.removesuffix("; frame-ancestors 'none'") in response.text
    assert client.get("/wrong/").status_code == 403
    assert client.get(f"/{TOKEN}/api/state").status_code == 404
