"""The two clients stay alike."""

import inspect

import pytest

from limpet.client import AsyncClient, AsyncSession, AsyncStream, Client, Session, Stream


def surface(kind: type) -> dict[str, list[str]]:
    """Public methods with the names of their parameters; properties have none."""
    return {
        name: list(inspect.signature(member).parameters) if callable(member) else []
        for name, member in vars(kind).items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("blocking", "asynchronous"), [(Client, AsyncClient), (Session, AsyncSession), (Stream, AsyncStream)]
)
def test_the_asyncio_class_has_the_same_methods(blocking: type, asynchronous: type) -> None:
    ours, theirs = surface(blocking), surface(asynchronous)
    if blocking is Client:
        assert (ours.pop("model"), theirs.pop("model")) == ([], ["self"])  # finding it asks the server
    assert ours == theirs
