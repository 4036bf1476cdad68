"""Takes the pictures of the chat page: desktop and phone, light and dark.

python docs/images/make_screenshots.py WORKSPACE
"""

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect, sync_playwright

from limpet.client.private_server import private_server

HERE = Path(__file__).parent
SIZES = {"desktop": (1200, 800), "phone": (390, 780)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
QUESTIONS = ("What is the capital of France?", "Show me a Python function that adds two numbers.")
ANSWER_MS = 180_000


def main() -> int:
    """Returns the exit code."""
    workspace = Path(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with private_server(workspace, lambda line: None) as address:
        command = [Path(sys.executable).with_name("limpet-webui"), address, f"--port={port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page, sync_playwright() as playwright:
            assert page.stdout is not None
            page.stdout.readline()
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            tab = browser.new_page()
            _chat(tab, f"http://127.0.0.1:{port}")
            _take_pictures(tab)
            browser.close()
            page.terminate()
    return 0


def _chat(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#limpet-list label")).not_to_have_count(0)
    page.get_by_role("button", name="Sampling").click()
    page.get_by_label("Set it here").check()
    page.get_by_label("number input for Temperature").fill("0")
    page.get_by_label("number input for Temperature").blur()
    for number, question in enumerate(QUESTIONS, start=1):
        page.locator("#limpet-box textarea").fill(question)
        page.locator("#limpet-box textarea").press("Enter")
        expect(page.locator(".limpet-note")).to_have_count(number, timeout=ANSWER_MS)


def _take_pictures(page: Page) -> None:
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.reload()
            expect(page.locator(".limpet-note")).to_have_count(len(QUESTIONS))
            page.wait_for_timeout(1000)  # the sidebar slides, the conversation scrolls
            page.screenshot(path=HERE / f"page-{size}-{scheme}.png")


if __name__ == "__main__":
    sys.exit(main())
