"""Ablation, generation and errors in the viewer."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from playwright.sync_api import expect

from polyhead.report.viewer.failures import cancelled
from tests.browser.view.conftest import Running, small_viewer


@torch.no_grad()
def log_probabilities(model, ids, ablated=()) -> torch.Tensor:
    """Return those of the next token, with the outputs of some heads zeroed before the output projection."""
    width = model.config.hidden_size // model.config.num_attention_heads
    hooks = []
    for layer, head in ablated:

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
    """Return the displayed divergence; -1 if there is none."""
    values = tab.eval_on_selector_all(".ablated-heads .measure", "all => all.map((x) => Number(x.dataset.divergence))")
    return values[0] if values else -1.0


def test_ablating_a_head_changes_the_output_as_computed(open_view, keep_picture):
    opened = open_view()
    opened.run_text()
    tab, model, ids = opened.tab, opened.server.eager, opened.server.viewer.traces["A"].ids
    expect(tab.locator(".ablated-heads .measure")).to_have_count(0)
    tab.get_by_role("button", name="ablates or restores it").click()
    tab.locator("a.cell[data-key='1.2']").click()
    before = log_probabilities(model, ids)
    for ablated in ([(1, 2)], [(1, 2), (0, 3)]):
        if len(ablated) == 2:
            tab.locator("a.cell[data-key='0.3']").click()
        after = log_probabilities(model, ids, ablated)
        expected = float((before.exp() * (before - after)).sum())
        assert expected > 1e-3
        opened.wait(lambda expected=expected: measured(tab) == pytest.approx(expected, rel=1e-3))
    largest = int((after.exp() - before.exp()).abs().argmax())
    row = tab.locator(".changes tbody tr").first
    assert row.get_attribute("data-token") == str(largest)
    shown = row.locator("td").all_inner_texts()
    for text, value in zip(shown, (before[largest].exp(), after[largest].exp()), strict=True):
        assert float(text.rstrip("%")) / 100 == pytest.approx(float(value), abs=0.0051)
    expect(tab.locator(".ablated-list button")).to_have_text(["L1H2 ×", "L0H3 ×"])
    expect(tab.locator("a.cell.ablated")).to_have_count(2)
    assert "ablated" in tab.locator("a.cell[data-key='1.2']").get_attribute("aria-label")
    keep_picture(opened, "view-off")
    # Run again without them: later layers are then those of the ablated model.
    tab.get_by_role("button", name="Run again without them").click()
    tab.get_by_text("Text A was run with L0H3 and L1H2 ablated.").wait_for()
    again = opened.server.viewer.traces["A"]
    assert (again.ids, again.ablated) == (ids, {(1, 2), (0, 3)})
    assert torch.allclose(again.output.values.double(), after, atol=1e-5)
    tab.get_by_role("button", name="Restore all").click()
    opened.wait(lambda: not opened.server.viewer.traces["A"].ablated)
    expect(tab.locator("a.cell.ablated")).to_have_count(0)


def test_head_is_ablated_in_its_own_panel(open_view):
    opened = open_view()
    opened.run_text()
    opened.go("head/1/1")
    opened.tab.get_by_role("button", name="Ablate this head").click()
    opened.tab.locator(".ablated-heads .measure").wait_for()
    opened.tab.get_by_role("button", name="Restore L1H1").click()
    expect(opened.tab.locator(".ablated-heads .measure")).to_have_count(0)
    opened.tab.get_by_role("button", name="Ablate this head").wait_for()


def test_generation_step_by_step(open_view, keep_picture):
    opened = open_view()
    opened.run_text()
    tab, viewer, model = opened.tab, opened.server.viewer, opened.server.eager
    ids = list(viewer.traces["A"].ids)
    expected = log_probabilities(model, ids)
    greedy = int(expected.argmax())
    first = tab.locator(".candidates li").first
    assert first.get_attribute("data-token") == str(greedy)
    assert float(first.locator(".muted").inner_text().rstrip("%")) / 100 == pytest.approx(
        float(expected.max().exp()), abs=0.0051
    )
    tab.get_by_role("button", name="Append the most likely token").click()
    tab.get_by_text("Generated tokens: 1").wait_for()
    assert list(viewer.traces["A"].ids) == [*ids, greedy]
    # The attention of the newest token in every head.
    weights, tokens = opened.server.weights(), opened.server.tokens()
    for layer in range(2):
        for head in range(4):
            label = tab.locator(f".newest a.cell[data-key='{layer}.{head}']").get_attribute("aria-label")
            best = tokens[int(weights[layer, head, -1].argmax())].strip()
            assert label.startswith(f"L{layer}H{head}: “{best}” ")
    keep_picture(opened, "view-writing")
    third = tab.locator(".candidates li").nth(2)
    chosen = int(third.get_attribute("data-token"))
    third.locator("button").click()
    tab.get_by_text("Generated tokens: 2").wait_for()
    assert list(viewer.traces["A"].ids) == [*ids, greedy, chosen]
    tab.get_by_role("button", name="Undo").click()
    tab.get_by_text("Generated tokens: 1").wait_for()
    assert list(viewer.traces["A"].ids) == [*ids, greedy]


def test_errors_of_the_server_are_explained(open_view):
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
        opened.tab.route("**/api/trace", lambda route, *, answer=answer: route.fulfill(**answer))
        opened.tab.locator("#text-A").fill("w1 w2")
        opened.tab.keyboard.press("Control+Enter")
        expect(alert).to_contain_text(words)
        expect(alert).to_contain_text("Its own <b>words</b>.")
        opened.tab.unroute("**/api/trace")
        opened.run_text("w1 w2")  # the page continues
        expect(alert).to_be_empty()
    opened.problems.clear()  # the browser logs a refused request itself


def test_requests_for_a_replaced_text_are_aborted_and_repeated_if_it_stays(open_view):
    opened = open_view()
    opened.run_text("w1 w2 w3")
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
    tab.route("**/api/trace", refuse_one)
    tab.reload()
    opened.wait(lambda: len(requested) == 1)
    tab.locator("#text-A").fill("w4 w5")
    tab.keyboard.press("Control+Enter")
    opened.wait(lambda: len(requested) == 2 and requested[0].request in called_off)
    assert requested[1].request not in called_off
    assert len({route.request.post_data for route in requested}) == 1
    opened.run_text("w4 w5")
    opened.wait(lambda: requested[1].request in called_off)
    opened.problems.clear()  # the browser logs a refused request itself


def test_word_that_a_new_text_lacks_is_no_longer_chosen(open_view):
    opened = open_view()
    tab = opened.tab
    opened.run_text("w1 w2 w3 w4 w5 w6 w7")
    opened.go("head/1/2")
    tab.locator(".map-state[data-state=exact]").wait_for()
    tab.locator(".word").nth(6).click()
    tab.locator(".map-plot").focus()
    for _ in range(6):
        tab.keyboard.press("ArrowDown")
    tab.locator("#text-A").fill("w1 w2")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".word")).to_have_text(["[CLS]", "w1", "w2"])
    assert tab.locator(".word[aria-pressed=true]").count() == 0
    tab.locator(".map-state[data-state=exact]").wait_for()
    tab.locator(".map-plot").focus()
    tab.keyboard.press("Enter")  # the keyboard cursor is at the last word
    expect(tab.locator(".word[aria-pressed=true]")).to_have_text("w2")
    expect(tab.locator("[role=alert]")).to_be_empty()


BUSY = {"error": {"status": 429, "kind": "busy", "message": "Too many."}}


def test_requests_to_a_busy_server_are_repeated_and_reported(open_view):
    opened = open_view()
    opened.speed_up_timers()
    tab, refusals, seen, before = opened.tab, [], [], opened.server.viewer.traces["A"]

    def refuse_five_times(route):
        if len(refusals) >= 5 and seen:
            route.continue_()
            return
        refusals.append(time.monotonic())
        route.fulfill(status=429, headers={"Retry-After": "2"}, body=json.dumps(BUSY))

    tab.route("**/api/trace", refuse_five_times)
    tab.locator("#text-A").fill("w1 w2 w3")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".waiting")).to_contain_text("The server is busy.")
    expect(tab.locator(".waiting")).to_contain_text("pending requests: 1")
    seen.append(True)
    opened.wait(lambda: opened.server.viewer.traces["A"] is not before)
    expect(tab.locator(".word")).to_have_text(["[CLS]", "w1", "w2", "w3"])
    expect(tab.locator(".waiting")).to_be_empty()
    expect(tab.locator("[role=alert]")).to_be_empty()
    # Not before the requested two seconds, sped up ten times here.
    assert len([pause for pause in opened.timer_delays() if 2000 <= pause <= 3000]) == len(refusals) >= 5
    assert min(later - sooner for sooner, later in itertools.pairwise(refusals)) > 0.18
    opened.problems.clear()


def test_cancelled_pictures_are_requested_again(open_view):
    """The server cancels a request whose answer is not read."""
    opened = open_view()
    opened.speed_up_timers()
    tab, given_up = opened.tab, []

    def give_up_once(route):
        if given_up:
            route.continue_()
            return
        given_up.append(route.request.url)
        route.fulfill(status=409, body=json.dumps(cancelled().to_dict()))

    tab.route("**/api/heads", give_up_once)
    opened.run_text("w1 w2 w3")
    assert len(given_up) == 1
    expect(tab.locator("[role=alert]")).to_be_empty()
    opened.problems.clear()  # the browser logs a refused request itself


def test_page_reconnects_to_a_restarted_server(open_view, tmp_path):
    viewer, folder = small_viewer(tmp_path / "llama", "llama")
    with Running(viewer, folder) as server:
        opened = open_view(server)
        opened.run_text("w1 w2 w3")
        opened.speed_up_timers()
        port = server.port
    tab = opened.tab
    tab.locator("#text-A").fill("w4 w5")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator("[role=alert]")).to_contain_text("The server does not respond.")
    expect(tab.locator("a.cell canvas")).to_have_count(8)  # earlier content remains
    with Running(viewer, folder, port):
        expect(tab.locator("[role=alert]")).to_be_empty()
        opened.run_text("w4 w5")
        expect(tab.locator(".word")).to_have_text(["[CLS]", "w4", "w5"])
        opened.problems.clear()  # the browser logs a failed connection itself
        tab.goto("about:blank")
