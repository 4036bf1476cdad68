"""Conversations over refreshes, tabs and browsers."""

import re
import time
from collections.abc import Callable

from playwright.sync_api import Browser, BrowserContext, ViewportSize, expect

from tests.aids.chain import script
from tests.aids.live_server import LiveServer
from tests.webui.chat_page import ChatPage
from tests.webui.server_state import sessions, turn_ended_at

CANCELLED_S = 2.0  # the page's promise


def test_new_chat_begins_anew_and_the_list_leads_back(page: ChatPage) -> None:
    page.ask("hello")
    page.page.locator("#limpet-new").click()
    page.until(lambda: page.answers() == [])
    page.ask("first spaces")
    expect(page.rows).to_have_text(["first spaces", "hello"])
    page.rows.nth(1).click()
    page.until(lambda: page.answers() == [script("hello").text])
    page.ask("emoji")
    expect(page.rows).to_have_text(["hello", "first spaces"])


def test_switching_while_an_answer_comes_mixes_nothing(page: ChatPage) -> None:
    page.ask("hello")
    page.page.locator("#limpet-new").click()
    page.until(lambda: page.answers() == [])
    page.send("long")
    page.wait_for_answer("word20")
    page.rows.nth(1).click()
    page.until(lambda: page.answers() == [script("hello").text])
    assert page.ask("emoji") == script("emoji").text
    expect(page.rows).to_have_count(2)
    page.page.locator("#limpet-list label", has_text="long").click()
    page.wait_for_answer("word3000")
    assert page.questions() == ["long"]


def test_refresh_restores_the_conversation_and_goes_on(page: ChatPage) -> None:
    page.ask("hello")
    page.open()
    page.until(lambda: page.answers() == [script("hello").text])
    page.ask("emoji")
    assert page.answers() == [script("hello").text, script("emoji").text]
    expect(page.notes.last).not_to_contain_text(", 0 cached")


def test_refresh_in_the_middle_of_an_answer_keeps_what_had_come(page: ChatPage) -> None:
    page.ask("hello")
    page.send("loop")
    page.wait_for_answer("tick5")
    page.open()
    page.until(lambda: len(page.answers()) == 2)
    assert page.answers()[1].startswith("tick0 tick1")
    assert page.ask("hello") == script("hello").text


def test_three_tabs_stream_and_stopping_one_leaves_the_others(
    chain_url: str, open_page: Callable[..., ChatPage]
) -> None:
    tabs = [open_page(chain_url) for _ in range(3)]
    for tab in tabs:
        tab.page.locator("#limpet-new").click()
        tab.send("loop")
    for tab in tabs:
        tab.wait_for_answer("tick5")
    tabs[1].stop()
    expect(tabs[1].notes).to_have_count(1)
    for tab in (tabs[0], tabs[2]):
        shown = len(tab.answers()[0])
        tab.until(lambda tab=tab, shown=shown: len(tab.answers()[0]) > shown)
        tab.stop()
        expect(tab.notes).to_have_count(1)


def test_two_tabs_on_one_conversation_have_sessions_of_their_own(
    page: ChatPage, chain_url: str, open_page: Callable[..., ChatPage], chain: LiveServer
) -> None:
    page.ask("hello")
    before = {each["session_id"] for each in sessions(chain)}
    other = open_page(chain_url)
    other.until(lambda: other.answers() == [script("hello").text])
    other.ask("emoji")
    expect(other.notes.last).to_contain_text("sent again")
    assert len({each["session_id"] for each in sessions(chain)} - before) == 1  # those of closed tabs end by and by
    page.until(lambda: page.answers() == [script(key).text for key in ("hello", "emoji")])
    page.send("chinese")  # and none loses what the other has asked
    page.until(lambda: page.answers() == [script(key).text for key in ("hello", "emoji", "chinese")])


def test_two_tabs_opened_at_once_in_a_fresh_browser_keep_both_conversations(
    context: BrowserContext, chain_url: str, open_page: Callable[..., ChatPage]
) -> None:
    tabs = [ChatPage(context, chain_url), ChatPage(context, chain_url)]
    for tab in tabs:
        tab.page.goto(chain_url, wait_until="commit")
    for tab, question in zip(tabs, ("hello", "emoji"), strict=True):
        tab.ask(question)
    for tab in tabs:
        tab.page.close()
    expect(open_page(chain_url).rows).to_have_text(["emoji", "hello"])


def test_two_browsers_never_see_each_other(
    browser: Browser, chain_url: str, open_page: Callable[..., ChatPage]
) -> None:
    with browser.new_context() as first, browser.new_context() as second:
        mine, theirs = open_page(chain_url, first), open_page(chain_url, second)
        mine.ask("my bananas hello")
        theirs.ask("emoji")
        for page, secret in ((mine, "emoji"), (theirs, "bananas")):
            page.open()
            page.until(lambda page=page: len(page.answers()) == 1)
            assert secret not in page.page.content()


def test_a_closed_tab_cancels_its_answer(page: ChatPage, chain: LiveServer) -> None:
    page.send("loop")
    page.wait_for_answer("tick5")
    closed_at = time.time()
    page.page.close()
    assert turn_ended_at(chain) - closed_at < CANCELLED_S  # the loop script ends at the context's end only


def test_the_page_fits_a_phone_and_is_dark_with_it(
    browser: Browser, chain_url: str, open_page: Callable[..., ChatPage]
) -> None:
    size: ViewportSize = {"width": 360, "height": 640}
    with browser.new_context(viewport=size, has_touch=True, is_mobile=True, color_scheme="dark") as phone:
        page = open_page(chain_url, phone)
        background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", background))) < 64
        page.ask("markdown")
        page.ask("code")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 360
        box = page.box.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
        page.box.fill("many\n" * 20)
        expect(page.page.locator("#limpet-box .submit-button")).to_be_in_viewport(ratio=1)
        expect(page.page.locator("#limpet-new")).not_to_be_in_viewport()
        page.page.get_by_label("Toggle Sidebar").click()
        page.page.locator("#limpet-new").click()
        page.until(lambda: page.answers() == [])
        expect(page.page.locator("#limpet-new")).not_to_be_in_viewport()
