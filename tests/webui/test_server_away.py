"""The page when the server is not there, was restarted, or refuses."""

import socket
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.aids.chain import script
from tests.aids.live_server import LiveServer, kill, live_server
from tests.client.fake_server import error, fake_server
from tests.client.session_server import SessionServer
from tests.webui.chat_page import ChatPage, web_ui


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
    with web_ui(chain.target, f"--port={port}"):
        page.send("emoji")
        page.until(lambda: page.answers() == [script("hello").text, script("emoji").text])
    page.problems.clear()  # requests while nobody listened


def test_wrong_address_is_said(open_page: Callable[..., ChatPage]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with web_ui(f"127.0.0.1:{nobody.getsockname()[1]}") as url:
            page = open_page(url)
            expect(page.badge).to_have_text("server away")
            page.send("hello")
            expect(page.notice).to_contain_text("No connection")
            expect(page.box).to_have_value("hello")


def test_busy_server_and_several_models(open_page: Callable[..., ChatPage]) -> None:
    kept = SessionServer()
    with fake_server() as server, web_ui(server.target) as url:
        server.models = {"one": 0, "two": 0}
        server.answer = kept.answer
        server.admin = lambda operation: {"ready": True, "models": {"one": {"waiting": 3}}}
        page = open_page(url)
        expect(page.badge).to_have_text("busy")
        page.page.get_by_label("Model").click()
        page.page.get_by_role("option", name="two").click()
        page.ask("hi")
        assert server.asked[-1].model == "two"
        page.open()
        expect(page.page.get_by_label("Model")).to_have_value("two")


def test_refused_regeneration_brings_the_old_answer_back(open_page: Callable[..., ChatPage]) -> None:
    kept = SessionServer()
    with fake_server() as server, web_ui(server.target) as url:
        server.answer = kept.answer
        page = open_page(url)
        page.ask("a")
        server.answer = lambda asked: iter([error("[UNAVAILABLE] The queue is full.")])
        page.page.get_by_label("Retry").last.click()
        expect(page.notice).to_have_text("The queue is full.")
        assert page.answers() == ["<a>"]
        server.answer = kept.answer
        page.send("b")
        page.until(lambda: page.answers() == ["<a>", "<b>"])


def test_sampling_system_prompt_and_seed_reach_the_server_and_are_remembered(
    open_page: Callable[..., ChatPage],
) -> None:
    kept = SessionServer()
    with fake_server() as server, web_ui(server.target) as url:
        server.answer = kept.answer
        page = open_page(url)
        page.ask("plain")
        assert server.asked[-1].options == {}
        _set_everything(page)
        page.ask("tuned")
        assert server.asked[-1].options == {
            "temperature": 0.3, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1, "seed": 7,
        }  # fmt: skip
        assert server.asked[-1].messages[0] == {"role": "system", "content": "Be brief."}
        page.open()
        page.until(lambda: len(page.answers()) == 2)
        page.ask("again")
        assert server.asked[-1].options["temperature"] == 0.3
        assert "sequence_start" not in server.asked[-1].parameters or not server.asked[-1].parameters["sequence_start"]


def test_a_seed_that_is_no_number_is_said(open_page: Callable[..., ChatPage]) -> None:
    with fake_server() as server, web_ui(server.target) as url:
        page = open_page(url)
        page.page.get_by_role("button", name="Sampling").click()
        page.page.get_by_label("Seed").fill("x")
        page.send("hi")
        expect(page.notice).to_contain_text("seed is 'x'")
        expect(page.box).to_have_value("hi")


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


def _set_everything(page: ChatPage) -> None:
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.page.get_by_role("button", name="Sampling").click()
    page.page.get_by_label("Set it here").check()
    page.page.get_by_label("number input for Temperature").fill("0.3")
    page.page.get_by_label("number input for Temperature").blur()
    page.page.get_by_label("Seed").fill("7")
