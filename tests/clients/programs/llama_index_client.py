"""llama-index's Triton connector: python llama_index_client.py GRPC_ADDRESS PROMPT."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.nvidia_triton import NvidiaTriton

ADDRESS, PROMPT = sys.argv[1:]
llm = NvidiaTriton(server_url=ADDRESS, tokens=12)
early = NvidiaTriton(server_url=ADDRESS, tokens=400)
print(
    json.dumps(
        {
            "complete": llm.complete(PROMPT).text,
            "stream": [chunk.delta for chunk in llm.stream_complete(PROMPT)],
            "chat": llm.chat([ChatMessage(role="user", content=PROMPT)]).message.content,
            "ends_early": early.complete("<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n").text,
        }
    )
)
