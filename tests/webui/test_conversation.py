"""A conversation on the page: streaming, stop, regenerate, edit, clear, what text looks like."""

import re
from itertools import pairwise

from playwright.sync_api import APIResponse, Route, expect

from tests.aids.chain import script
from tests.aids.live_server import LiveServer
from tests.webui.chat_page import ChatPage
from tests.webui.server_state import engine, sessions, turn_ended_at

STOPPED_S = 1.0  # the page's promise


def test_answer_streams_and_ends_with_a_line_of_counts(page: ChatPage) -> None:
    page.send("long")
    states = page.states(0, "word3000")
    assert len(states) > 2
    assert all(len(earlier) < len(later) for earlier, later in pairwise(states))
    expect(page.notes.first).to_contain_text("tokens · ")
    expect(page.notes.first).to_contain_text("cached")
    assert page.answers()[0].split() == script("long").text.split()


def test_second_turn_reports_cached_tokens(page: ChatPage) -> None:
    page.ask("hello")
    page.ask("spaces")
    expect(page.notes.nth(0)).to_contain_text(", 0 cached")
    expect(page.notes.nth(1)).not_to_contain_text(", 0 cached")


def test_stop_ends_the_answer_and_the_next_question_works_at_once(page: ChatPage, chain: LiveServer) -> None:
    page.send("loop")
    page.wait_for_answer("tick5")
    page.stop()
    page.send("hello")
    page.until(lambda: page.answers()[-1] == script("hello").text)
    assert page.answers()[0].startswith("tick0 tick1")
    expect(page.notes.first).to_contain_text("stopped")
    page.until(lambda: engine(chain)["running"] == 0)


def test_stop_ends_the_answer_on_the_server_which_keeps_what_was_shown(page: ChatPage, chain: LiveServer) -> None:
    page.send("loop")
    page.wait_for_answer("tick5")
    clicked_at = page.stop()
    assert turn_ended_at(chain) - clicked_at < STOPPED_S
    expect(page.notes).to_contain_text("stopped")
    shown = len(page.answers()[0].split())  # a word of this script is a token
    assert page.notes.inner_text().startswith(f"{shown} tokens · ")
    (asked,) = re.findall(r"(\d+) in", page.notes.inner_text())
    assert sessions(chain)[-1]["tokens"] == int(asked) + shown
    page.ask("hello")
    expect(page.notes.last).not_to_contain_text("sent again")
    expect(page.notes.last).not_to_contain_text(", 0 cached")


def test_escape_stops(page: ChatPage) -> None:
    page.send("loop")
    page.wait_for_answer("tick5")
    page.page.keyboard.press("Escape")
    expect(page.notes.first).to_contain_text("stopped")


def test_a_question_asked_while_an_answer_comes_stops_it(page: ChatPage) -> None:
    page.send("loop")
    page.wait_for_answer("tick5")
    page.send("hello")
    page.until(lambda: page.answers()[-1] == script("hello").text)
    assert len(page.answers()) == 2


def test_an_answer_is_followed_unless_one_reads_further_up(page: ChatPage) -> None:
    conversation = page.page.locator("#limpet-chat .bubble-wrap")

    def hidden_below() -> float:
        return float(
            conversation.evaluate("element => element.scrollHeight - element.scrollTop - element.clientHeight")
        )

    page.send("loop")
    page.until(lambda: conversation.evaluate("element => element.scrollTop") > 500)
    conversation.hover()
    page.page.mouse.wheel(0, -300)
    page.until(lambda: hidden_below() > 2000)
    page.send("hello")
    page.until(lambda: page.answers()[-1] == script("hello").text and hidden_below() < 2)


def test_regenerate_rewinds_and_answers_again(page: ChatPage, chain: LiveServer) -> None:
    page.ask("hello")
    page.ask("emoji")
    assert page.regenerate() == script("emoji").text
    assert page.answers()[:-1] == [script("hello").text]
    expect(page.notes.last).not_to_contain_text(", 0 cached")
    expect(page.notes.last).not_to_contain_text("sent again")
    assert sessions(chain)[-1]["turns"] == 2


def test_an_edited_question_takes_the_place_of_what_followed(page: ChatPage) -> None:
    question = "hello <b> $x^2$ for $5"
    page.ask(question)
    expect(page.page.locator("#limpet-chat .user .katex")).to_have_count(1)
    shown_question = page.questions()
    page.ask("emoji")
    page.page.get_by_label("Edit").first.click()
    field = page.page.locator("#limpet-chat textarea")
    expect(field).to_have_value(question)
    shown = field.bounding_box()
    assert shown is not None
    assert shown["width"] > 500  # of a window of 1200: room to write, whatever the message's length
    field.fill(" ")
    page.page.get_by_label("Submit").click()
    page.until(lambda: page.questions() == [*shown_question, "emoji"])  # an empty message asks nothing
    page.page.get_by_label("Edit").first.click()
    field.fill("<i> chinese")
    page.page.get_by_label("Submit").click()
    page.until(lambda: page.answers() == [script("chinese").text] and page.notes.count() == 1)
    assert page.questions() == ["<i> chinese"]


def test_editing_a_question_in_the_middle_sends_nothing_before_it_again(page: ChatPage, chain: LiveServer) -> None:
    for question in ("hello", "emoji", "spaces"):
        page.ask(question)
    page.page.get_by_label("Edit").nth(1).click()
    page.page.locator("#limpet-chat textarea").fill("chinese")
    page.page.get_by_label("Submit").click()
    page.until(lambda: page.answers() == [script("hello").text, script("chinese").text] and page.notes.count() == 2)
    expect(page.notes.last).not_to_contain_text(", 0 cached")
    expect(page.notes.last).not_to_contain_text("sent again")
    assert sessions(chain)[-1]["turns"] == 2


def test_clear_deletes_the_conversation(page: ChatPage) -> None:
    page.ask("hello")
    page.page.get_by_label("Clear").click()
    page.until(lambda: page.answers() == [])
    expect(page.rows).to_have_text(["New chat"])
    page.open()
    assert page.answers() == []


def test_text_in_angle_brackets_is_shown_and_scripts_are_inert(page: ChatPage) -> None:
    assert page.ask("brackets") == script("brackets").text
    assert page.page.locator("#limpet-chat .bot script, #limpet-chat .bot a").count() == 0


def test_html_in_a_question_is_shown_too(page: ChatPage) -> None:
    page.ask("<script>alert(1)</script> <img src=x onerror=alert(2)> ![i](http://192.0.2.1/x.png) hello")
    assert page.questions() == ["<script>alert(1)</script> <img src=x onerror=alert(2)> !i hello"]
    assert page.page.locator("#limpet-chat .user img").count() == 0


def test_markdown_code_tables_and_mathematics_are_rendered(page: ChatPage) -> None:
    page.ask("markdown")
    answer = page.page.locator("#limpet-chat .bot.message").last
    for selector in ("h1", "strong", "em", "table td", ".katex", "ul li"):
        expect(answer.locator(selector).first).to_be_visible()
    page.ask("code")
    answer = page.page.locator("#limpet-chat .bot.message").last
    expect(answer.locator("pre code")).to_contain_text("def add(a: int, b: int) -> int:")


def test_code_and_whole_answers_are_copied_as_the_model_wrote_them(page: ChatPage) -> None:
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = page.page.locator("#limpet-chat .bot.message").last

    def copied() -> str:
        return str(page.page.evaluate("navigator.clipboard.readText()"))

    page.ask("code")
    answer.locator(".copy_code_button").click()
    page.until(lambda: copied().strip() == script("code").text.split("```")[1].removeprefix("python\n").strip())
    page.ask("brackets")
    page.page.get_by_label("Copy message").last.click()
    page.until(lambda: copied() == script("brackets").text)


def test_emoji_and_chinese_are_whole_at_every_moment(page: ChatPage) -> None:
    for number, key in enumerate(("emoji", "chinese")):
        page.send(key)
        states = page.states(number, script(key).text)
        assert [state for state in states if not script(key).text.startswith(state)] == []
        expect(page.notes).to_have_count(number + 1)


def test_an_empty_message_does_nothing(page: ChatPage) -> None:
    page.ask("hello")
    for text in ("", "   "):
        with page.page.expect_response(lambda response: "/run/" in response.url):
            page.send(text)
    page.ask("emoji")
    assert page.questions() == ["hello", "emoji"]


def test_a_response_that_a_later_one_overtook_is_put_right(page: ChatPage) -> None:
    held: list[tuple[Route, APIResponse]] = []

    def hold_new_chat(route: Route) -> None:
        if not held and len(route.request.post_data_json["data"]) == 1:  # the event of "New chat" alone sends one value
            held.append((route, route.fetch()))
        else:
            route.continue_()

    page.page.route("**/run/**", hold_new_chat)
    page.page.locator("#limpet-new").click()
    page.ask("hello")
    [(route, response)] = held
    route.fulfill(response=response)
    page.until(lambda: page.answers() == [])
    page.until(lambda: page.answers() == [script("hello").text])
    page.page.unroute_all(behavior="ignoreErrors")


def test_pressing_enter_twice_asks_once_and_what_is_typed_next_stays(page: ChatPage) -> None:
    network = page.page.context.new_cdp_session(page.page)
    slow = {"offline": False, "latency": 200, "downloadThroughput": -1, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", slow)
    page.box.fill("hello")
    page.box.press("Enter")
    page.box.press("Enter")
    page.box.press_sequentially("emoji")
    page.until(lambda: page.answers() == [script("hello").text])
    expect(page.box).to_have_value("emoji")
    page.box.press("Enter")
    page.wait_for_answer(script("emoji").text)
    assert page.questions() == ["hello", "emoji"]


def test_shift_enter_breaks_the_line(page: ChatPage) -> None:
    page.box.fill("two lines")
    page.box.press("Shift+Enter")
    page.box.press_sequentially("hello")
    page.box.press("Enter")
    page.wait_for_answer(script("hello").text)
    assert page.questions() == ["two lines\nhello"]


def test_a_message_longer_than_the_context_is_refused_in_words_and_kept(page: ChatPage) -> None:
    text = "hello " * 40_000
    page.send(text)
    expect(page.notice).to_contain_text("tokens")
    expect(page.box).to_have_value(text)
    assert page.questions() == []
    assert page.ask("hello") == script("hello").text
    expect(page.notice).to_have_count(0)
