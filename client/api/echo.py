"""The prompt before its answer (`echo`), with its tokens' logprobs: what loglikelihoods are read from."""

from collections.abc import Sequence
from dataclasses import dataclass

from limpet.client.aio_client import AsyncClient
from limpet.client.api.logprobs import CompletionLogprobs
from limpet.client.results import TokenLogprobs


@dataclass(frozen=True)
class Echo:
    """A prompt's text; `first_token` is its first token's, which may be a mark that the text does not show."""

    text: str
    first_token: str

    def add_logprobs(self, logprobs: CompletionLogprobs, tokens: Sequence[TokenLogprobs | None]) -> None:
        """The prompt's tokens, the first of which has no logprob."""
        for token in tokens:
            if token is None:
                logprobs.add_first(self.first_token)
            else:
                logprobs.add(token)


async def echo_of(client: AsyncClient, prompt: str | list[int], logprobs: int | None) -> Echo:
    """The server's tokenizer says what is missing; without logprobs nothing is asked about a prompt's text."""
    if isinstance(prompt, str):
        text = prompt
        ids = await client.tokenize(prompt) if logprobs is not None else []
    else:
        text = await client.detokenize(prompt)
        ids = prompt
    return Echo(text, await client.detokenize(ids[:1]) if logprobs is not None else "")
