"""The chat page in real headless Chromium, by what a person sees and does."""

import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import BrowserContext, ConsoleMessage, Page, expect

from limpet.webui.inert_text import JOINER
from tests.aids.live_server import free_ports

WAIT_S = 60.0
_MS = 1000 * WAIT_S
expect.set_options(timeout=_MS)


class ChatPage:
    """One tab. `problems` collects console errors and requests to any other address."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.problems: list[str] = []
        self.url = url
        self.page: Page = context.new_page()
        self.page.set_default_timeout(_MS)
        self.page.on("request", lambda request: self._check_address(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", self._check_line)
        self.box = self.page.locator("#limpet-box textarea")
        self.stop_button = self.page.locator("#limpet-box .stop-button")
        self.notice = self.page.locator(".limpet-notice")
        self.badge = self.page.locator(".limpet-badge")
        self.rows = self.page.locator("#limpet-list label")
        self.notes = self.page.locator(".limpet-note")

    def open(self) -> "ChatPage":
        """Load the page and wait until it can be used."""
        self.page.goto(self.url)
        expect(self.badge).to_be_visible()
        expect(self.rows).not_to_have_count(0)
        return self

    def send(self, text: str) -> None:
        """Type a message and press Enter."""
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> str:
        """Send a message and wait for the whole answer."""
        before = self.notes.count()
        self.send(text)
        expect(self.notes).to_have_count(before + 1)
        return self.answers()[-1]

    def regenerate(self) -> str:
        """Have the last question answered again and wait for the whole answer."""
        notes = self.notes.count()
        self.notes.last.evaluate("note => { note.dataset.old = '' }")
        self.page.get_by_label("Retry").last.click()
        expect(self.page.locator(".limpet-note[data-old]")).to_have_count(0)
        expect(self.notes).to_have_count(notes)
        return self.answers()[-1]

    def answers(self) -> list[str]:
        """The answers as shown, without the lines under them."""
        return [_without_note(text) for text in self._texts(".bot.message")]

    def questions(self) -> list[str]:
        return self._texts(".user.message")

    def wait_for_answer(self, text: str) -> None:
        """Until the last answer contains `text`."""
        self.until(lambda: any(text in answer for answer in self.answers()[-1:]))

    def stop(self) -> float:
        """Click the square; returns the moment of the click, in seconds since 1970."""
        note = "() => { window.clickedAt = Date.now() / 1000 }"
        self.page.evaluate(f"document.addEventListener('click', {note}, {{ capture: true, once: true }})")
        self.stop_button.click()
        return float(self.page.evaluate("window.clickedAt"))

    def open_sampling(self) -> None:
        """Open the sidebar's sampling; just then Gradio sets all that is in it once more."""
        self.page.get_by_role("button", name="Sampling").click()
        expect(self.page.get_by_label("Seed")).to_be_visible()
        self.page.evaluate("new Promise(requestIdleCallback)")

    def set_sampling(self, temperature: str, seed: str) -> None:
        """Open the sidebar's sampling and set these."""
        self.open_sampling()
        self.page.get_by_label("Set it here").check()
        field = self.page.get_by_label("number input for Temperature")
        field.fill(temperature)
        field.blur()
        self.page.get_by_label("Seed").fill(seed)

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll the page; fails after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.questions(), self.answers())
            self.page.wait_for_timeout(20)

    def states(self, number: int, until_text: str) -> list[str]:
        """The different states of an answer while it comes, up to the one that contains `until_text`."""
        seen: list[str] = []

        def look() -> bool:
            current = "".join(self.answers()[number : number + 1])
            if current and (not seen or seen[-1] != current):
                seen.append(current)
            return until_text in current

        self.until(look)
        return seen

    def _texts(self, selector: str) -> list[str]:
        texts: list[str] = self.page.locator(f"#limpet-chat {selector}").evaluate_all(
            "elements => elements.map(element => element.innerText)"
        )
        return [text.replace(JOINER, "").strip() for text in texts]

    def _check_line(self, line: ConsoleMessage) -> None:
        if line.type == "error":
            self.problems.append(f"{line.text} {line.location['url']}")

    def _check_address(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"request to {url}")


def _without_note(text: str) -> str:
    return re.sub(r"\n*\d+ tokens · .*\Z", "", text, flags=re.DOTALL)


@contextmanager
def web_ui(target: str, *flags: str) -> Iterator[str]:
    """limpet-webui in front of the server at `target`; yields the page's address."""
    (port,) = free_ports(1)
    command = [Path(sys.executable).with_name("limpet-webui"), target, f"--port={port}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        _wait_for_line(process, "talks to")
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for_line(process: "subprocess.Popen[bytes]", text: str) -> None:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(2 * WAIT_S), "limpet-webui printed nothing"
    assert text in process.stdout.readline().decode()
