"""What a person sets on the page, and what the server says; against a fake server that tells what it was asked."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Route, expect

from tests.client.fake_server import Asked, FakeServer, error, fake_server
from tests.client.session_server import SessionServer
from tests.webui.chat_page import ChatPage, web_ui


@pytest.fixture(scope="module")
def fake_url() -> Iterator[tuple[FakeServer, str]]:
    with fake_server() as server, web_ui(server.target) as url:
        yield server, url


@pytest.fixture
def server(fake_url: tuple[FakeServer, str]) -> FakeServer:
    """The page's server, keeping sessions; fresh for each test but for its models."""
    server = fake_url[0]
    kept = SessionServer()
    server.answer, server.admin = kept.answer, kept.admin
    return server


@pytest.fixture
def fake_page(server: FakeServer, fake_url: tuple[FakeServer, str], open_page: Callable[..., ChatPage]) -> ChatPage:
    return open_page(fake_url[1])


def test_refused_regeneration_brings_the_old_answer_back(fake_page: ChatPage, server: FakeServer) -> None:
    page = fake_page
    page.ask("a")
    answer = server.answer
    server.answer = lambda asked: iter([error("[UNAVAILABLE] The queue is full.")])
    page.page.get_by_label("Retry").last.click()
    expect(page.notice).to_have_text("The queue is full.")
    assert page.answers() == ["<a>"]
    expect(page.box).to_have_value("")
    server.answer = answer
    page.send("b")
    page.until(lambda: page.answers() == ["<a>", "<b>"])


def test_sampling_system_prompt_and_seed_reach_the_server_and_are_remembered(
    fake_page: ChatPage, server: FakeServer
) -> None:
    page = fake_page
    page.ask("plain")
    assert last_turn(server).options == {}
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.set_sampling(temperature="0.3", seed="7")
    page.ask("tuned")
    assert last_turn(server).options == {
        "temperature": 0.3, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1, "seed": 7,
    }  # fmt: skip
    assert last_turn(server).messages[0] == {"role": "system", "content": "Be brief."}
    page.open()
    page.until(lambda: len(page.answers()) == 2)
    page.ask("again")
    assert last_turn(server).options["temperature"] == 0.3
    assert last_turn(server).parameters["sequence_start"] is False


def test_numbers_that_a_person_is_still_typing_or_that_are_too_large_do_no_harm(
    fake_page: ChatPage, server: FakeServer
) -> None:
    page = fake_page
    page.set_sampling(temperature="9", seed="")
    limit = page.page.get_by_label("number input for Longest answer")
    for typed, remains in (("", "0"), ("20000", "8192")):
        with page.page.expect_response(lambda response: "/run/" in response.url):
            limit.fill(typed)
        limit.blur()
        expect(limit).to_have_value(remains)
    page.ask("hi")
    assert last_turn(server).options["temperature"] == 2.0
    assert last_turn(server).options["max_tokens"] == 8192


def test_what_is_sent_before_the_page_is_ready_waits_for_it(fake_page: ChatPage, server: FakeServer) -> None:
    page = fake_page
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.ask("a")
    loading: list[Route] = []

    def hold_load(route: Route) -> None:
        if not loading and len(route.request.post_data_json["data"]) == 1:
            loading.append(route)
        else:
            route.continue_()

    page.page.route("**/run/**", hold_load)
    page.page.reload()
    page.send("early")
    page.until(lambda: bool(loading))
    expect(page.box).to_have_value("early")
    loading[0].continue_()
    page.until(lambda: page.answers() == ["<a>", "<early>"])
    expect(page.box).to_have_value("")
    assert last_turn(server).parameters["sequence_start"] is False  # it went on where "a" had ended
    page.page.unroute_all(behavior="ignoreErrors")


def test_an_answer_that_leaves_its_code_open_has_its_counts_outside_and_is_copied_as_written(
    fake_page: ChatPage, server: FakeServer
) -> None:
    page = fake_page
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    written = "Look:\n```python\nx = [1]\n"
    kept = SessionServer()
    kept.reply = lambda question: written
    server.answer, server.admin = kept.answer, kept.admin
    page.ask("a")
    expect(page.page.locator("#limpet-chat pre")).to_have_text("x = [1]")
    expect(page.notes).to_have_text(re.compile(r"^\d+ tokens · \d+ in, \d+ cached · first after .* s · .* tokens/s$"))
    page.page.get_by_label("Copy message").last.click()
    page.until(lambda: page.page.evaluate("navigator.clipboard.readText()") == written)


def test_a_seed_that_is_no_number_is_said(fake_page: ChatPage, server: FakeServer) -> None:
    page = fake_page
    page.open_sampling()
    page.page.get_by_label("Seed").fill("x")
    page.send("hi")
    expect(page.notice).to_contain_text("The seed must be a whole number")
    expect(page.box).to_have_value("hi")


def test_a_restarted_server_that_is_busy_and_has_two_models(fake_page: ChatPage, server: FakeServer) -> None:
    page = fake_page
    server.admin = lambda operation: {"ready": False, "reason": "The engine is starting."}
    expect(page.badge).to_have_text("server away")
    expect(page.page.locator(".limpet-name")).to_have_text("tiny")  # the fake server's only model
    server.models = {"one": 0, "two": 0}
    server.admin = lambda operation: {"ready": True, "models": {"one": {"waiting": 3}}}
    expect(page.badge).to_have_text("busy")
    page.page.get_by_label("Model").click()
    page.page.get_by_role("option", name="two").click()
    page.ask("hi")
    assert last_turn(server).model == "two"
    page.open()
    expect(page.page.get_by_label("Model")).to_have_value("two")


def last_turn(server: FakeServer) -> Asked:
    """The last question that the server was asked; sessions no longer used are ended in between."""
    return [asked for asked in server.asked if not asked.parameters["sequence_end"]][-1]
