"""Answers to /v1/completions, whole and as events; several prompts are several choices, answered at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from limpet.client.api.answers import Envelope, StreamCounts, Usage, finish_reason, session_turn
from limpet.client.api.echo import Echo, echo_of
from limpet.client.api.gateway import Gateway, Question
from limpet.client.api.logprobs import CompletionLogprobs
from limpet.client.api.request_models import CompletionBody
from limpet.client.results import Chunk


class Choice:
    """One prompt's answer while it comes."""

    def __init__(self, index: int, body: CompletionBody, echo: Echo | None, prompt_ids: list[int] | None) -> None:
        self._index = index
        self._body = body
        self._echo = echo
        self._prompt_ids = prompt_ids
        self._logprobs = None if body.logprobs is None else CompletionLogprobs()
        self._has_come = False
        self.usage = Usage()

    def take(self, chunk: Chunk) -> dict[str, Any]:
        """What the chunk adds to the choice, as an event has it."""
        text = "" if self._body.is_prompt_only else chunk.text
        ids = () if self._body.is_prompt_only else chunk.output_ids
        is_first, self._has_come = not self._has_come, True
        if self._echo is not None and is_first:
            text = self._echo.text + text
            if self._logprobs is not None:
                self._echo.add_logprobs(self._logprobs, chunk.prompt_logprobs)
        self._count(chunk)
        if self._logprobs is not None and not self._body.is_prompt_only:
            for token in chunk.logprobs:
                self._logprobs.add(token)
        event: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": finish_reason(chunk),
        }
        if self._body.return_token_ids:
            event |= {"token_ids": list(ids)} | ({"prompt_token_ids": self._prompt_ids} if is_first else {})
        return event

    def _count(self, chunk: Chunk) -> None:
        self.usage.add(chunk)
        if self._body.is_prompt_only:
            self.usage.completion = 0


async def answer_completion(gateway: Gateway, body: CompletionBody) -> dict[str, Any]:
    """The whole answer."""
    questions, choices = await _begin(gateway, body)
    wholes: list[dict[str, Any]] = [{}] * len(choices)
    async with aclosing(_chunks(gateway, questions)) as chunks:
        async for index, chunk in chunks:
            wholes[index] = choices[index].take(chunk)  # an answer that is not streamed is one chunk
    return _envelope(questions).body(wholes, usage=_sum(choices))


async def stream_completion(gateway: Gateway, body: CompletionBody) -> AsyncGenerator[dict[str, Any]]:
    """The answer as events, those of several choices as they come."""
    questions, choices = await _begin(gateway, body)
    envelope, counts = _envelope(questions), StreamCounts.wanted(body)
    async with aclosing(_chunks(gateway, questions)) as chunks:
        async for index, chunk in chunks:
            yield envelope.body([choices[index].take(chunk)], **counts.of_event(choices[index].usage))
    if counts.at_end:
        yield envelope.body([], usage=_sum(choices))


async def _begin(gateway: Gateway, body: CompletionBody) -> tuple[list[Question], list[Choice]]:
    model, prompts = await gateway.model(body.model), body.prompts()
    client = gateway.client.for_model(model)
    echoes: list[Echo | None] = [None] * len(prompts)
    if body.echo:
        echoes = list(await asyncio.gather(*(echo_of(client, prompt, body.logprobs) for prompt in prompts)))
    contents = [{"prompt": each} if isinstance(each, str) else {"input_ids": each} for each in prompts]
    turn, options = session_turn(body), body.options()
    raw = {"apply_chat_template": False}
    questions = [Question(model, content | raw, options, body.stream, turn) for content in contents]
    ids: list[list[int] | None] = [None] * len(prompts)
    if body.return_token_ids:
        ids = list(await asyncio.gather(*(gateway.prompt_ids(each) for each in questions)))
    choices = [Choice(index, body, *each) for index, each in enumerate(zip(echoes, ids, strict=True))]
    return questions, choices


async def _chunks(gateway: Gateway, questions: Sequence[Question]) -> AsyncGenerator[tuple[int, Chunk]]:
    """The chunks of all answers as they come, each with its question's index; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

    async def pump(index: int, question: Question) -> None:
        try:
            async with aclosing(gateway.answer(question)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.ensure_future(pump(index, question)) for index, question in enumerate(questions)]
    try:
        num_running = len(tasks)
        while num_running:
            index, chunk = await queue.get()
            if chunk is not None:
                yield index, chunk
            else:
                await tasks[index]  # raises what ended it
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _envelope(questions: Sequence[Question]) -> Envelope:
    return Envelope("text_completion", questions[0].model, "cmpl")


def _sum(choices: Sequence[Choice]) -> dict[str, Any]:
    return sum((choice.usage for choice in choices), Usage()).body()
