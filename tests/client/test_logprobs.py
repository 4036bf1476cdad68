"""Logprobs as the client hands them on: as the server wrote them, absent where it wrote none."""

import json
import struct
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from limpet.client.wire import read_chunk

ENTRY = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}


def response(**outputs: Any) -> pb.ModelStreamInferResponse:
    """Outputs of one JSON string each."""
    made = pb.ModelStreamInferResponse()
    for name, value in outputs.items():
        encoded = json.dumps(value).encode()
        made.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        made.infer_response.raw_output_contents.append(struct.pack("<I", len(encoded)) + encoded)
    return made


def test_logprobs_are_objects_by_token() -> None:
    chunk = read_chunk(response(logprobs=[ENTRY, ENTRY], prompt_logprobs=[None, ENTRY]))
    assert chunk.logprobs == (ENTRY, ENTRY)
    assert chunk.prompt_logprobs == (None, ENTRY)


def test_an_answer_without_logprobs_has_none() -> None:
    chunk = read_chunk(response(text_output="a"))
    assert (chunk.logprobs, chunk.prompt_logprobs) == ((), ())
