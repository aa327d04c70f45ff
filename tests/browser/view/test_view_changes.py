"""Heads switched off, tokens written, and what goes wrong: the page says what the model and the server did."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from playwright.sync_api import expect

from polyhead.report.viewer.failures import superseded
from tests.browser.view.conftest import Running, small_viewer


@torch.no_grad()
def log_probabilities(model, ids, off=()) -> torch.Tensor:
    """Of the next token, with the output of some heads set to zero before the output projection mixes them."""
    width = model.config.hidden_size // model.config.num_attention_heads
    hooks = []
    for layer, head in off:

        def cut(module, inputs, head=head):
            heads = inputs[0].clone()
            heads[..., head * width : (head + 1) * width] = 0.0
            return (heads,)

        hooks.append(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(cut))
    try:
        return model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()


def measured(tab) -> float:
    """The divergence that the page tells; -1 while it tells none."""
    told = tab.eval_on_selector_all(".off-heads .measure", "all => all.map((x) => Number(x.dataset.divergence))")
    return told[0] if told else -1.0


def test_a_head_is_switched_off_and_the_output_changes_as_computed(open_view, keep_picture):
    opened = open_view()
    opened.read()
    tab, model, ids = opened.tab, opened.server.eager, opened.server.viewer.readings["A"].ids
    expect(tab.locator(".off-heads .measure")).to_have_count(0)
    tab.get_by_role("button", name="ablates it or restores it").click()
    tab.locator("a.cell[data-key='1.2']").click()
    before = log_probabilities(model, ids)
    for off in ([(1, 2)], [(1, 2), (0, 3)]):
        if len(off) == 2:
            tab.locator("a.cell[data-key='0.3']").click()
        after = log_probabilities(model, ids, off)
        expected = float((before.exp() * (before - after)).sum())
        assert expected > 1e-3
        opened.wait(lambda expected=expected: measured(tab) == pytest.approx(expected, rel=1e-3))
    largest = int((after.exp() - before.exp()).abs().argmax())
    row = tab.locator(".changes tbody tr").first
    assert row.get_attribute("data-token") == str(largest)
    shown = row.locator("td").all_inner_texts()
    for text, value in zip(shown, (before[largest].exp(), after[largest].exp()), strict=True):
        assert float(text.rstrip("%")) / 100 == pytest.approx(float(value), abs=0.0051)
    expect(tab.locator(".off-list button")).to_have_text(["Layer 1, head 2 ×", "Layer 0, head 3 ×"])
    expect(tab.locator("a.cell.off")).to_have_count(2)
    assert "ablated" in tab.locator("a.cell[data-key='1.2']").get_attribute("aria-label")
    keep_picture(opened, "view-off")
    # Run again without them: later layers are then those of the ablated model.
    tab.get_by_role("button", name="Run again without them").click()
    tab.get_by_text("Text A was run with Layer 0, head 3 and Layer 1, head 2 ablated.").wait_for()
    again = opened.server.viewer.readings["A"]
    assert (again.ids, again.off) == (ids, {(1, 2), (0, 3)})
    assert torch.allclose(again.output.values.double(), after, atol=1e-5)
    tab.get_by_role("button", name="Restore all").click()
    opened.wait(lambda: not opened.server.viewer.readings["A"].off)
    expect(tab.locator("a.cell.off")).to_have_count(0)


def test_a_head_is_switched_off_in_its_own_panel(open_view):
    opened = open_view()
    opened.read()
    opened.go("head/1/1")
    opened.tab.get_by_role("button", name="Ablate this head").click()
    opened.tab.locator(".off-heads .measure").wait_for()
    opened.tab.get_by_role("button", name="Restore Layer 1, head 1").click()
    expect(opened.tab.locator(".off-heads .measure")).to_have_count(0)
    opened.tab.get_by_role("button", name="Ablate this head").wait_for()


def test_generation_goes_on_step_by_step(open_view, keep_picture):
    opened = open_view()
    opened.read()
    tab, viewer, model = opened.tab, opened.server.viewer, opened.server.eager
    ids = list(viewer.readings["A"].ids)
    expected = log_probabilities(model, ids)
    greedy = int(expected.argmax())
    first = tab.locator(".candidates li").first
    assert first.get_attribute("data-token") == str(greedy)
    assert float(first.locator(".muted").inner_text().rstrip("%")) / 100 == pytest.approx(
        float(expected.max().exp()), abs=0.0051
    )
    tab.get_by_role("button", name="Append the most likely token").click()
    tab.get_by_text("Generated tokens: 1").wait_for()
    assert list(viewer.readings["A"].ids) == [*ids, greedy]
    # Whom the newest token looks at, in every head.
    weights, tokens = opened.server.weights(), opened.server.tokens()
    for layer in range(2):
        for head in range(4):
            said = tab.locator(f".newest a.cell[data-key='{layer}.{head}']").get_attribute("aria-label")
            best = tokens[int(weights[layer, head, -1].argmax())].strip()
            assert said.startswith(f"Layer {layer}, head {head}: “{best}” ")
    keep_picture(opened, "view-writing")
    third = tab.locator(".candidates li").nth(2)
    chosen = int(third.get_attribute("data-token"))
    third.locator("button").click()
    tab.get_by_text("Generated tokens: 2").wait_for()
    assert list(viewer.readings["A"].ids) == [*ids, greedy, chosen]
    tab.get_by_role("button", name="Undo").click()
    tab.get_by_text("Generated tokens: 1").wait_for()
    assert list(viewer.readings["A"].ids) == [*ids, greedy]


def test_what_the_server_refuses_is_said_in_words(open_view):
    opened = open_view()
    alert = opened.tab.locator("[role=alert]")
    for status, kind, words in (
        (413, "too-large", "The text is too long."),
        (507, "out-of-memory", "Out of memory."),
        (422, "invalid", "The server rejected the request."),
        (500, "failed", "Internal server error."),
    ):
        error = {"error": {"status": status, "kind": kind, "message": "Its own <b>words</b>."}}
        answer = {"status": status, "body": json.dumps(error)}
        opened.tab.route("**/api/read", lambda route, *, answer=answer: route.fulfill(**answer))
        opened.tab.locator("#text-A").fill("w1 w2")
        opened.tab.keyboard.press("Control+Enter")
        expect(alert).to_contain_text(words)
        expect(alert).to_contain_text("Its own <b>words</b>.")
        opened.tab.unroute("**/api/read")
        opened.read("w1 w2")  # and the page goes on
        expect(alert).to_be_empty()
    opened.problems.clear()  # a refused request is written down by the browser itself


def test_what_is_asked_of_a_text_that_goes_is_called_off_and_asked_again_where_it_stays(open_view):
    opened = open_view()
    opened.read("w1 w2 w3")
    tab, requested, refused, called_off = opened.tab, [], [], []
    error = {"error": {"status": 413, "kind": "too-large", "message": "Too long."}}

    def never_answer_two(route):
        if len(requested) == 2:
            route.continue_()
        else:
            requested.append(route)

    def refuse_one(route):
        if refused:
            route.continue_()
        else:
            refused.append(route)
            route.fulfill(status=413, body=json.dumps(error))

    tab.on("requestfailed", lambda request: called_off.append(request))
    tab.route("**/api/heads", never_answer_two)
    tab.route("**/api/read", refuse_one)
    tab.reload()
    opened.wait(lambda: len(requested) == 1)
    tab.locator("#text-A").fill("w4 w5")
    tab.keyboard.press("Control+Enter")
    opened.wait(lambda: len(requested) == 2 and requested[0].request in called_off)
    assert requested[1].request not in called_off
    assert len({route.request.post_data for route in requested}) == 1
    opened.read("w4 w5")
    opened.wait(lambda: requested[1].request in called_off)
    opened.problems.clear()  # a refused request is written down by the browser itself


def test_a_word_that_a_new_text_does_not_have_is_chosen_no_more(open_view):
    opened = open_view()
    tab = opened.tab
    opened.read("w1 w2 w3 w4 w5 w6 w7")
    opened.go("head/1/2")
    tab.locator(".map-state[data-how=exact]").wait_for()
    tab.locator(".word").nth(6).click()
    tab.locator(".map-plot").focus()
    for _ in range(6):
        tab.keyboard.press("ArrowDown")
    tab.locator("#text-A").fill("w1 w2")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".word")).to_have_text(["[CLS]", "w1", "w2"])
    assert tab.locator(".word[aria-pressed=true]").count() == 0
    tab.locator(".map-state[data-how=exact]").wait_for()
    tab.locator(".map-plot").focus()
    tab.keyboard.press("Enter")  # the cursor of the keyboard stands on the last word there is
    expect(tab.locator(".word[aria-pressed=true]")).to_have_text("w2")
    expect(tab.locator("[role=alert]")).to_be_empty()


BUSY = {"error": {"status": 429, "kind": "busy", "message": "Too many."}}


def test_a_busy_server_is_asked_until_it_answers_and_the_reader_is_told(open_view):
    opened = open_view()
    opened.hurry()
    tab, refusals, seen, before = opened.tab, [], [], opened.server.viewer.readings["A"]

    def refuse_five_times(route):
        if len(refusals) >= 5 and seen:
            route.continue_()
            return
        refusals.append(time.monotonic())
        route.fulfill(status=429, headers={"Retry-After": "2"}, body=json.dumps(BUSY))

    tab.route("**/api/read", refuse_five_times)
    tab.locator("#text-A").fill("w1 w2 w3")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".waiting")).to_contain_text("The server is busy.")
    expect(tab.locator(".waiting")).to_contain_text("pending requests: 1")
    seen.append(True)
    opened.wait(lambda: opened.server.viewer.readings["A"] is not before)
    expect(tab.locator(".word")).to_have_text(["[CLS]", "w1", "w2", "w3"])
    expect(tab.locator(".waiting")).to_be_empty()
    expect(tab.locator("[role=alert]")).to_be_empty()
    # No oftener than it asks for: two seconds, a tenth of which passes here.
    assert len([pause for pause in opened.pauses() if 2000 <= pause <= 3000]) == len(refusals) >= 5
    assert min(later - sooner for sooner, later in itertools.pairwise(refusals)) > 0.18
    opened.problems.clear()


def test_pictures_that_the_server_gave_up_are_asked_for_again(open_view):
    """As it does when nobody takes its answer for long."""
    opened = open_view()
    opened.hurry()
    tab, given_up = opened.tab, []

    def give_up_once(route):
        if given_up:
            route.continue_()
            return
        given_up.append(route.request.url)
        route.fulfill(status=409, body=json.dumps(superseded().failure.to_dict()))

    tab.route("**/api/heads", give_up_once)
    opened.read("w1 w2 w3")
    assert len(given_up) == 1
    expect(tab.locator("[role=alert]")).to_be_empty()
    opened.problems.clear()  # a refused request is written down by the browser itself


def test_the_page_outlives_its_server(open_view, tmp_path):
    viewer, folder = small_viewer(tmp_path / "llama", "llama")
    with Running(viewer, folder) as server:
        opened = open_view(server)
        opened.read("w1 w2 w3")
        opened.hurry()
        port = server.port
    tab = opened.tab
    tab.locator("#text-A").fill("w4 w5")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator("[role=alert]")).to_contain_text("The server does not respond.")
    expect(tab.locator("a.cell canvas")).to_have_count(8)  # what was there is still there
    with Running(viewer, folder, port):
        expect(tab.locator("[role=alert]")).to_be_empty()
        opened.read("w4 w5")
        expect(tab.locator(".word")).to_have_text(["[CLS]", "w4", "w5"])
        opened.problems.clear()  # a connection that fails is written down by the browser itself
        tab.goto("about:blank")
