"""The page when the server is not there, was restarted, or refuses."""

import socket
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.aids.chain import script
from tests.aids.live_server import LiveServer, kill, live_server
from tests.webui.chat_page import ChatPage, web_ui
from tests.webui.path_proxy import path_proxy


def test_killed_server_is_said_the_text_kept_and_its_successor_goes_on(
    chain_repository: Path, open_page: Callable[..., ChatPage]
) -> None:
    with live_server(chain_repository) as first:
        first.wait_ready()
        with web_ui(first.target) as url:
            page = open_page(url)
            page.ask("hello")
            page.send("loop")
            page.wait_for_answer("tick5")
            kill(first.processes())
            expect(page.notes).to_have_count(2)
            expect(page.notes.last).to_contain_text("broke off")
            expect(page.badge).to_have_text("server away")
            page.send("emoji")
            expect(page.notice).to_contain_text("No connection")
            expect(page.box).to_have_value("emoji")
            with live_server(chain_repository, [f"--grpc-port={first.grpc_port}"]) as second:
                second.wait_ready()
                expect(page.badge).to_have_text("connected")
                page.box.press("Enter")
                page.until(lambda: page.answers()[-1] == script("emoji").text)
                expect(page.notes.last).to_contain_text("sent again")
                assert page.answers()[1].startswith("tick0 tick1")
        page.problems.clear()  # the end of limpet-webui itself


def test_restarted_page_server_is_found_again_by_an_open_tab(
    chain: LiveServer, open_page: Callable[..., ChatPage]
) -> None:
    with web_ui(chain.target) as url:
        page = open_page(url)
        page.ask("hello")
        port = url.rpartition(":")[2]
    page.send("chinese")
    with web_ui(chain.target, f"--port={port}"):
        page.page.wait_for_event("framenavigated")  # Gradio's page reloads itself
        page.problems.clear()  # requests while nobody listened
        page.until(lambda: page.answers() == [script("hello").text])
        expect(page.box).to_have_value("chinese")
        assert page.ask("emoji") == script("emoji").text


def test_wrong_address_is_said(open_page: Callable[..., ChatPage]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with web_ui(f"127.0.0.1:{nobody.getsockname()[1]}") as url:
            page = open_page(url)
            expect(page.badge).to_have_text("server away")
            page.send("hello")
            expect(page.notice).to_contain_text("No connection")
            expect(page.box).to_have_value("hello")


def test_wrong_password_is_refused_and_the_right_one_opens_the_page(
    browser: Browser, open_page: Callable[..., ChatPage], chain: LiveServer
) -> None:
    with web_ui(chain.target, "--auth", "ada:s3cret") as url, browser.new_context() as person:
        tab = person.new_page()
        tab.goto(url)
        for password in ("wrong", "s3cret"):
            tab.get_by_label("username").fill("ada")
            tab.get_by_label("password").fill(password)
            tab.get_by_role("button", name="Login").click()
            if password == "wrong":
                expect(tab.get_by_text("Incorrect")).to_be_visible()
        expect(tab.locator("#limpet-box textarea")).to_be_visible()
        assert open_page(url, person).ask("hello") == script("hello").text


def test_model_without_chat_template_is_said(no_template_repository: Path, open_page: Callable[..., ChatPage]) -> None:
    with live_server(no_template_repository) as server:
        server.wait_ready()
        with web_ui(server.target) as url:
            page = open_page(url)
            page.send("hello")
            expect(page.notice).to_contain_text("no chat template")
            expect(page.box).to_have_value("hello")
            page.page.close()


def test_page_works_under_a_path_of_a_proxy(chain: LiveServer, open_page: Callable[..., ChatPage]) -> None:
    with web_ui(chain.target, "--root-path=/chat") as url, path_proxy(url, "/chat") as outside:
        page = open_page(outside)
        assert page.ask("hello") == script("hello").text
        page.open()
        page.until(lambda: page.answers() == [script("hello").text])
        page.page.close()
        # Two things that it does not need it looks for at the address without the path.
        page.problems = [each for each in page.problems if not each.endswith(("/manifest.json", "/favicon.ico"))]
