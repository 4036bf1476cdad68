"""LiteLLM against /generate, /generate_stream and /infer: python litellm_client.py HTTP_URL PROMPT."""

import json
import sys
from typing import Any

import litellm

URL, PROMPT = sys.argv[1:]
MODEL = f"{URL}/v2/models/smollm2"


def ask(api_base: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": PROMPT}]
    return litellm.completion(model="triton/smollm2", api_base=api_base, messages=messages, **options)


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def refusal(**options: Any) -> str:
    try:
        ask(f"{MODEL}/generate", **options)
    except litellm.BadRequestError as error:
        return str(error)
    return ""


stream = ask(f"{MODEL}/generate", max_tokens=12, top_k=1, stream=True)
print(
    json.dumps(
        {
            "generate": text_of(ask(f"{MODEL}/generate", max_tokens=12, top_k=1)),
            "max_completion_tokens": text_of(ask(f"{MODEL}/generate", max_completion_tokens=3, top_k=1)),
            "stream": [chunk.choices[0].delta.content for chunk in stream],
            "infer": text_of(ask(f"{URL}/v2/models/smollm2_infer/infer", max_tokens=12, top_k=1)),
            "refusal": refusal(temprature=0.5),
        }
    )
)
