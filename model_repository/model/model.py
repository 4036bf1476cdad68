"""The front end of a Limpet model; the engine is a process of its own."""

from limpet.backend.front_end.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
