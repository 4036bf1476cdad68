"""A limpet_admin without an engine: ready at once, busy as long as a file `busy` lies beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        requests_running = int(Path(__file__).with_name("busy").exists())
        answer = np.array([json.dumps({"ready": True, "requests": requests_running})], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("response", answer)]) for _ in requests]
