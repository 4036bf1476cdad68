"""The operation `sessions` of limpet_admin: list, show, fork, end."""

import itertools
import secrets
import time
from collections.abc import Callable
from typing import Any

from limpet.backend.core import RequestError
from limpet.backend.service import EngineService
from limpet.backend.sessions import Session

_DEFAULT_LIMIT = 1000  # sessions of one list: the step loop waits for it


class SessionOps:
    """Raises RequestError for an unknown action or session."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "list": self._list,
            "show": self._show,
            "fork": self._fork,
            "end": self._end,
        }

    def run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        name = arguments.get("action", "list")
        action = self._actions.get(name) if isinstance(name, str) else None
        if action is None:
            raise RequestError("INVALID_ARG", f"Unknown action {name!r}; known are {', '.join(self._actions)}.")
        return action(arguments)

    def _list(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The most recently used ones, in the order of their last use."""
        limit = arguments.get("limit", _DEFAULT_LIMIT)
        if not isinstance(limit, int) or limit < 1:
            raise RequestError("INVALID_ARG", f"limit is {limit!r}; allowed: a number from 1.")
        table = self._service.sessions.sessions
        latest = list(itertools.islice(reversed(table.values()), min(limit, len(table))))
        return {"sessions": [self._describe(session) for session in reversed(latest)], "total": len(table)}

    def _show(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"session": self._describe(self._service.sessions.find(_id(arguments)))}

    def _fork(self, arguments: dict[str, Any]) -> dict[str, Any]:
        new_id = str(arguments.get("new_session_id") or secrets.token_hex(16))
        return {"session": self._describe(self._service.fork_session(_id(arguments), new_id))}

    def _end(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"ended": self._service.end_session(_id(arguments))}

    def _describe(self, session: Session) -> dict[str, Any]:
        num_tokens = len(session.history.tokens)
        # The last token of a history has no keys and values yet.
        num_needed = self._service.engine.cache.pool.blocks_for(max(num_tokens - 1, 0))
        on_device, on_host = self._service.count_blocks(session)
        return {
            "session_id": session.id,
            "tokens": num_tokens,
            "turns": len(session.history.turns),
            "running": session.lease is not None,
            "idle_s": round(time.monotonic() - session.last_used, 3) if session.lease is None else 0.0,
            "blocks": {"device": on_device, "host": on_host, "none": max(num_needed - on_device - on_host, 0)},
        }


def _id(arguments: dict[str, Any]) -> str:
    return str(arguments.get("session_id", ""))
