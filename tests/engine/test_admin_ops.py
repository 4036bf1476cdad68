"""Operations that fail inside the engine."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from limpet.backend.admin_ops import AdminOps
from limpet.backend.config import EngineConfig
from limpet.backend.core import RequestError


def test_an_operation_that_fails_is_refused_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    operations = AdminOps(cast(Any, SimpleNamespace()), EngineConfig(), cast(Any, None))
    with pytest.raises(RequestError, match="log says why") as refused:
        operations.run("sessions", "{}")
    assert refused.value.code == "INTERNAL"
    assert "AttributeError" in caplog.text
