"""Answers to /v1/chat/completions, whole and as events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from limpet.client.api.answers import Envelope, StreamCounts, Usage, finish_reason, session_turn
from limpet.client.api.gateway import Gateway, Question
from limpet.client.api.logprobs import chat_logprobs
from limpet.client.api.request_models import ChatBody
from limpet.client.api.tool_calls import Call, ToolCallParser
from limpet.client.results import Chunk, TokenLogprobs


class ChatReply:
    """The assistant's message while it comes: text and calls are told apart."""

    def __init__(self, body: ChatBody) -> None:
        tools = {tool.function.name for tool in body.offered_tools()}
        self._parser = ToolCallParser(tools) if tools else None
        self.num_calls = 0
        self.finish_reason: str | None = None
        self.usage = Usage()

    def take(self, chunk: Chunk) -> tuple[str, list[Call]]:
        """What the chunk adds to the message."""
        self.usage.add(chunk)
        text, calls = (chunk.text, []) if self._parser is None else self._parser.feed(chunk.text)
        if chunk.finish_reason is not None and self._parser is not None:
            rest, last_calls = self._parser.finish()
            text, calls = text + rest, calls + last_calls
        self.num_calls += len(calls)
        reason = finish_reason(chunk)
        self.finish_reason = "tool_calls" if reason == "stop" and self.num_calls else reason
        return text, calls


async def answer_chat(gateway: Gateway, body: ChatBody) -> dict[str, Any]:
    """The whole answer."""
    question = await _question(gateway, body)
    reply = ChatReply(body)
    text = ""
    calls: list[Call] = []
    logprobs: list[TokenLogprobs] = []
    ids: list[int] = []
    async with aclosing(gateway.answer(question)) as chunks:
        async for chunk in chunks:
            more, new_calls = reply.take(chunk)
            text += more
            calls += new_calls
            logprobs += chunk.logprobs
            ids += chunk.output_ids
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text.strip() or None, "tool_calls": [call.body() for call in calls]}
    choice = {"index": 0, "message": message, **_shared(body, logprobs, ids, reply.finish_reason)}
    envelope = Envelope("chat.completion", question.model, "chatcmpl")
    return envelope.body([choice], usage=reply.usage.body(), **await _prompt_ids(gateway, body, question))


async def stream_chat(gateway: Gateway, body: ChatBody) -> AsyncGenerator[dict[str, Any]]:
    """The answer as events; an event with neither text nor calls is left out, but for the first and the last."""
    question = await _question(gateway, body)
    reply, counts = ChatReply(body), StreamCounts.wanted(body)
    envelope = Envelope("chat.completion.chunk", question.model, "chatcmpl")
    delta: dict[str, Any] = {"role": "assistant", "content": ""}
    head = await _prompt_ids(gateway, body, question)
    logprobs: list[TokenLogprobs] = []
    ids: list[int] = []
    async with aclosing(gateway.answer(question)) as chunks:
        async for chunk in chunks:
            num_calls = reply.num_calls
            text, calls = reply.take(chunk)
            logprobs += chunk.logprobs
            ids += chunk.output_ids
            if not (text or calls or delta or reply.finish_reason):
                continue
            delta |= {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = [call.body(index) for index, call in enumerate(calls, num_calls)]
            choice = {"index": 0, "delta": delta, **_shared(body, logprobs, ids, reply.finish_reason)}
            yield envelope.body([choice], **head, **counts.of_event(reply.usage))
            delta, logprobs, ids, head = {}, [], [], {}
    if counts.at_end:
        yield envelope.body([], usage=reply.usage.body())


def _shared(body: ChatBody, logprobs: list[TokenLogprobs], ids: list[int], reason: str | None) -> dict[str, Any]:
    """What a whole answer's choice and an event's have in common."""
    choice: dict[str, Any] = {
        "logprobs": chat_logprobs(logprobs, body.top_logprobs or 0) if body.logprobs else None,
        "finish_reason": reason,
    }
    return choice | ({"token_ids": ids} if body.return_token_ids else {})


async def _prompt_ids(gateway: Gateway, body: ChatBody, question: Question) -> dict[str, Any]:
    return {"prompt_token_ids": await gateway.prompt_ids(question)} if body.return_token_ids else {}


async def _question(gateway: Gateway, body: ChatBody) -> Question:
    content = {"messages": [message.on_the_wire() for message in body.messages]}
    model = await gateway.model(body.model)
    return Question(model, content, body.options(), body.stream, session_turn(body))
