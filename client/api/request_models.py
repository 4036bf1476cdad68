"""The bodies of requests. Ranges are the server's business: it says what it allows."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from limpet.client.api.messages import ChatMessage
from limpet.client.api.problems import Problem
from limpet.client.api.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice, call_format
from limpet.client.options import Options

MAX_PROMPTS = 256  # of one request for completions

Stop = str | list[str]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` (vLLM's) puts the counts so far into every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(BaseModel):
    """What chat and raw completions have in common. A name that is not known is refused: it may be a typing error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = Field(None, description="may be left out if the server has only one")
    stream: bool = False
    stream_options: StreamOptions | None = None

    # OpenAI's
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    n: Literal[1] | None = None

    # vLLM's, and the wire contract's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    return_token_ids: bool = Field(False, description="prompt_token_ids and token_ids come with the answer")

    # An interactive session: the server keeps the conversation, a request sends what is new.
    session_id: str | None = Field(None, min_length=1, max_length=128)
    session_start: bool | None = Field(None, description="true: begin anew; false: it must be there already")
    session_end: bool = Field(False, description="free the session after this turn")
    session_rewind: int | None = Field(None, description="first drop so many turns")
    context_overflow: str | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    best_of: Literal[1] | None = None
    length_penalty: float | None = None

    def options(self) -> Options:
        """The options of the answer, under the wire contract's names."""
        return Options(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            response_format=self.response_format,
            structured_outputs=self.structured_outputs,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            cache_salt=self.cache_salt,
            request_priority=self.priority,
            timeout_ms=self.timeout_ms,
            context_overflow=self.context_overflow,
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="accepted without effect")

    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call; raises Problem if the one that it has to call is none of them."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        if self.tool_choice == "required" and not tools:
            raise Problem("tool_choice requires a call, and there are no tools.", param="tool_choice")
        if not isinstance(self.tool_choice, NamedTool):
            return tools
        named = self.tool_choice.function.name
        chosen = [tool for tool in tools if tool.function.name == named]
        if not chosen:
            raise Problem(f"tool_choice names {named!r}, which is none of the tools.", param="tool_choice")
        return chosen

    def options(self) -> Options:
        options = super().options()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise Problem("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if tools := self.offered_tools():
            options["tools"] = [tool.on_the_wire() for tool in tools]
            if self.tool_choice not in (None, "auto"):
                options["response_format"] = call_format(tools)
        return options


class CompletionBody(GenerationBody):
    """POST /v1/completions; several prompts are answered at once."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="the prompt stands before the answer, with logprobs if they are asked for")
    suffix: Literal[""] | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Nothing but the prompt is asked for: one token is generated and thrown away."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Each as text or as token ids; raises Problem."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[each for each in given if isinstance(each, int)]]
        several = [each for each in given if not isinstance(each, int)]
        if not 1 <= len(several) <= MAX_PROMPTS:
            raise Problem(f"There are {len(several)} prompts; allowed: 1 to {MAX_PROMPTS}.", param="prompt")
        if self.session_id is not None and len(several) > 1:
            raise Problem("A session takes one prompt at a time.", param="prompt")
        return several

    def options(self) -> Options:
        options = super().options()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            if self.echo:
                options["prompt_logprobs"] = self.logprobs
        if self.is_prompt_only:
            options["max_tokens"] = 1
        return options


class TokenizeBody(BaseModel):
    """POST /tokenize (vLLM's): either a raw prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize (vLLM's)."""

    model: str | None = None
    tokens: list[TokenId]
