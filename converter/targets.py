"""The weights a converted model consists of: names and shapes, as `backend/checkpoint.py` documents them."""

from limpet.backend.checkpoint import ModelConfig

Shape = tuple[int, ...]


def target_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight, in the order in which they are written."""
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
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


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
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
