"""A request of Triton's Python backend as plain values, so that nothing of it is held after `execute`."""

import json
from typing import Any

from limpet.backend.front_end.request import RawRequest


def read_triton_request(request: Any) -> RawRequest:
    """Copy inputs (flattened to lists), parameters and sequence fields out of a pb_utils.InferenceRequest."""
    return RawRequest(
        request_id=request.request_id(),
        tensors={tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()},
        parameters=json.loads(request.parameters() or "{}"),
        correlation_id=request.correlation_id(),
        flags=request.flags(),
    )
