import re
import socket
from importlib import metadata
from pathlib import Path

import pytest

from limpet.backend.serve import preflight
from limpet.backend.serve.errors import RefusedError
from limpet.backend.serve.options import Options, parse_options
from limpet.backend.serve.repository import admin_keys


def _options(repository: Path, *flags: str) -> Options:
    off = ["--allow-http=false", "--allow-metrics=false", "--grpc-port=39999"]
    return parse_options([f"--model-repository={repository}", *off, *flags])


def _repository(folder: Path) -> Path:
    (folder / "limpet_admin").mkdir()
    return folder


def test_fitting_machine_and_repository_pass(tmp_path: Path) -> None:
    preflight.check(_options(_repository(tmp_path)))


@pytest.mark.parametrize("version", ["2.0.0", "2.4.6", "3.0.0rc1"])
def test_numpy_2_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    with pytest.raises(RefusedError, match=re.escape(f"numpy {version} is installed, but Triton's Python backend")):
        preflight.check(_options(_repository(tmp_path)))


def test_missing_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"no model repository .*nowhere"):
        preflight.check(_options(tmp_path / "nowhere"))


def test_repository_that_was_not_converted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no model limpet_admin"):
        preflight.check(_options(tmp_path))


def test_port_in_use_is_refused_with_the_flag_that_changes_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RefusedError, match=rf"Port {port} on 127\.0\.0\.1 .* for grpc .*in use.* --grpc-port"):
            preflight.check(_options(_repository(tmp_path), f"--grpc-port={port}"))


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"on 192\.0\.2\.1 cannot be used"):
        preflight.check(_options(_repository(tmp_path), "--address=192.0.2.1"))


def _add_converted_model(repository: Path, name: str, config: str) -> None:
    (repository / name / "1" / "checkpoint").mkdir(parents=True)
    (repository / name / "1" / "checkpoint" / "manifest.json").touch()
    (repository / name / "config.pbtxt").write_text(config)


def test_admin_keys_are_read_from_every_converted_model(tmp_path: Path) -> None:
    _add_converted_model(_repository(tmp_path), "open", 'name: "open" backend: "python"')
    parameter = r'parameters { key: "admin_key" value { string_value: "s\"3" } }'
    _add_converted_model(tmp_path, "locked", f"# with a comment\nmax_batch_size: 0\n{parameter}")
    assert admin_keys([tmp_path]) == {"locked": 's"3', "open": ""}


def test_damaged_configuration_is_refused(tmp_path: Path) -> None:
    _add_converted_model(_repository(tmp_path), "broken", "parameters {")
    with pytest.raises(RefusedError, match=r"broken/config\.pbtxt is no configuration of a Triton model"):
        admin_keys([tmp_path])
