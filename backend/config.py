"""Settings of one engine, from the Triton model's `parameters`; validated once, at start. No torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ALIAS_OF = "alias_of"  # the only parameter of an alias: the model that it stands in front of


class ConfigError(Exception):
    """A setting is unknown or out of range; the message says the name, the value and what is allowed."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's settings under the field's names; defaults suit a laptop's CPU and one GPU alike."""

    session_len: Annotated[int, Meta(ge=2)] | None = None  # tokens of one context; None: the model's own limit
    max_batch_size: Annotated[int, Meta(ge=1, le=4096)] = 64  # slots; not Triton's own max_batch_size
    cache_max_entry_count: Annotated[float, Meta(gt=0, lt=1)] = 0.8  # CUDA: share of the memory left at start
    cache_bytes: Annotated[int, Meta(ge=1)] | None = None  # None: CPU a quarter of the free memory, CUDA that share
    host_cache_bytes: Annotated[int, Meta(ge=0)] = 0  # host memory for cached blocks of idle sessions; 0: none
    cache_block_seq_len: Literal[16, 32, 64, 128] = 64  # tokens of one cache block
    max_prefill_token_num: Annotated[int, Meta(ge=16)] | None = None  # prompt tokens of one step; CUDA 8192, CPU 512
    max_waiting: Annotated[int, Meta(ge=1)] = 1024  # queued requests; past it UNAVAILABLE
    tp: Annotated[int, Meta(ge=1)] = 1
    all_reduce: Literal["auto", "nccl"] = "auto"  # of GPUs; auto: small sums through symmetric memory
    enable_prefix_caching: bool = True
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on the CPU, else as on disk
    deterministic: bool = False  # CUDA: a request's ids do not depend on batch, chunking, cache hits or preemption
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, for measuring speed without a checkpoint's
    session_idle_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0
    session_store: str = ""  # file that sessions are kept in, relative to the model's folder; "": memory only
    context_overflow: Literal["error", "drop_oldest_turns"] = "error"  # where the request does not say
    max_sessions: Annotated[int, Meta(ge=1)] = 100_000  # past it a new session is refused with UNAVAILABLE
    default_exclude_input: bool = True  # False: vLLM's rule, the prompt is prepended where the request does not say
    admin_key: str = ""
    log_prompts: bool = False


def read_parameters(model_dir: Path) -> dict[str, str]:
    """The `parameters` in a model's config.pbtxt; raises ConfigError."""
    from google.protobuf import text_format  # with gRPC, which most who read settings do without
    from tritonclient.grpc import model_config_pb2

    path = model_dir / "config.pbtxt"
    try:
        parsed = text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (OSError, text_format.ParseError) as error:
        raise ConfigError(f"{path} is no configuration of a Triton model: {error}.") from None
    return {name: value.string_value for name, value in parsed.parameters.items()}


def parse_parameters(parameters: Mapping[str, str]) -> EngineConfig:
    """Build the settings from strings; raises ConfigError naming the parameter and what it allows."""
    known = {field.encode_name: field for field in msgspec.structs.fields(EngineConfig)}
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ConfigError(f"Unknown parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
    given = {name: value for name, value in parameters.items() if value != ""}
    try:
        return msgspec.convert(given, EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        match = re.search(r"\$\.(\w+)", str(error))
        name = match.group(1) if match else "?"
        reason = str(error).split(" - at")[0]
        raise ConfigError(f"Parameter {name} is {given.get(name)!r}: {reason}.") from None
