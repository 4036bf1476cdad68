"""Serve a converted model with its chat page, chat two turns with it, and leave both running (--oneshot: stop them).

python docs/examples/demo.py WORKSPACE [--oneshot | --no-chat]
"""

import argparse
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limpet.client import Client, Generation, Session

BIN = Path(sys.executable).parent
PORTS = {"grpc": 33337, "http": 8000, "metrics": 8002, "page": 6006}
QUESTIONS = ("What is the capital of France?", "And what is it famous for? One sentence.")
STOP_S = 60.0


def main() -> int:
    """Returns the exit code: 0, or limpet-serve's if the server fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--oneshot", action="store_true", help="stop the server after the chat")
    parser.add_argument("--no-chat", action="store_true", help="only serve")
    arguments = parser.parse_args()
    if not (arguments.workspace / "model_repository").is_dir():
        parser.error(f"{arguments.workspace} holds no model_repository: limpet-convert makes one")
    # make and supervisors end the demo by SIGTERM: leave the way Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ports = {name: _free_port(preferred) for name, preferred in PORTS.items()}
    with _server(arguments.workspace, ports) as server:
        try:
            if not _wait_ready(server):
                return server.wait()
            address = f"127.0.0.1:{ports['grpc']}"
            with _page(address, ports["page"]):
                if not arguments.no_chat:
                    _chat(address)
                if not arguments.oneshot:
                    print("\nServer and page stay up until Ctrl-C. In a browser, or in another terminal:")
                    print(f"    http://127.0.0.1:{ports['page']}\n    {BIN / 'limpet-chat'} {address} --temperature 0")
                    return server.wait()
        except KeyboardInterrupt:
            print()
    return server.returncode


@contextmanager
def _server(workspace: Path, ports: dict[str, int]) -> Iterator["subprocess.Popen[str]"]:
    """limpet-serve, its log in the workspace; stopped in the end."""
    flags = [f"--{name}-port={ports[name]}" for name in ("grpc", "http", "metrics")]
    log = workspace / "server.log"
    print(f"Starting the server (its log: {log})", flush=True)
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [BIN / "limpet-serve", f"--model-repository={workspace / 'model_repository'}", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as server,
    ):
        try:
            yield server
        finally:
            server.terminate()
            server.wait(STOP_S)


@contextmanager
def _page(address: str, port: int) -> Iterator[None]:
    """limpet-webui, once it answers; stopped in the end."""
    command = [BIN / "limpet-webui", address, f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        try:
            print(page.stdout.readline(), end="", flush=True)
            yield
        finally:
            page.terminate()
            page.wait(STOP_S)


def _wait_ready(server: "subprocess.Popen[str]") -> bool:
    """Show what limpet-serve prints once it is ready; False if it ended instead."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="")
        if line.strip().startswith("stop"):
            return True
    print("The server did not start; its log says why.", file=sys.stderr)
    return False


def _chat(address: str) -> None:
    with Client(address) as client, client.session() as session:
        for question in QUESTIONS:
            print(f"\n> {question}")
            _report(_show_answer(session, question))


def _show_answer(session: Session, question: str) -> Generation:
    with session.ask(question, stream=True, temperature=0.0, max_tokens=80) as answer:
        for chunk in answer:
            print(chunk.text, end="", flush=True)
    return answer.result


def _report(answer: Generation) -> None:
    ttft_ms = 1000 * (answer.ttft_s or 0.0)
    print(
        f"\n  [first token after {ttft_ms:.0f} ms; {answer.num_output_tokens} tokens, "
        f"{answer.tokens_per_s or 0.0:.0f} a second; {answer.num_input_tokens} new prompt tokens, "
        f"{answer.num_cached_tokens} cached]"
    )


def _free_port(preferred: int) -> int:
    """That port if nobody listens there, else another one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
