"""The page in front of a real model."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from tests.aids.live_server import LiveServer
from tests.webui.chat_page import ChatPage, web_ui


@pytest.fixture(scope="module")
def smollm2_url(smollm2: LiveServer) -> Iterator[str]:
    with web_ui(smollm2.target) as url:
        yield url


def test_a_conversation_with_smollm2(smollm2_url: str, open_page: Callable[..., ChatPage]) -> None:
    page = open_page(smollm2_url)
    page.set_sampling(temperature="0", seed="1")
    page.send("What is the capital of France?")
    states = page.states(0, "Paris.")
    assert len(states) > 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(states))
    expect(page.notes).to_have_count(1)

    assert "Rome" in page.ask("And of Italy?")
    expect(page.notes.last).not_to_contain_text(", 0 cached")
    answers = page.answers()
    page.regenerate()
    assert page.answers() == answers
    expect(page.notes.last).not_to_contain_text(", 0 cached")

    page.open()
    page.until(lambda: page.answers() == answers)
    page.page.locator("#limpet-new").click()
    page.until(lambda: page.answers() == [])
    page.send("Tell me a long story about a limpet.")
    page.until(lambda: len("".join(page.answers())) > 40)
    page.stop()
    page.send("What is the capital of France?")
    page.until(lambda: "Paris" in page.answers()[-1] and len(page.answers()) == 2)
    expect(page.notes.first).to_contain_text("stopped")
