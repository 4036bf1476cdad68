"""A model whose load never ends; it opens a file `started` beside it when it begins."""

import threading
from pathlib import Path
from typing import Any


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        Path(__file__).with_name("started").open("w").close()
        threading.Event().wait()

    def execute(self, requests: list[Any]) -> list[Any]:
        return []
