"""A browser, the page in front of the chain checkpoint's server, and tabs that report what they must not do."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.aids.live_server import LiveServer
from tests.webui.chat_page import ChatPage, web_ui


# Not for the whole session: its event loop would disturb asyncio tests elsewhere.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "Chromium is missing: `make browser` installs it."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def chain_url(chain: LiveServer) -> Iterator[str]:
    """The page for the chain checkpoint."""
    with web_ui(chain.target) as url:
        yield url


@pytest.fixture(scope="package")
def no_template_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain checkpoint converted without its chat template."""
    from limpet.converter.convert import convert
    from limpet.converter.plan import Options, make_plan
    from tests.aids.chain_checkpoint import write_chain_huggingface
    from tests.aids.repositories import CHAIN_ENGINE

    folder = tmp_path_factory.mktemp("no-template")
    write_chain_huggingface(folder / "source")
    (folder / "source" / "chat_template.jinja").unlink()
    options = Options(source=folder / "source", workspace=folder / "workspace", name="chain", engine=CHAIN_ENGINE)
    convert(make_plan(options), lambda num_bytes: None)
    return folder / "workspace" / "model_repository"


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser of one person, with nothing stored."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    yield context
    context.close()


@pytest.fixture
def open_page(context: BrowserContext) -> Iterator[Callable[..., ChatPage]]:
    """Opens tabs; at the end none may have had a console error or left this machine."""
    pages: list[ChatPage] = []

    def open(url: str, context: BrowserContext = context) -> ChatPage:
        pages.append(ChatPage(context, url))
        return pages[-1].open()

    yield open
    assert [problem for page in pages for problem in page.problems] == []


@pytest.fixture
def page(open_page: Callable[..., ChatPage], chain_url: str) -> ChatPage:
    """A fresh tab on the chain checkpoint's page."""
    return open_page(chain_url)
