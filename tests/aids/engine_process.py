"""An engine process without tritonserver: a sleeping process stands for the server that it watches."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from limpet.backend.link.ownership import EngineRuntime
from tests.aids.fake_front_end import FakeFrontEnd

END_S = 60.0


@dataclass(frozen=True)
class EngineUnderTest:
    """A running engine, the process that it takes for tritonserver, and where front ends find it."""

    process: "subprocess.Popen[bytes]"
    server: "subprocess.Popen[bytes]"
    runtime: EngineRuntime

    def connect(self) -> FakeFrontEnd:
        """A front end; returns once the engine has loaded its model and answers."""
        return FakeFrontEnd(self.runtime.address)

    def wait_end(self) -> int:
        return self.process.wait(END_S)


@contextmanager
def engine_process(model_dir: Path, parameters: Mapping[str, str]) -> Iterator[EngineUnderTest]:
    """Start an engine with these parameters of config.pbtxt; it is gone at the end, whatever the test did to it."""
    with tempfile.TemporaryDirectory(prefix="lt-", dir="/tmp") as folder:  # short: a Unix socket lies in it
        server = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        runtime = EngineRuntime(Path(folder) / "engine")
        process = runtime.spawn(model_dir, server.pid, parameters)
        try:
            yield EngineUnderTest(process, server, runtime)
        finally:
            for each in (process, server):
                each.kill()
                each.wait(END_S)
            assert server.stdin is not None
            server.stdin.close()
