"""docs/clients.md maps every field of vLLM's and TensorRT-LLM's requests, and the code does as it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from limpet.backend.front_end.options import NO_OPS, OPTIONS
from tests.front_end.test_request import read, refusal

ROOT = Path(__file__).parents[2]
# SamplingParams of vLLM with its defaults, and what earlier releases had.
VLLM: dict[str, Any] = {
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0},
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False},
    **{"max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True},
    **{"prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None},
    **{"flat_logprobs": False, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"include_stop_str_in_output": False, "output_kind": None, "stream_interval": 1, "skip_clone": False},
    **{"output_text_buffer_length": 0, "structured_outputs": None, "logit_bias": {}, "allowed_token_ids": None},
    **{"extra_args": {}, "bad_words": [], "skip_reading_prefix_cache": False, "thinking_token_budget": -1},
    **{"repetition_detection": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None},
    **{"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "lora_name": ""},
    **{"guided_decoding": None, "logits_processors": None, "truncate_prompt_tokens": None},
}
VLLM_TENSORS = (
    *("text_input", "stream", "sampling_parameters", "exclude_input_in_output", "image", "embedding_request"),
    *("return_finish_reason", "return_cumulative_logprob", "return_logprobs"),
    *("return_num_input_tokens", "return_num_output_tokens"),
)
VLLM_OUTPUTS = (
    *("text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"),
)
TENSORRT_LLM = (
    *("text_input", "decoder_text_input", "image_input", "image_bytes_input", "image_url_input", "video_bytes_input"),
    *("max_tokens", "bad_words", "stop_words", "exclude_input_in_output", "end_id", "pad_id", "top_k", "top_p"),
    *("temperature", "length_penalty", "repetition_penalty", "min_tokens", "min_length", "presence_penalty"),
    *("frequency_penalty", "seed", "random_seed", "return_log_probs", "return_context_logits"),
    *("return_generation_logits", "num_return_sequences", "beam_width", "stream", "prompt_embedding_table"),
    *("prompt_vocab_size", "prompt_table_extra_id", "embedding_bias_words", "embedding_bias_weights"),
    *("num_draft_tokens", "use_draft_logits", "lora_task_id", "lora_weights", "lora_config", "return_perf_metrics"),
    *("return_num_input_tokens", "return_num_output_tokens"),
    *("guided_decoding_guide_type", "guided_decoding_guide"),
)
TENSORRT_LLM_OUTPUTS = (
    *("text_output", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index"),
    *("sequence_index", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate"),
    *("total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens", "num_output_tokens"),
)


def table(heading: str, *, outputs: bool = False) -> dict[str, str]:
    """What stands in the table after the heading: the first word of each field's verdict."""
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.split(heading, 1)[1].split("\n\n|", 1)[1].split("\n\n", 1)[0], re.M)
    chosen = ((names, verdict) for names, verdict in rows if names.endswith("(outputs)") == outputs)
    return {name: re.split("[;:, ]", verdict)[0] for names, verdict in chosen for name in re.findall(r"`(\w+)`", names)}


def declared(kind: str) -> set[str]:
    """The tensors of a converted model: kind is input or output."""
    text = (ROOT / "model_repository" / "model" / "config.pbtxt.in").read_text("utf-8")
    blocks = re.findall(rf"^{kind} \[(.*?)^\]", text, re.M | re.S)
    return {name for block in blocks for name in re.findall(r'name: "(\w+)"', block)}


def test_every_sampling_parameter_of_vllm_is_mapped_and_treated_so() -> None:
    verdicts = table("Inside `sampling_parameters`")
    assert verdicts.keys() == VLLM.keys()
    ours = {name for option in OPTIONS for name in (option.name, *option.aliases)}
    no_ops = {option.name for option in NO_OPS}
    for name, default in VLLM.items():
        read(sampling={name: default})
        expected = "same" if name in ours else "no-op" if name in no_ops else "refused"
        assert verdicts[name] == expected, name
        if expected == "refused":
            assert name in refusal(sampling={name: 7})


@pytest.mark.parametrize(
    ("heading", "inputs", "outputs"),
    [
        ("Tensors of Triton's vLLM backend", VLLM_TENSORS, VLLM_OUTPUTS),
        ("Tensors of `ensemble` and `tensorrt_llm_bls`", TENSORRT_LLM, TENSORRT_LLM_OUTPUTS),
    ],
)
def test_every_tensor_is_mapped_and_declared_unless_refused(
    heading: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    verdicts = table(heading)
    assert not set(inputs) - verdicts.keys()
    for name in inputs:
        assert (name in declared("input")) == (verdicts[name] in ("same", "no-op")), name
    verdicts = table(heading, outputs=True)
    assert verdicts.keys() == set(outputs)
    for name, verdict in verdicts.items():
        assert (name in declared("output")) == (verdict == "same"), name
