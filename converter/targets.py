"""The weights a converted model consists of: names and shapes, as `backend/checkpoint.py` documents them."""

from limpet.backend.checkpoint import LatentAttentionConfig, ModelConfig

Shape = tuple[int, ...]


def target_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight, in the order in which they are written."""
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def query_rows(config: ModelConfig) -> int:
    return config.num_heads * config.head_dim


def key_value_rows(config: ModelConfig) -> int:
    return config.num_kv_heads * config.head_dim


def intermediate_rows(config: ModelConfig) -> int:
    return config.intermediate_size


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    if config.latent_attention is None:
        return _llama_shapes(config)
    norms = dict.fromkeys(("input_norm.weight", "post_attention_norm.weight"), (config.hidden_size,))
    return norms | _latent_attention_shapes(config, config.latent_attention) | _deepseek_mlp_shapes(config, layer)


def _latent_attention_shapes(config: ModelConfig, latent: LatentAttentionConfig) -> dict[str, Shape]:
    hidden, heads, rank = config.hidden_size, config.num_heads, latent.kv_lora_rank
    shapes: dict[str, Shape] = {
        "q_kv_a_proj.weight": ((latent.q_lora_rank or query_rows(config)) + latent.row_dim, hidden),
        "kv_a_norm.weight": (rank,),
        "w_uk": (heads, latent.qk_nope_head_dim, rank),
        "w_uv": (heads, latent.v_head_dim, rank),
        "o_proj.weight": (hidden, heads * latent.v_head_dim),
    }
    if latent.q_lora_rank is not None:
        shapes |= {
            "q_a_norm.weight": (latent.q_lora_rank,),
            "q_b_proj.weight": (query_rows(config), latent.q_lora_rank),
        }
    return shapes


def _deepseek_mlp_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or layer < experts.num_dense_layers:
        intermediate = config.intermediate_size
        return {"gate_up_proj.weight": (2 * intermediate, hidden), "down_proj.weight": (hidden, intermediate)}
    num_all = experts.num_experts + experts.num_shared_experts
    return {
        "router": (experts.num_experts, hidden),
        "experts_gate_up": (num_all, 2 * experts.intermediate_size, hidden),
        "experts_down": (num_all, hidden, experts.intermediate_size),
    }


def _llama_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    qkv = query_rows(config) + 2 * key_value_rows(config)
    shapes: dict[str, Shape] = {
        "input_norm.weight": (hidden,),
        "post_attention_norm.weight": (hidden,),
        "qkv_proj.weight": (qkv, hidden),
        "o_proj.weight": (hidden, query_rows(config)),
        "gate_up_proj.weight": (2 * intermediate, hidden),
        "down_proj.weight": (hidden, intermediate),
    }
    if config.qkv_bias:
        shapes["qkv_proj.bias"] = (qkv,)
    if config.o_bias:
        shapes["o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"gate_up_proj.bias": (2 * intermediate,), "down_proj.bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes
