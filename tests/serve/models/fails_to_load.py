"""A model that refuses to load."""

from typing import Any


class TritonPythonModel:
    def initialize(self, args: dict[str, Any]) -> None:
        raise ValueError("its weights are missing")

    def execute(self, requests: list[Any]) -> list[Any]:
        return []
