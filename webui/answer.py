"""An answer on its way, independent of the page that watches it."""

import asyncio
import contextlib
from collections.abc import Callable

from limpet.client import AsyncSession, AsyncStream, Cancelled, Generation, LimpetError, Options

_STOP_WAIT_S = 0.8  # the server stops within a step; after this the stream is dropped


class Answer:
    """Reads one turn's stream to its end in a task of its own, and then calls `settle` with itself.

    `result` and `error` tell how it ended; `left_out` is set by `settle`: the conversation is without the question.
    """

    def __init__(
        self, session: AsyncSession, question: str, options: Options, settle: Callable[["Answer"], None]
    ) -> None:
        self.question = question
        self.result: Generation | None = None
        self.error: LimpetError | None = None
        self.left_out = False
        self._session = session
        self._settle = settle
        self._stream: AsyncStream | None = None
        self._task = asyncio.create_task(self._read(options))

    async def stop(self) -> None:
        """End the answer, on the server too; returns once it has ended."""
        with contextlib.suppress(LimpetError):
            await self._session.cancel()
            await asyncio.wait([self._task], timeout=_STOP_WAIT_S)
        if self._stream is not None:
            self._stream.close()
        else:
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self, options: Options) -> None:
        try:
            # As a message, not as text: a model without a chat template then refuses instead of rambling on.
            message = {"role": "user", "content": self.question}
            self._stream = await self._session.ask([message], stream=True, **options)
            await self._stream.read()
        except Cancelled:
            pass  # by stop
        except LimpetError as error:
            self.error = error
        finally:
            self.result = self._stream.result if self._stream is not None else None
            self._settle(self)
