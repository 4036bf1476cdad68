from pathlib import Path

import pytest

from limpet.backend.serve.options import Endpoint, parse_options

REPOSITORY = "--model-repository=repo"


def test_tritonserver_flags_pass_through_in_order_and_come_last() -> None:
    options = parse_options([REPOSITORY, "--log-verbose", "1", "--grpc-port=9001", "--trace-config=level=OFF"])
    assert options.tritonserver_flags() == [
        "--model-repository=repo",
        "--grpc-address=127.0.0.1",
        "--grpc-port=9001",
        "--http-address=127.0.0.1",
        "--http-port=8000",
        "--metrics-address=127.0.0.1",
        "--metrics-port=8002",
        "--log-verbose",
        "1",
        "--trace-config=level=OFF",
    ]


def test_several_repositories_under_both_of_tritons_names() -> None:
    options = parse_options([REPOSITORY, "--model-store", "other"])
    assert options.model_repositories == (Path("repo"), Path("other"))


def test_address_is_for_all_protocols_and_tritons_own_flag_wins_for_one() -> None:
    options = parse_options([REPOSITORY, "--address=0.0.0.0", "--http-address=127.0.0.1"])
    assert [endpoint.address for endpoint in options.endpoints] == ["0.0.0.0", "127.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("off", ["--allow-http=false", "--allow-http=0", "--allow-http=False"])
def test_protocol_switched_off_is_no_endpoint(off: str) -> None:
    options = parse_options([REPOSITORY, off])
    assert options.http is None
    assert options.metrics is not None
    assert off in options.tritonserver_flags()


@pytest.mark.parametrize(
    ("address", "target"), [("0.0.0.0", "127.0.0.1:8001"), ("::", "[::1]:8001"), ("10.0.0.5", "10.0.0.5:8001")]
)
def test_target_is_an_address_to_connect_to(address: str, target: str) -> None:
    assert Endpoint("grpc", address, 8001).target == target


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model-repository"),
        ([REPOSITORY, "workspace"], "unexpected argument 'workspace'"),
        ([REPOSITORY, "--log-verbose=1", "workspace"], "unexpected argument 'workspace'"),
        ([REPOSITORY, "--grpc-port=70000"], "1 to 65535"),
        ([REPOSITORY, "--grpc-port=8000"], "must differ"),
        ([REPOSITORY, "--ready-deadline=-1"], "0 or more"),
        ([REPOSITORY, "--ready-deadline=nan"], "0 or more"),
        ([REPOSITORY, "--allow-grpc=false"], "plain gRPC"),
        ([REPOSITORY, "--grpc-use-ssl=true"], "plain gRPC"),
    ],
)
def test_wrong_command_line_is_refused_with_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    assert "exit codes: 0" in capsys.readouterr().out
