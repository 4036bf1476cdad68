"""What a person sets on the page, and what the server says; against a fake server that tells what it was asked."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

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


def test_a_seed_that_is_no_number_is_said(fake_page: ChatPage, server: FakeServer) -> None:
    page = fake_page
    page.page.get_by_role("button", name="Sampling").click()
    page.page.get_by_label("Seed").fill("x")
    page.send("hi")
    expect(page.notice).to_contain_text("seed is 'x'")
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
