"""Messages as OpenAI's clients write them, and as the wire contract does."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from limpet.client.api.problems import Problem

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str = "{}"  # JSON


class ToolCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """Answers are sent back as they came, so keys that an answer may have are no mistakes."""

    model_config = ConfigDict(extra="ignore")

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=128)] = None
    tool_call_id: str | None = None

    def on_the_wire(self) -> dict[str, Any]:
        """Text parts joined; arguments of calls as the objects that chat templates expect."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self._text()}
        if self.tool_calls:
            message["tool_calls"] = [_call_on_the_wire(call) for call in self.tool_calls]
        for key in ("name", "tool_call_id"):
            if (value := getattr(self, key)) is not None and self.role == "tool":
                message[key] = value
        return message

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


def _call_on_the_wire(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        name = call.function.name
        raise Problem(f"The arguments of the call of {name} are no valid JSON: {error}.", param="messages") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
