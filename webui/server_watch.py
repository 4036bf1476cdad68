"""What the page knows of the server: is it there, is it busy, which models does it have."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from limpet.client import AsyncClient, LimpetError

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Sight:
    """One look at the server; `state` is connected, busy or away."""

    state: str = "away"
    reason: str = ""
    models: tuple[str, ...] = ()


class ServerWatch:
    """Looks at the server once for all tabs that ask."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._sight = Sight()
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> Sight:
        """The latest sight, a second old or from before the server stopped answering: nobody waits for that long."""
        is_looking = self._looking is not None and not self._looking.done()
        if not is_looking and time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._looking = asyncio.create_task(self._update())
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=_PATIENCE_S)
        return self._sight

    async def _update(self) -> None:
        self._sight = await self._see()

    async def _see(self) -> Sight:
        known = self._sight.models
        try:
            status = await self._client.status()
            if not status.get("ready"):
                return Sight("away", str(status.get("reason", "")), known)
            # The list changes only with a restart, and that is seen as "away" first.
            models = known if known and self._sight.state != "away" else tuple(await self._client.models())
        except LimpetError as error:
            return Sight("away", str(error), known)
        return Sight("busy" if _is_busy(status) else "connected", "", models)


def _is_busy(status: dict[str, Any]) -> bool:
    return any(engine.get("waiting", 0) > 0 for engine in status.get("models", {}).values())
