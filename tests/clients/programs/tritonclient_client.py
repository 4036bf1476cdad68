"""Plain tritonclient as vLLM's and TensorRT-LLM's examples use it: python … GRPC_ADDRESS HTTP_ADDRESS PROMPT."""

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http

GRPC, HTTP, PROMPT = sys.argv[1:]
SAMPLING = {"temperature": "0", "max_tokens": "12"}  # strings, as vLLM's example has them


def tensor(module: Any, name: str, datatype: str, value: Any) -> Any:
    made = module.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value)
    return made


def strings(*shape: int, text: str) -> Any:
    return np.full(shape, text.encode(), dtype=np.object_)


def vllm_inputs(stream: bool) -> list[Any]:
    return [
        tensor(grpc, "text_input", "BYTES", strings(1, text=PROMPT)),
        tensor(grpc, "stream", "BOOL", np.array([stream])),
        tensor(grpc, "sampling_parameters", "BYTES", strings(1, text=json.dumps(SAMPLING))),
        tensor(grpc, "exclude_input_in_output", "BOOL", np.array([True])),
    ]


def text_of(result: Any) -> str:
    texts: list[bytes] = result.as_numpy("text_output").reshape(-1).tolist()
    return b"".join(texts).decode()


async def vllm() -> list[str]:
    """vLLM's example: the asyncio client, one stream, the sampling parameters as parameters too."""

    async def requests() -> Any:
        yield {
            "model_name": "smollm2",
            "inputs": vllm_inputs(stream=True),
            "outputs": [grpc.InferRequestedOutput("text_output")],
            "request_id": "1",
            "parameters": SAMPLING,
        }

    texts = []
    async with grpc_aio.InferenceServerClient(GRPC) as client:
        async for result, error in client.stream_infer(inputs_iterator=requests()):
            if error:
                raise error
            texts.append(text_of(result))
    return texts


def tensorrt_llm(model: str, counts: str) -> str:
    """TensorRT-LLM's example: the blocking client, every tensor [1, 1]."""
    results: queue.Queue[Any] = queue.Queue()
    count_type = np.uint32 if counts == "UINT32" else np.int32
    with grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        inputs = [
            tensor(grpc, "text_input", "BYTES", strings(1, 1, text=PROMPT)),
            tensor(grpc, "max_tokens", counts, np.array([[12]], dtype=count_type)),
            tensor(grpc, "top_k", counts, np.array([[1]], dtype=count_type)),
            tensor(grpc, "bad_words", "BYTES", strings(1, 1, text="")),
            tensor(grpc, "stop_words", "BYTES", strings(1, 1, text="")),
            tensor(grpc, "stream", "BOOL", np.array([[True]])),
        ]
        client.async_stream_infer(model, inputs, request_id="2", enable_empty_final_response=True)
        texts = []
        while True:
            result = results.get(timeout=60)
            texts.append(text_of(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return "".join(texts)


def infer_over_http() -> str:
    with http.InferenceServerClient(HTTP) as client:
        inputs = [
            tensor(http, "text_input", "BYTES", strings(1, text=PROMPT)),
            tensor(http, "max_tokens", "INT32", np.array([12], dtype=np.int32)),
            tensor(http, "temperature", "FP32", np.array([0], dtype=np.float32)),
        ]
        return text_of(client.infer("smollm2_infer", inputs))


print(
    json.dumps(
        {
            "vllm": asyncio.run(vllm()),
            "ensemble": tensorrt_llm("ensemble", "INT32"),
            "ensemble_u32": tensorrt_llm("ensemble_u32", "UINT32"),
            "infer": infer_over_http(),
        }
    )
)
