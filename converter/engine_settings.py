"""The engine's settings as command line flags and as `parameters` of config.pbtxt, one description for both."""

import json

import msgspec

from limpet.backend.config import EngineConfig

DESCRIPTIONS = {
    "session_len": "tokens of one context, prompt and answer; empty: the model's own limit",
    "max_batch_size": "requests computed together (Triton's own max_batch_size is another thing)",
    "cache_max_entry_count": "GPU: the cache's share of what weights and the largest step leave, between 0 and 1",
    "cache_bytes": "bytes of the cache; empty: on a GPU that share, on a CPU a quarter of the free memory",
    "host_cache_bytes": "bytes of host memory for what is cached of idle sessions; 0: none, it is computed again",
    "cache_block_seq_len": "tokens of one cache block: 16, 32, 64 or 128",
    "max_prefill_token_num": "prompt tokens computed in one step",
    "max_waiting": "requests that may wait; past it UNAVAILABLE",
    "tp": "GPUs that share the model (tensor parallel)",
    "all_reduce": "how GPUs add: auto (small sums through symmetric memory), or nccl alone",
    "enable_prefix_caching": "reuse the cache of equal beginnings: true or false",
    "dtype": "type to compute in: auto (float32 on the CPU, else as on disk), float32, bfloat16, float16",
    "deterministic": "GPU: a request gives the same ids in any batch, at some cost: true or false",
    "device": "auto, cpu or cuda",
    "load_format": "auto, or dummy: random weights, for measuring speed",
    "session_idle_timeout_s": "seconds after which an idle session ends",
    "session_store": "file in which sessions outlive the engine, relative to this folder; empty: kept in memory only",
    "context_overflow": "a conversation that no longer fits: error, or drop_oldest_turns",
    "max_sessions": "sessions that are kept; past it a new one is UNAVAILABLE",
    "default_exclude_input": "false: answers begin with the prompt unless the request says otherwise, as in vLLM",
    "admin_key": "key that limpet_admin asks for; empty: none",
    "log_prompts": "write prompts to the log: true or false",
}


def render_parameters(config: EngineConfig) -> str:
    """The `parameters` blocks of config.pbtxt, one per setting, each under a comment."""
    values: dict[str, object] = msgspec.structs.asdict(config)
    return "\n".join(_block(name, _text(value)) for name, value in values.items())


def describe(name: str) -> str:
    """The setting in a line; its name where none is written yet."""
    return DESCRIPTIONS.get(name, name)


def _block(name: str, text: str) -> str:
    value = json.dumps(text, ensure_ascii=False)
    return f'# {describe(name)}\nparameters {{ key: "{name}" value {{ string_value: {value} }} }}'


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
