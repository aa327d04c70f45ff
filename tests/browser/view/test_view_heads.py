"""All heads, and one word in all heads: drawings and texts agree with the model."""

from __future__ import annotations

import pytest
import torch
from playwright.sync_api import expect

from polyhead.integrations.huggingface import register
from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.viewing import Viewer
from polyhead.surgery import PruneHeads, apply
from polyhead.workflows.model_loading import load_model
from tests.browser.view.conftest import SENTENCE, Running, small_viewer
from tests.inspection import small_models

# The grey values of a head's map, row by row.
PIXELS = """(cell) => {
  const drawn = cell.querySelector("canvas");
  const { data, width, height } = drawn.getContext("2d").getImageData(0, 0, drawn.width, drawn.height);
  const grey = [];
  for (let i = 0; i < data.length; i += 4) grey.push(data[i] + data[i + 1] + data[i + 2]);
  return { width, height, grey };
}"""


def share(weight: float) -> str:
    """Format a weight as the page does."""
    return f"{weight:.{0 if round(weight, 9) >= 0.1 else 1}%}".replace(".0%", "%")


def listed(tab, number: int) -> list[tuple[int, float, str]]:
    """Return the entries of a list of top tokens: index, weight and text."""
    rows = tab.locator(".strongest > div").nth(number).locator("li").all()
    return [(int(x.get_attribute("data-token")), float(x.get_attribute("data-weight")), x.inner_text()) for x in rows]


def check_list(found, weights, tokens) -> None:
    """Check that a list has the largest weights in order, with their tokens and shares."""
    strongest = weights.topk(8).values
    assert len(found) == int((strongest >= 0.0005).sum()) > 0
    for (token, weight, text), expected in zip(found, strongest, strict=False):
        assert weight == pytest.approx(float(expected), abs=1e-6)
        assert float(weights[token]) == pytest.approx(weight, abs=1e-6)
        assert text == f"{tokens[token]} {share(weight)}"


def test_the_address_needs_its_token(open_view, running):
    opened = open_view()
    expect(opened.tab.locator("h1")).to_have_text("llama")
    page = opened.tab.context.new_page()
    for path in ("", "another-token/", "api/state"):
        answer = page.goto(f"{running('llama').origin}{path}")
        assert answer.status == 403
        assert "must contain the token that `polyhead view` printed" in answer.json()["error"]["message"]
        expect(page.locator("#text-A")).to_have_count(0)


def test_every_head_of_a_text_is_drawn(open_view, keep_picture):
    opened = open_view(color_scheme="light")
    opened.run_text()
    weights = opened.server.weights()
    layers, heads, tokens, _ = weights.shape
    cells = opened.tab.locator("a.cell")
    assert cells.count() == layers * heads == 8
    expect(opened.tab.locator(".word")).to_have_text(["[CLS]", *SENTENCE.split()])
    expect(opened.tab.locator(".grids .ramp-ends span")).to_have_text(["0%", "50%", "100%"])
    expect(opened.tab.locator(".head-grid .corner")).to_have_text("layer")
    for layer in range(layers):
        for head in range(heads):
            drawn = opened.tab.locator(f"a.cell[data-key='{layer}.{head}']").evaluate(PIXELS)
            assert (drawn["width"], drawn["height"]) == (tokens, tokens)
            grey = torch.tensor(drawn["grey"]).view(tokens, tokens)
            two = weights[layer, head].topk(2).values
            for row in range(1, tokens):
                if two[row, 0] - two[row, 1] > 0.05:  # the largest weight of a row is its darkest pixel
                    assert int(grey[row].argmin()) == int(weights[layer, head, row].argmax())
    keep_picture(opened, "view-heads")


def test_a_word_is_followed_through_every_head(read_sentence, keep_picture):
    opened = read_sentence()
    weights, tokens, word = opened.server.weights(), opened.server.tokens(), 10
    opened.tab.locator(".word").nth(word).hover()
    opened.tab.locator(".grids.of-word").wait_for()
    expect(opened.tab.locator(".word-name")).to_have_text(f"“{tokens[word]}” in every head")
    sides = [("attends to", lambda x: x[word]), ("attended to by", lambda x: x[:, word])]
    opened.tab.locator(".word").nth(word).click()  # remains when the pointer leaves
    for name, row_of in sides:
        opened.tab.get_by_role("button", name=name, exact=True).click()
        for key in ("0.0", "0.3", "1.1", "1.2"):
            layer, head = map(int, key.split("."))
            row = row_of(weights[layer, head])
            best = int(row.argmax())
            label = opened.tab.locator(f"a.cell[data-key='{key}']").get_attribute("aria-label")
            assert label == f"L{layer}H{head}: “{tokens[best]}” {share(float(row[best]))}"
    keep_picture(opened, "view-word-in-heads")


def test_head_shows_what_a_word_attends_to_and_what_attends_to_it(read_sentence, keep_picture):
    opened = read_sentence()
    opened.tab.locator("a.cell[data-key='1.2']").click()
    opened.tab.get_by_role("heading", name="L1H2", exact=True).wait_for()
    weights, tokens, word = opened.server.weights()[1, 2], opened.server.tokens(), 6
    expect(opened.tab.locator(".strongest h4")).to_have_text(["Most attended, on average"])
    opened.tab.locator(".word").nth(word).hover()
    opened.tab.get_by_role("heading", name=f"“{tokens[word]}” attends to").wait_for()
    check_list(listed(opened.tab, 0), weights[word], tokens)
    check_list(listed(opened.tab, 1), weights[:, word], tokens)
    shades = opened.tab.eval_on_selector_all(".word", "all => all.map((x) => x.style.background !== 'transparent')")
    assert shades == [weight >= 0.005 for weight in weights[word].tolist()]
    keep_picture(opened, "view-head")
    opened.tab.mouse.move(2, 2)  # without the pointer nothing is chosen
    opened.tab.get_by_role("heading", name="Most attended, on average").wait_for()


def test_a_link_keeps_the_chosen_word(read_sentence):
    opened = read_sentence()
    opened.go("head/1/2")
    tab = opened.tab
    tab.locator(".word").nth(4).click()
    opened.wait(lambda: tab.url.endswith("#/head/1/2?word=4"))
    tab.reload()
    expect(tab.locator(".word[aria-pressed=true]")).to_have_text(opened.server.tokens()[4])
    tab.get_by_role("link", name="Next head").click()
    tab.get_by_role("heading", name="L1H3", exact=True).wait_for()
    expect(tab.locator(".word[aria-pressed=true]")).to_have_text(opened.server.tokens()[4])
    tab.mouse.move(0, 0)
    tab.locator(".word").nth(4).click()  # a second click unpins
    opened.wait(lambda: tab.url.endswith("#/head/1/3"))
    for word in ("99", "t0", "-1", "x"):
        opened.go(f"head/1/2?word={word}")
        tab.locator(".map-state[data-state=exact]").wait_for()
        expect(tab.locator("[role=alert]")).to_be_empty()


def test_words_of_two_texts_of_an_encoder_decoder(open_view, keep_picture):
    opened = open_view("t5")
    opened.run_text()
    tab = opened.tab
    expect(tab.locator(".stack h3")).to_have_text(["Encoder", "Decoder", "Cross-attention"])
    tab.get_by_role("button", name="Append the most likely token").click()
    tab.locator(".newest").wait_for()
    expect(tab.locator(".newest .stack h3")).to_have_text(["Decoder", "Cross-attention"])
    tab.locator(".text-in-heads a.cell[data-key='3.1']").click()
    tab.locator(".head-words .line-name").first.wait_for()
    trace, model = opened.server.viewer.traces["A"], opened.server.eager
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([trace.ids]),
            decoder_input_ids=torch.tensor([trace.target_ids]),
            output_attentions=True,
        ).cross_attentions[0][0, 1]
    lines = tab.locator(".head-words .word-line")
    assert lines.nth(0).locator(".word").count() == len(trace.target_ids) == 2
    expect(lines.nth(1).locator(".word")).to_have_count(len(trace.ids))
    lines.nth(0).locator(".word").nth(1).hover()
    tab.locator(".strongest li").first.wait_for()
    check_list(listed(tab, 0), found[1], trace.text.tokens)
    expect(tab.locator(".strongest > div")).to_have_count(1)
    tab.get_by_role("button", name="Words and lines").click()
    expect(tab.locator(".lines path")).to_have_count(int((found >= 0.02).sum()))
    assert tab.locator(".lines text").all_text_contents()[-len(trace.ids) :] == list(trace.text.tokens)
    keep_picture(opened, "view-cross")


def test_two_heads_side_by_side(read_sentence, keep_picture):
    opened = read_sentence()
    opened.go("head/0/1?with=A.1.3")
    opened.tab.locator(".distance[data-distance]").wait_for()
    one, other = (opened.server.weights()[layer, head].double() for layer, head in ((0, 1), (1, 3)))
    middle = (one + other) / 2
    divergence = sum(torch.special.xlogy(x, x / middle).nan_to_num().sum(-1) for x in (one, other)) / 2
    found = float(opened.tab.locator(".distance").get_attribute("data-distance"))
    assert found == pytest.approx(float(divergence.clamp_min(0).sqrt().mean()), abs=1e-4)
    panels = opened.tab.locator(".head-panel")
    assert [panels.nth(i).get_attribute("data-head") for i in range(2)] == ["0.1", "1.3"]
    opened.tab.get_by_label("Head", exact=True).select_option("0")
    opened.tab.locator(".head-panel[data-head='1.0']").wait_for()
    panels.nth(0).locator(".word").nth(4).hover()  # one text: the word is chosen in both
    panels.nth(1).locator(".word").nth(4).and_(opened.tab.locator("[aria-pressed=true]")).wait_for()
    keep_picture(opened, "view-two-heads")


def test_two_texts_side_by_side(open_view, keep_picture):
    opened = open_view()
    opened.run_text()
    tab = opened.tab
    tab.get_by_role("button", name="Compare with a second text").click()
    opened.run_text("w9 w8 w7 w1", slot="B")
    before, after = (opened.server.viewer.traces[slot].output.values.double() for slot in "AB")
    tab.locator(".between .measure").wait_for()
    found = float(tab.locator(".between .measure").get_attribute("data-divergence"))
    assert found == pytest.approx(float((before.exp() * (before - after)).sum()), rel=1e-5)
    opened.go("head/1/0")
    tab.get_by_role("button", name="Compare with", exact=True).click()
    tab.locator(".head-panel[data-slot='B'][data-head='1.0']").wait_for()
    tab.locator(".distance").get_by_text("different numbers of tokens").wait_for()
    keep_picture(opened, "view-two-texts")
    tab.get_by_role("button", name="Remove text B").click()
    opened.wait(lambda: opened.server.viewer.traces["B"] is None)


def test_roles_of_a_run_are_shown_on_its_heads(open_view, tmp_path):
    def bilingual(words):
        return {"en": words, "zh": f"中文：{words}"}

    roles = [
        {"name": name, "letters": name[0].upper(), "label": bilingual(name), "about": bilingual("")}
        for name in ("sink", "next")
    ]
    scores = [{"role": "next", "holds": True, "evidence": bilingual("9 of 10 <b>times</b>")}]
    scores.append({"role": "sink", "holds": False, "evidence": bilingual("nothing")})
    run = {
        "sites": [{"name": "model.layers.1.self_attn", "kind": "self", "originals": ["0", "1", "2", "3"]}],
        "roles": roles,
        "heads": [{"site": 0, "head": 2, "roles": scores}],
    }
    viewer, folder = small_viewer(tmp_path / "llama", "llama")
    with Running(Viewer(viewer.model, run=run), folder) as server:
        opened = open_view(server)
        opened.run_text()
        expect(opened.tab.locator("a.cell .badge")).to_have_text(["N"])
        opened.tab.get_by_role("link", name="L1H2, next").click()
        expect(opened.tab.locator(".role-list li")).to_have_text(["next 9 of 10 <b>times</b>"])
        opened.go("head/0/2")
        expect(opened.tab.locator(".role-list li")).to_have_text(["no role"])
        opened.check()


def test_heads_of_an_edited_model_show_their_origin(open_view, tmp_path):
    path = small_models.model_folder(tmp_path / "llama", "llama")
    loaded = load_model(path)
    apply(loaded.model, [PruneHeads(0, (0,))])
    loaded.model.set_attn_implementation(register())
    with Running(Viewer(ViewedModel(loaded)), path) as server:
        opened = open_view(server)
        expect(opened.tab.locator("header .facts")).to_contain_text("Edited: removed L0H0")
        opened.run_text()
        opened.go("head/0/1")
        expect(opened.tab.locator("main h2").first).to_contain_text("originally L0H2")
        opened.check()


def test_attention_that_is_not_a_number_is_called_so(open_view, tmp_path):
    path = small_models.model_folder(tmp_path / "llama", "llama")
    loaded = load_model(path)
    attention = loaded.model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight[attention.head_dim : 2 * attention.head_dim] = torch.nan
    with Running(Viewer(ViewedModel(loaded)), path) as server:
        opened = open_view(server)
        opened.run_text()
        missing = opened.tab.locator("a.cell.missing")
        expect(missing).to_have_attribute("data-key", "1.1")
        assert "not a number (NaN)" in missing.get_attribute("aria-label")
        opened.go("head/1/1?word=3")
        expect(opened.tab.locator(".strongest > div").first).to_contain_text("not a number (NaN)")
        expect(opened.tab.locator(".map .ramp-missing")).to_have_text("not a number (NaN)")
        assert opened.tab.locator(".word.missing").count() > 0
        opened.check()
