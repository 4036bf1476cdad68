"""The layouts of DeepSeek-V2 sources: latent attention, and experts one tensor each or stacked."""

from collections.abc import Callable, Iterator

import torch

from limpet.backend.checkpoint import ExpertsConfig, LatentAttentionConfig, ModelConfig
from limpet.converter.reorder import half_split_pairs
from limpet.converter.rules import Layout, Part, Reorder, Rule, fuse, rename
from limpet.converter.targets import Shape, intermediate_rows, query_rows

ExpertSource = Callable[[str, int], str]  # (gate, up or down; expert) -> a tensor's name


def hf_deepseek(config: ModelConfig) -> Layout:
    """Hugging Face's names; each expert is a tensor of its own."""
    layer = "model.layers.{i}."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    value_and_key = f"{attention}kv_b_proj.weight"
    return Layout(
        rules=(
            rename("embed_tokens.weight", "model.embed_tokens.weight"),
            rename("norm.weight", "model.norm.weight"),
            rename("lm_head.weight", "lm_head.weight"),
            rename("layers.{i}.input_norm.weight", f"{layer}input_layernorm.weight"),
            rename("layers.{i}.post_attention_norm.weight", f"{layer}post_attention_layernorm.weight"),
            _q_kv_a_rule(config, attention, q="q_proj", q_a="q_a_proj", kv_a="kv_a_proj_with_mqa"),
            rename("layers.{i}.q_a_norm.weight", f"{attention}q_a_layernorm.weight"),
            rename("layers.{i}.q_b_proj.weight", f"{attention}q_b_proj.weight", _query_half_split),
            rename("layers.{i}.kv_a_norm.weight", f"{attention}kv_a_layernorm.weight"),
            fuse("layers.{i}.w_uk", Part(value_and_key, None, _key_rows, _kv_b_shape)),
            fuse("layers.{i}.w_uv", Part(value_and_key, None, _value_rows, _kv_b_shape)),
            rename("layers.{i}.o_proj.weight", f"{attention}o_proj.weight"),
            *_dense_rules(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight", f"{mlp}down_proj.weight"),
            *_expert_rules(
                config,
                router=f"{mlp}gate.weight",
                routed=lambda kind, expert: f"{mlp}experts.{expert}.{kind}_proj.weight",
                shared=lambda kind: f"{mlp}shared_experts.{kind}_proj.weight",
            ),
        ),
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )


def gguf_deepseek(config: ModelConfig, *, splits_kv_b: bool) -> Layout:
    """llama.cpp's names; experts are members of a stack. `splits_kv_b`: the newer files, with attn_k_b and attn_v_b."""
    layer = "blk.{i}."
    attention, mlp = f"{layer}attn_", f"{layer}ffn_"
    if splits_kv_b:
        heads = range(config.num_heads)
        w_uk = [Part(f"{attention}k_b.weight[{head}]", None, _transposed, _transposed_key_shape) for head in heads]
        w_uv = [Part(f"{attention}v_b.weight[{head}]", _value_head_rows) for head in heads]
    else:
        w_uk = [Part(f"{attention}kv_b.weight", None, _key_rows, _kv_b_shape)]
        w_uv = [Part(f"{attention}kv_b.weight", None, _value_rows, _kv_b_shape)]
    return Layout(
        rules=(
            rename("embed_tokens.weight", "token_embd.weight"),
            rename("norm.weight", "output_norm.weight"),
            rename("lm_head.weight", "output.weight"),
            rename("layers.{i}.input_norm.weight", f"{attention}norm.weight"),
            rename("layers.{i}.post_attention_norm.weight", f"{mlp}norm.weight"),
            _q_kv_a_rule(config, attention, q="q", q_a="q_a", kv_a="kv_a_mqa"),
            rename("layers.{i}.q_a_norm.weight", f"{attention}q_a_norm.weight"),
            rename("layers.{i}.q_b_proj.weight", f"{attention}q_b.weight", _query_half_split),
            rename("layers.{i}.kv_a_norm.weight", f"{attention}kv_a_norm.weight"),
            fuse("layers.{i}.w_uk", *w_uk),
            fuse("layers.{i}.w_uv", *w_uv),
            rename("layers.{i}.o_proj.weight", f"{attention}output.weight"),
            *_dense_rules(f"{mlp}gate.weight", f"{mlp}up.weight", f"{mlp}down.weight"),
            *_expert_rules(
                config,
                router=f"{mlp}gate_inp.weight",
                routed=lambda kind, expert: f"{mlp}{kind}_exps.weight[{expert}]",
                shared=lambda kind: f"{mlp}{kind}_shexp.weight",
            ),
        ),
    )


def _q_kv_a_rule(config: ModelConfig, prefix: str, *, q: str, q_a: str, kv_a: str) -> Rule:
    latent = _latent(config)
    if latent.q_lora_rank is None:
        first = Part(f"{prefix}{q}.weight", query_rows, _query_half_split)
    else:
        first = Part(f"{prefix}{q_a}.weight", lambda c: _latent(c).q_lora_rank or 0)
    last = Part(f"{prefix}{kv_a}.weight", lambda c: _latent(c).row_dim, _latent_half_split)
    return fuse("layers.{i}.q_kv_a_proj.weight", first, last)


def _dense_rules(gate: str, up: str, down: str) -> tuple[Rule, Rule]:
    return (
        fuse("layers.{i}.gate_up_proj.weight", Part(gate, intermediate_rows), Part(up, intermediate_rows)),
        rename("layers.{i}.down_proj.weight", down),
    )


def _expert_rules(
    config: ModelConfig, *, router: str, routed: ExpertSource, shared: Callable[[str], str]
) -> Iterator[Rule]:
    experts = config.experts
    if experts is None:
        return
    yield rename("layers.{i}.router", router)

    def parts(expert: int, *kinds: str) -> Iterator[Part]:
        for kind in kinds:
            yield Part(routed(kind, expert), _down_rows if kind == "down" else _expert_rows)

    def shared_parts(expert: int, *kinds: str) -> Iterator[Part]:
        for kind in kinds:
            yield _shared_down(shared(kind), expert) if kind == "down" else _shared_rows(shared(kind), expert)

    for target, kinds in (("experts_gate_up", ("gate", "up")), ("experts_down", ("down",))):
        yield fuse(
            f"layers.{{i}}.{target}",
            *(part for expert in range(experts.num_experts) for part in parts(expert, *kinds)),
            *(part for expert in range(experts.num_shared_experts) for part in shared_parts(expert, *kinds)),
        )


def _shared_rows(source: str, expert: int) -> Part:
    """Rows of gate or up that make one expert of the shared MLP."""
    return Part(source, None, _slice(expert, dim=0), lambda c: (_shared_size(_experts(c)), c.hidden_size))


def _shared_down(source: str, expert: int) -> Part:
    return Part(source, None, _slice(expert, dim=1), lambda c: (c.hidden_size, _shared_size(_experts(c))))


def _slice(expert: int, dim: int) -> Reorder:
    def take(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        size = _experts(config).intermediate_size
        return tensor.narrow(dim, expert * size, size)

    return take


def _query_half_split(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    heads = tensor.reshape(config.num_heads, config.head_dim, *tensor.shape[1:])
    plain, rotary = torch.split(heads, [config.head_dim - config.rotary_dim, config.rotary_dim], dim=1)
    rotary = half_split_pairs(rotary.flatten(0, 1), config.num_heads).view_as(rotary)
    return torch.cat((plain, rotary), dim=1).reshape(tensor.shape)


def _latent_half_split(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    plain, rotary = torch.split(tensor, [_latent(config).kv_lora_rank, config.rotary_dim])
    return torch.cat((plain, half_split_pairs(rotary, 1)))


def _key_rows(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return _by_head(tensor, config)[:, : _latent(config).qk_nope_head_dim]


def _value_rows(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return _by_head(tensor, config)[:, _latent(config).qk_nope_head_dim :]


def _by_head(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return tensor.reshape(config.num_heads, -1, tensor.shape[-1])  # [heads, nope + v, rank]


def _transposed(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return tensor.t()


def _kv_b_shape(config: ModelConfig) -> Shape:
    latent = _latent(config)
    return (config.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)


def _transposed_key_shape(config: ModelConfig) -> Shape:
    return (_latent(config).kv_lora_rank, _latent(config).qk_nope_head_dim)


def _value_head_rows(config: ModelConfig) -> int:
    return _latent(config).v_head_dim


def _expert_rows(config: ModelConfig) -> int:
    return _experts(config).intermediate_size


def _down_rows(config: ModelConfig) -> int:
    return config.hidden_size


def _shared_size(experts: ExpertsConfig) -> int:
    return experts.num_shared_experts * experts.intermediate_size


def _latent(config: ModelConfig) -> LatentAttentionConfig:
    assert config.latent_attention is not None
    return config.latent_attention


def _experts(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts
