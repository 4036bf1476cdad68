"""Bearer keys of the endpoint."""

import hmac
from collections.abc import Sequence

from starlette.requests import Request

from limpet.client.api.problems import Problem


class BearerKeys:
    """A dependency of FastAPI: lets a request in that carries one of the keys, or any if there are none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __call__(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # the bytes as they were sent
        # All are compared, in constant time: how long it takes tells nothing.
        if self._keys and not sum(hmac.compare_digest(given, each) for each in self._keys):
            raise Problem("The request needs a valid key: Authorization: Bearer KEY.", 401, code="invalid_api_key")
