"""transformers' `generate` in float32 on a GGUF file: sdpa attention, its cache on, one request after the other."""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from limpet.benchmarks.timing import Answer, Run
from limpet.benchmarks.workload import Request


class TransformersRunner:
    """The model on `threads` threads; end ids and sampling defaults of the checkpoint are dropped."""

    def __init__(self, gguf: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.generation_config = GenerationConfig()

    def run(self, requests: list[Request], concurrency: int) -> Run:
        if concurrency != 1:
            raise ValueError("transformers answers one request at a time here.")
        started = time.monotonic()
        answers = [self._answer(request) for request in requests]
        return Run(answers, time.monotonic() - started)

    def _answer(self, request: Request) -> Answer:
        sent_s = time.monotonic()
        config = GenerationConfig(do_sample=False, use_cache=True, max_new_tokens=request.num_output_tokens)
        ids = self._model.generate(torch.tensor([request.prompt]), generation_config=config)[0].tolist()
        arrivals = [(time.monotonic(), len(ids) - len(request.prompt))]
        return Answer(sent_s, arrivals, len(request.prompt), last_id=ids[-1])
