"""The tools of a chat: what the template is given, and the form of an answer that has to be a call."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MAX_TOOLS = 128


class ToolFunction(BaseModel):
    """`parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: ToolFunction

    def on_the_wire(self) -> dict[str, Any]:
        """As chat templates expect a tool."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    """The one tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def call_format(tools: list[Tool]) -> dict[str, Any]:
    """The response_format of a call of one of the tools."""
    calls = [_call_schema(tool.function) for tool in tools]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}


def _call_schema(function: ToolFunction) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
