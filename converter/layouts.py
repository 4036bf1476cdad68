"""The layouts of sources with Llama's structure: which tensors make which weight."""

from limpet.converter.reorder import key_half_split, query_half_split, ungroup_qkv
from limpet.converter.rules import Layout, Part, Rule, fuse, rename
from limpet.converter.targets import intermediate_rows, key_value_rows, query_rows


def _with_biases(target: str, *parts: Part) -> tuple[Rule, Rule]:
    """Rules for a projection's weight and bias; the names come without their ending."""
    return tuple(  # type: ignore[return-value]
        fuse(f"{target}.{kind}", *(Part(f"{part.source}.{kind}", part.rows, part.reorder) for part in parts))
        for kind in ("weight", "bias")
    )


HF_LLAMA = Layout(
    rules=(
        rename("embed_tokens.weight", "model.embed_tokens.weight"),
        rename("norm.weight", "model.norm.weight"),
        rename("lm_head.weight", "lm_head.weight"),
        rename("layers.{i}.input_norm.weight", "model.layers.{i}.input_layernorm.weight"),
        rename("layers.{i}.post_attention_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
        *_with_biases(
            "layers.{i}.qkv_proj",
            Part("model.layers.{i}.self_attn.q_proj", query_rows),
            Part("model.layers.{i}.self_attn.k_proj", key_value_rows),
            Part("model.layers.{i}.self_attn.v_proj", key_value_rows),
        ),
        *_with_biases("layers.{i}.o_proj", Part("model.layers.{i}.self_attn.o_proj")),
        rename("layers.{i}.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
        rename("layers.{i}.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
        *_with_biases(
            "layers.{i}.gate_up_proj",
            Part("model.layers.{i}.mlp.gate_proj", intermediate_rows),
            Part("model.layers.{i}.mlp.up_proj", intermediate_rows),
        ),
        *_with_biases("layers.{i}.down_proj", Part("model.layers.{i}.mlp.down_proj")),
    ),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
)

INTERNLM2 = Layout(
    rules=(
        rename("embed_tokens.weight", "model.tok_embeddings.weight"),
        rename("norm.weight", "model.norm.weight"),
        rename("lm_head.weight", "output.weight"),
        rename("layers.{i}.input_norm.weight", "model.layers.{i}.attention_norm.weight"),
        rename("layers.{i}.post_attention_norm.weight", "model.layers.{i}.ffn_norm.weight"),
        *_with_biases("layers.{i}.qkv_proj", Part("model.layers.{i}.attention.wqkv", reorder=ungroup_qkv)),
        *_with_biases("layers.{i}.o_proj", Part("model.layers.{i}.attention.wo")),
        *_with_biases(
            "layers.{i}.gate_up_proj",
            Part("model.layers.{i}.feed_forward.w1", intermediate_rows),
            Part("model.layers.{i}.feed_forward.w3", intermediate_rows),
        ),
        *_with_biases("layers.{i}.down_proj", Part("model.layers.{i}.feed_forward.w2")),
    ),
    ignored=(r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",),
)


def _gguf(query: Part, key: Part) -> Layout:
    return Layout(
        rules=(
            rename("embed_tokens.weight", "token_embd.weight"),
            rename("norm.weight", "output_norm.weight"),
            rename("lm_head.weight", "output.weight"),
            rename("layers.{i}.input_norm.weight", "blk.{i}.attn_norm.weight"),
            rename("layers.{i}.post_attention_norm.weight", "blk.{i}.ffn_norm.weight"),
            *_with_biases("layers.{i}.qkv_proj", query, key, Part("blk.{i}.attn_v", key_value_rows)),
            *_with_biases("layers.{i}.o_proj", Part("blk.{i}.attn_output")),
            rename("layers.{i}.q_norm.weight", "blk.{i}.attn_q_norm.weight"),
            rename("layers.{i}.k_norm.weight", "blk.{i}.attn_k_norm.weight"),
            *_with_biases(
                "layers.{i}.gate_up_proj",
                Part("blk.{i}.ffn_gate", intermediate_rows),
                Part("blk.{i}.ffn_up", intermediate_rows),
            ),
            *_with_biases("layers.{i}.down_proj", Part("blk.{i}.ffn_down")),
        ),
        # rope_freqs holds Llama 3's rope factors, which the configuration states; attn_rot_embd is inv_freq.
        ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd"),
    )


GGUF_INTERLEAVED = _gguf(
    Part("blk.{i}.attn_q", query_rows, query_half_split), Part("blk.{i}.attn_k", key_value_rows, key_half_split)
)
GGUF_HALF_SPLIT = _gguf(Part("blk.{i}.attn_q", query_rows), Part("blk.{i}.attn_k", key_value_rows))

META = Layout(
    rules=(
        rename("embed_tokens.weight", "tok_embeddings.weight"),
        rename("norm.weight", "norm.weight"),
        rename("lm_head.weight", "output.weight"),
        rename("layers.{i}.input_norm.weight", "layers.{i}.attention_norm.weight"),
        rename("layers.{i}.post_attention_norm.weight", "layers.{i}.ffn_norm.weight"),
        fuse(
            "layers.{i}.qkv_proj.weight",
            Part("layers.{i}.attention.wq.weight", query_rows, query_half_split),
            Part("layers.{i}.attention.wk.weight", key_value_rows, key_half_split),
            Part("layers.{i}.attention.wv.weight", key_value_rows),
        ),
        rename("layers.{i}.o_proj.weight", "layers.{i}.attention.wo.weight"),
        fuse(
            "layers.{i}.gate_up_proj.weight",
            Part("layers.{i}.feed_forward.w1.weight", intermediate_rows),
            Part("layers.{i}.feed_forward.w3.weight", intermediate_rows),
        ),
        rename("layers.{i}.down_proj.weight", "layers.{i}.feed_forward.w2.weight"),
    ),
    ignored=(r"rope\.freqs", r"layers\.\d+\.attention\.inner_attention\.rope\.freqs"),
)
