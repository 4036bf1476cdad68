"""schemathesis over limpet-api's OpenAPI document: neither a hang nor a server error."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from limpet.benchmarks.child_command import endpoint
from tests.aids.live_server import shared_server

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(600)]
# Any request may ask for all of a session: a short one ends within REQUEST_S on a busy machine too.
SESSION_LEN = 256
REQUEST_S = 60


@pytest.fixture(scope="module")
def url(chain_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    copy = tmp_path_factory.mktemp("short") / "repository"
    shutil.copytree(chain_repository, copy)
    config = copy / "chain" / "config.pbtxt"
    before = 'key: "session_len" value { string_value: "" }'
    text = config.read_text("utf-8")
    assert text.count(before) == 1, text
    config.write_text(text.replace(before, before.replace('""', f'"{SESSION_LEN}"')), "utf-8")
    for server in shared_server(copy):
        with endpoint(server.target) as url:
            yield url


def test_no_hang_and_no_server_error(url: str, run: Callable[..., str]) -> None:
    """503 counts as an error: a server that is up has no reason for it."""
    run(
        *("schemathesis", "schemathesis", "run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "examples,coverage,fuzzing", "--max-time", "90", "--workers", "1"),
        *("--request-timeout", str(REQUEST_S)),
    )
