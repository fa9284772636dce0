"""The web UI in a browser: displayed results and requests to the server.

Tests with only ``visit`` work with any server of the HTTP API at ``base_url``. Tests with
``service`` need canned translations, delays and failures.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from canned_service import CannedService
from servers import LINES

api = pytest.importorskip("playwright.sync_api", reason="needs Playwright to open pages")
expect = api.expect

FIRST, SECOND = "A man sleeps on a bench.", "Two dogs are running through the snow."
TEXT = f"{FIRST} {SECOND}\n\nA woman in a blue shirt is reading."
HOSTILE = "<img src=http://example.org/a onerror=alert(1)> <script>alert(2)</script> &amp; <b>."


@pytest.fixture
def service() -> Iterator[CannedService]:
    service = CannedService()
    yield service
    service.close()


@pytest.fixture
def base_url(service: CannedService) -> str:
    """The server whose page is tested."""
    return service.url


@pytest.fixture
def visit(browser: Any, base_url: str) -> Iterator[Callable[..., Any]]:
    """Open the page. At the end, check for errors and for requests to other servers."""
    wrong: list[str] = []

    def open_page(**options: Any) -> Any:
        page = browser.new_page(**({"viewport": {"width": 1280, "height": 800}} | options))
        page.on("request", lambda request: wrong.append(request.url) if leaves(request) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda said: wrong.append(said.text) if is_fault(said.text) else None)
        page.goto(base_url)
        pages.append(page)
        return page

    def leaves(request: Any) -> bool:
        return not request.url.startswith((base_url, "data:"))

    def is_fault(text: str) -> bool:
        return "Failed to load resource" not in text  # an error status, which the page shows

    pages: list[Any] = []
    yield open_page
    for page in pages:
        page.close()
    assert not wrong


def translate(page: Any, text: str) -> list[dict[str, Any]]:
    """Type a text. Returns the data of all events: the sentences, then the whole translation."""
    with page.expect_response(lambda r: r.url.endswith("/translate/stream") and r.ok) as answer:
        page.get_by_role("textbox", name="Text").fill(text)
    events = re.findall(r"data: ?(.*)", answer.value.text())
    expect(page.locator("#copy")).to_be_enabled()
    return list(map(json.loads, events))


def word_tokens(tokens: list[str]) -> list[list[int]]:
    """The indices of each word's tokens."""
    starts = [sum(token.startswith("▁") for token in tokens[: i + 1]) for i in range(len(tokens))]
    places = [i for i, token in enumerate(tokens) if token != "</s>"]
    return [list(group) for _, group in itertools.groupby(places, key=lambda i: starts[i])]


def confidence(sentence: dict[str, Any], places: list[int]) -> float:
    return math.exp(sum(sentence["token_scores"][i] for i in places) / len(places))


def weight(sentence: dict[str, Any], places: list[int], source_places: list[int]) -> float:
    """Mean attention of a word to a source word."""
    looks = [sum(sentence["alignment"][i][j] for j in source_places) for i in places]
    return sum(looks) / len(looks)


def style(locator: Any, name: str) -> float:
    return float(locator.evaluate(f"word => word.style.getPropertyValue('{name}')"))


def short_repr(page: Any) -> list[str]:
    """The translations of the sentences on the page."""
    return page.locator(".target").all_inner_texts()


def copied(page: Any) -> str:
    """Copy with the button. Returns the clipboard by pasting it over the text."""
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("textbox", name="Text").focus()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.press("ControlOrMeta+V")
    return page.get_by_role("textbox", name="Text").input_value()


def test_typing_shows_a_translation_with_shading(visit):
    page = visit()
    *sentences, done = translate(page, TEXT)
    assert short_repr(page) == [sentence["translation"] for sentence in sentences]
    assert page.locator(".source").all_inner_texts() == [each["source"] for each in sentences]
    for line, sentence in zip(page.locator(".target").all(), sentences, strict=True):
        words = line.get_by_role("option")
        assert words.all_inner_texts() == sentence["translation"].split()
        for word, places in zip(words.all(), word_tokens(sentence["tokens"]), strict=True):
            sure = confidence(sentence, places)
            assert style(word, "--doubt") == pytest.approx(1 - sure, abs=1e-3)
            assert (word.get_attribute("title") or "").startswith(f"{int(100 * sure + 0.5)}% sure;")
    assert page.locator("#spoken").inner_text() == " ".join(done["translatedText"].split())
    expect(page.get_by_text(f"{len(TEXT)} characters")).to_be_visible()
    word = max(page.locator(".target .word").all(), key=lambda word: style(word, "--doubt"))

    def background() -> str:
        return word.evaluate("word => getComputedStyle(word).backgroundColor")

    shaded = background()
    page.get_by_role("switch", name="Shading").click()
    assert background() != shaded and background().endswith(("0)", " 0)"))
    expect(page.get_by_text("Confidence")).to_be_hidden()
    page.get_by_role("textbox", name="Text").fill("")
    expect(page.locator(".sentence")).to_have_count(0)


def test_hovering_over_a_word_shows_its_attention(visit):
    page = visit()
    *sentences, _ = translate(page, TEXT)
    sentence, row = sentences[1], page.locator(".sentence").nth(1)
    targets, sources = word_tokens(sentence["tokens"]), word_tokens(sentence["source_tokens"])
    sides = row.locator(".target .word"), row.locator(".source .word")
    of_target = [weight(sentence, targets[2], places) for places in sources]
    of_source = [weight(sentence, places, sources[3]) for places in targets]
    for word, others, weights in [
        (sides[0].nth(2), sides[1].all(), of_target),
        (sides[1].nth(3), sides[0].all(), of_source),
    ]:
        word.hover()
        for other, share in zip(others, weights, strict=True):
            assert style(other, "--weight") == pytest.approx(share / max(weights), abs=1e-3)
            looked = "looked" in (other.get_attribute("class") or "").split()
            assert looked == (share > 0.1 * max(weights))
        first = others[weights.index(max(weights))].inner_text()
        said = re.sub("[\u2068\u2069]", "", page.locator("#detail").inner_text())
        assert f"{first} {int(100 * max(weights) + 0.5)}%" in said
    page.get_by_role("heading", name="Translate").hover()
    expect(page.locator(".looked")).to_have_count(0)


def test_the_keyboard_reaches_every_word(visit):
    page = visit()
    *sentences, _ = translate(page, TEXT)
    sentence = sentences[0]
    targets, sources = word_tokens(sentence["tokens"]), word_tokens(sentence["source_tokens"])
    focused = page.locator(":focus")
    page.get_by_role("button", name="Copy").focus()

    def press(keys: str, expected: str, side: str = "target") -> None:
        for key in keys.split():
            page.keyboard.press(key)
        expect(focused).to_have_text(expected)
        assert focused.locator(f"xpath=ancestor::*[contains(@class, '{side}')]").count()
        expect(page.locator(".traced")).to_have_text(expected)

    words = sentence["translation"].split()
    press("Tab", words[0])
    press("ArrowRight ArrowRight", words[2])
    press("End", words[-1])
    press("ArrowRight", sentences[1]["translation"].split()[0])
    press("ArrowLeft Home ArrowRight", words[1])
    looks = [weight(sentence, targets[1], places) for places in sources]
    press("ArrowDown", sentence["source"].split()[looks.index(max(looks))], "source")
    assert page.locator(".looked").count()
    page.keyboard.press("Escape")
    expect(page.get_by_role("textbox", name="Text")).to_be_focused()
    expect(page.locator(".traced")).to_have_count(0)
    page.get_by_role("button", name="Copy").focus()
    press("Tab", words[1])  # focus stays at the word
    page.keyboard.press("Tab")
    expect(focused).to_have_attribute("aria-expanded", "false")
    outline = focused.evaluate("button => getComputedStyle(button).outlineStyle")
    assert outline == "solid"  # a visible ring
    press("Tab", sentences[1]["translation"].split()[0])


def test_an_alternative_replaces_the_translation(visit):
    page = visit()
    *sentences, done = translate(page, TEXT)
    hypotheses = sentences[1]["hypotheses"]
    button = page.get_by_role("button", name="alternative").nth(1)
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    choices = page.get_by_role("list", name="Translations of sentence 2").get_by_role("button")
    for choice, hypothesis in zip(choices.all(), hypotheses, strict=True):
        expect(choice).to_contain_text(hypothesis["translation"])
        expect(choice).to_contain_text(f"score {hypothesis['score']:.2f}")
    expect(choices.first).to_have_attribute("aria-current", "true")
    choices.nth(1).click()
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(button).to_be_focused()
    assert short_repr(page)[1] == hypotheses[1]["translation"]
    expect(page.locator("#spoken")).to_have_text(hypotheses[1]["translation"])
    translate(page, f"{TEXT} And more.")  # other sentences and the choice stay
    assert short_repr(page)[1] == hypotheses[1]["translation"]
    page.locator(".target .word").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("list", name="Translations of sentence 1")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="alternative").first).to_be_focused()
    assert done["translatedText"].count(sentences[1]["translation"]) == 1


def test_the_whole_translation_is_copied(visit):
    page = visit()
    *sentences, done = translate(page, f"{TEXT}\n")
    assert copied(page) == done["translatedText"]
    *sentences, done = translate(page, TEXT)
    page.get_by_role("button", name="alternative").first.click()
    other = sentences[0]["hypotheses"][1]["translation"]
    page.get_by_role("button", name=f"{other} score").click()
    assert copied(page) == done["translatedText"].replace(sentences[0]["translation"], other, 1)


def test_html_in_a_text_is_shown_as_text(visit):
    page = visit()
    for text in (HOSTILE, f"{FIRST} {HOSTILE}"):
        sentences = translate(page, text)[:-1]
        assert " ".join(page.locator(".source").all_inner_texts()) == text
        assert short_repr(page) == [sentence["translation"] for sentence in sentences]
        assert page.locator("img, b, script:not([src='page.js'])").count() == 0


def test_controls_have_names_and_the_page_has_landmarks(visit):
    page = visit()
    translate(page, TEXT)
    page.get_by_role("button", name="alternative").first.click()
    session = page.context.new_cdp_session(page)
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in session.send("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"]
    ]
    named = {"button", "textbox", "switch", "combobox", "link", "region", "listbox", "option"}
    assert not [role for role, name in nodes if role in named and not name.strip()]
    roles = [role for role, _ in nodes]
    assert {"banner", "main", "contentinfo", "status", "heading", "listbox"} <= {*roles}
    assert [name for role, name in nodes if role == "region"] == ["Text", "Translation"]
    names = [name for role, name in nodes if role == "button"]
    assert len(names) == len(set(names))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    source, target = (page.locator(f".{side}").first for side in ("source", "target"))
    languages = [each.get_attribute("lang") for each in (source, target, page.locator("#text"))]
    assert languages[0] == languages[2] != languages[1]
    assert all(languages)


CONTRASTS = """() => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const luminance = (colours) => {
        for (const colour of colours) {
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
        }
        const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((x) => x / 255);
        const linear = parts.map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const contrasts = [];
    for (const element of document.querySelectorAll("body *")) {
        const texts = [...element.childNodes].filter((x) => x.nodeType === 3 && x.data.trim());
        if (!texts.length || !element.checkVisibility() || element.disabled) continue;
        const [behind, colour] = [[], getComputedStyle(element).color];
        for (let each = element; each; each = each.parentElement) {
            behind.unshift(getComputedStyle(each).backgroundColor);
        }
        const [dark, light] = [luminance(behind), luminance([...behind, colour])].sort();
        contrasts.push([(light + 0.05) / (dark + 0.05), element.textContent]);
    }
    return contrasts.sort(([a], [b]) => a - b);
}"""


def test_contrast_and_layout_in_both_widths_and_color_schemes(visit):
    page = visit()
    translate(page, f"{TEXT} {HOSTILE} {'long' * 60}.")
    page.get_by_role("button", name="alternative").first.click()
    for width, scheme in itertools.product((1280, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        for side in ("target", "source"):
            page.locator(f".{side} .word").nth(8).hover()
            lowest = page.evaluate(CONTRASTS)
            assert len(lowest) > 30 and lowest[0][0] >= 4.5, (width, scheme, lowest[:5])
        assert page.evaluate("document.documentElement.scrollWidth") == width  # no overflow
        text, result = (page.locator(name).bounding_box() for name in ("#text", "#result"))
        assert (result["y"] > text["y"] + text["height"]) == (width == 390)
        assert (result["x"] > text["x"] + text["width"]) == (width == 1280)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 23, 27)") == (scheme == "dark")


def test_forced_colors_and_reduced_motion(visit):
    page = visit(forced_colors="active", reduced_motion="reduce")
    translate(page, TEXT)
    page.locator(".target .word").nth(2).hover()
    looked = page.locator(".looked").first
    assert looked.evaluate("word => getComputedStyle(word).outlineStyle") == "solid"
    animation = page.evaluate("getComputedStyle(document.querySelector('#busy')).animationName")
    assert animation == "none"


def test_sentences_are_shown_as_they_arrive(visit, service):
    service.steps = threading.Semaphore(1)
    page = visit()
    page.get_by_role("textbox", name="Text").fill(TEXT)
    expect(page.locator(".sentence")).to_have_count(1)
    expect(page.get_by_text("translating …")).to_be_visible()
    expect(page.get_by_role("button", name="Copy")).to_be_disabled()
    expect(page.get_by_role("status")).to_have_text("")  # announced when complete
    service.steps.release()
    expect(page.locator(".sentence")).to_have_count(2)
    service.steps.release()
    expect(page.locator(".sentence")).to_have_count(3)
    expect(page.get_by_text("translating …")).to_be_hidden()
    expect(page.get_by_role("status")).to_contain_text("Ein Mann schläft")


TYPE = """(field, text) => {
  for (const end of text.split("").keys()) {
    field.value = text.slice(0, end + 1);
    field.dispatchEvent(new Event("input"));
  }
}"""


def test_typing_is_debounced_and_cancels_the_running_request(visit, service):
    service.steps = threading.Semaphore(1)
    page = visit()
    text = page.get_by_role("textbox", name="Text")
    text.evaluate(TYPE, FIRST)  # without a pause, so one request
    expect(page.locator(".sentence")).to_have_count(1)
    assert [request["q"] for request in service.requests] == [FIRST]
    text.press_sequentially(f" {SECOND}")
    expect(page.locator(".old")).to_have_count(1)  # its translation is outdated
    text.press("End")
    text.press_sequentially("..")
    for _ in range(100):
        page.wait_for_timeout(20)
        if service.vanished:
            break
    assert service.vanished == 1
    service.steps.release(9)
    expect(page.locator(".sentence")).to_have_count(2)
    expect(page.locator(".old")).to_have_count(0)
    service.steps = None
    number = len(service.requests)
    text.press("Control+Enter")  # without waiting
    page.wait_for_timeout(200)
    assert len(service.requests) == number + 1
    assert set(service.requests[-1]) == {
        *("q", "source", "target", "format", "alternatives", "attention")
    }


@pytest.mark.parametrize(("beam_size", "said"), [(2, ["1 alternative for sentence 1"]), (1, [])])
def test_the_page_finds_the_maximum_number_of_alternatives(visit, service, beam_size, said):
    service.beam_size = beam_size
    page = visit()
    translate(page, FIRST)
    expect(page.locator(".more")).to_have_text(said)
    tried = [3, 2, 1] if beam_size == 2 else [3, 2, 1, 0]
    assert [request["alternatives"] for request in service.requests] == tried
    translate(page, SECOND)
    assert service.requests[-2]["alternatives"] == tried[-1]  # it remembers


def test_the_page_waits_for_a_compiling_or_missing_server(visit, service):
    service.status = "compiling"
    page = visit()
    message = page.get_by_role("alert")
    expect(message).to_contain_text("The server is still compiling")
    page.get_by_role("textbox", name="Text").fill(FIRST)
    service.status = "ok"
    expect(page.locator(".sentence")).to_have_count(1)
    expect(message).to_be_hidden()
    port = int(service.url.rstrip("/").rpartition(":")[2])
    service.close()
    page.get_by_role("textbox", name="Text").fill(SECOND)
    expect(message).to_contain_text("The server is not responding.")
    again = CannedService(port)
    expect(page.locator(".source")).to_have_text(SECOND)
    expect(message).to_be_hidden()
    again.close()


def test_errors_are_shown(visit, service):
    page = visit()
    text, message = page.get_by_role("textbox", name="Text"), page.get_by_role("alert")
    service.max_characters = 20
    text.fill(TEXT)
    expect(message).to_have_text(re.compile("q has .* characters; expected at most 20."))
    expect(page.locator(".sentence")).to_have_count(0)
    service.max_characters = 999
    service.busy = 1
    text.press("Control+Enter")
    expect(message).to_have_text("The queue is full (1,024 sentences). Retrying in 1 s.")
    expect(page.locator(".sentence")).to_have_count(3)
    expect(message).to_be_hidden()
    service.fails = True
    text.press("Control+Enter")
    expect(message).to_have_text("The search ran out of time.")
    expect(page.locator(".sentence")).to_have_count(1)
    service.fails, service.breaks = False, True
    text.press("Control+Enter")
    expect(message).to_contain_text("The connection was lost")
    page.route(
        "**/translate/stream",
        lambda route: route.fulfill(status=502, content_type="text/html", body="<h1>no</h1>"),
    )
    text.press("Control+Enter")
    expect(message).to_have_text("The server returned status 502.")
    page.unroute("**/translate/stream")
    page.route(
        "**/translate/stream", lambda route: route.fulfill(status=400, json={"error": HOSTILE})
    )
    text.press("Control+Enter")
    expect(message).to_have_text(HOSTILE)


def test_languages_are_named_and_can_be_chosen(visit, service):
    page = visit()
    expect(page.locator("#one-pair")).to_have_text("English to German")
    expect(page.get_by_role("combobox")).to_have_count(0)
    service.languages = [
        {"code": "en", "name": "en", "targets": ["de", "ar"]},
        {"code": "y_2", "name": "y_2", "targets": ["en", "pt_BR"]},
    ]
    page = visit()
    choice = page.get_by_role("combobox", name="Languages")
    expect(choice.locator("option")).to_have_text(
        ["English to German", "English to Arabic", "y_2 to English", "y_2 to Brazilian Portuguese"]
    )
    translate(page, FIRST)
    with page.expect_response("**/translate/stream"):
        choice.select_option("English to Arabic")
    assert (service.requests[-1]["source"], service.requests[-1]["target"]) == ("en", "ar")
    expect(page.locator(".target")).to_have_attribute("lang", "ar")


def answer_with(page: Any, *sentences: dict[str, Any]) -> None:
    """Replace the server's next responses."""
    events = [f"event: sentence\r\ndata: {json.dumps(sentence)}" for sentence in sentences]
    text = " ".join(sentence["translation"] for sentence in sentences)
    events += [": still here", f"event: done\r\ndata: {json.dumps({'translatedText': text})}"]
    body = "".join(f"{event}\r\n\r\n" for event in events)
    page.route(
        "**/translate/stream",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def one_sentence(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "before": "", "source": "x", "score": -1.0, "log_prob": -1.0} | fields


def test_words_are_made_of_tokens(visit):
    page = visit()
    for number, (spelled, translation, words) in enumerate(
        [
            ("▁Ein ▁Hund ▁ schlä ft . </s>", "Ein Hund schläft.", ["Ein", "Hund", "schläft."]),
            ("▁Ein </s> ▁Hund </s>", "Ein Hund", ["Ein", "Hund"]),
            ("▁ <0xC3> <0xA4> b ▁c </s>", "äb c", ["äb", "c"]),
            ("▁a <unk> b </s>", "a ⁇ b", ["a", "⁇", "b"]),
            ("▁ 我们 看书 。 </s>", "我们看书。", ["我们", "看书", "。"]),
            ("▁something ▁else </s>", "another text", ["another text"]),  # tokens do not match
            (f"▁{HOSTILE.replace(' ', ' ▁')} </s>", HOSTILE, HOSTILE.split()),
        ]
    ):
        tokens = spelled.split()
        scores = {"tokens": tokens, "token_scores": [math.log(0.25)] * len(tokens)}
        source = f"x{number}"
        answer_with(page, one_sentence(source=source, translation=translation, **scores))
        translate(page, source)
        found = page.locator(".target .word")
        assert found.all_inner_texts() == words
        assert short_repr(page) == [translation]
        assert {each.get_attribute("title") for each in found.all()} == {"25% sure"}
        found.first.hover()
        expect(page.locator(".looked")).to_have_count(0)  # the response has no attention


def test_the_source_is_shown_as_typed(visit):
    page = visit()
    for source, source_tokens in (
        ("Ein Hund.", "▁ein ▁hund . </s>"),  # the model reads lower case
        ("one. two", "▁one <unk> ▁two </s>"),
        ("ﬁ two", "▁fi ▁tw o </s>"),
    ):
        tokens = source_tokens.split()
        weights = [[1.0] + [0.0] * (len(tokens) - 1)] * 2
        target = {"translation": "X", "tokens": ["▁X", "</s>"], "token_scores": [-0.5] * 2}
        attention = {"source_tokens": tokens, "alignment": weights}
        answer_with(page, one_sentence(source=source, **target, **attention))
        translate(page, source)
        assert page.locator(".source .word").all_inner_texts() == source.split()
        page.locator(".target .word").hover()
        expect(page.locator(".looked")).to_have_text(source.split()[0])


def test_the_page_of_the_real_service(browser, server):
    page = browser.new_page()
    try:
        page.goto(server.url)
        page.get_by_role("textbox", name="Text").fill("\n".join(LINES[6:9]))
        expect(page.locator("#copy")).to_be_enabled(timeout=30_000)
        assert short_repr(page) == server.translator.translate(LINES[6:9])
        page.locator(".target .word").first.hover()
        expect(page.locator(".tracing .looked").first).to_be_visible()
        page.get_by_role("button", name="2 alternatives").first.click()  # a beam of three
        expect(page.locator(".sentence li").nth(1)).to_be_visible()
    finally:
        page.close()


def test_the_api_documentation_works_in_a_browser(browser, server):
    page = browser.new_page()
    faults: list[str] = []
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    try:
        page.goto(f"{server.url}/docs")
        page.locator("#operations-default-health_health_get button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        status = page.locator(".live-responses-table .response-col_status").last
        expect(status).to_contain_text("200")
        assert not faults
    finally:
        page.close()


def test_arrow_keys_follow_the_direction_of_the_text(visit):
    page = visit()
    tokens = {"tokens": ["▁אב", "▁גד", "</s>"], "token_scores": [-0.5] * 3}
    answer_with(page, one_sentence(translation="אב גד", **tokens))
    translate(page, "x")
    page.locator(".target .word").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(":focus")).to_have_text("גד")


def test_a_sentence_without_a_translation(visit):
    page = visit()
    nothing = one_sentence(source="x <b>", translation="", score=None, log_prob=None)
    nothing |= {"tokens": ["</s>"], "token_scores": [None], "alignment": None}
    answer_with(page, nothing | {"hypotheses": [nothing, nothing]})
    translate(page, "x <b>")
    assert short_repr(page) == ["(no translation found)"]
    page.get_by_role("button", name="1 alternative").click()
    expect(page.get_by_text("score unknown").first).to_be_visible()
