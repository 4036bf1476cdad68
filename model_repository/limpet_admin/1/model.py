"""Administration of all Limpet models of this repository."""

from limpet.backend.front_end.admin import TritonPythonModel

__all__ = ["TritonPythonModel"]
