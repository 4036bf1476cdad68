"""The converted model on disk: what the converter writes and the engine reads. No torch.

    workspace/model_repository/NAME/
        config.pbtxt                 Triton's configuration; EngineConfig's fields as its `parameters`
        1/model.py                   a few lines
        1/checkpoint/model.json      ModelConfig
        1/checkpoint/manifest.json   Manifest: every other file of checkpoint/ with size and SHA-256
        1/checkpoint/weights-00001-of-0000N.safetensors
        1/checkpoint/linked-FILE.safetensors   hard link to a source's file (--link); Manifest.linked names its weights
        1/checkpoint/tokenizer.json
        1/checkpoint/tokenizer_config.json   TokenizerConfig
        1/checkpoint/chat_template.jinja     absent: raw mode

Weight names (shapes [out, in]; I = intermediate_size; biases and norms only where ModelConfig says so):
    embed_tokens.weight [vocab, hidden]            lm_head.weight [vocab, hidden] (absent when tied)
    norm.weight [hidden]
    layers.N.input_norm.weight, layers.N.post_attention_norm.weight [hidden]
    layers.N.qkv_proj.weight [(heads + 2 kv_heads) * head_dim, hidden] (+ .bias): q rows, k rows, v rows,
        rotary pairs in half-split order (element i with i + head_dim / 2, as Hugging Face)
    layers.N.q_norm.weight, layers.N.k_norm.weight [head_dim]
    layers.N.o_proj.weight [hidden, heads * head_dim] (+ .bias)
    layers.N.gate_up_proj.weight [2 I, hidden] (+ .bias): gate rows, up rows
    layers.N.down_proj.weight [hidden, I] (+ .bias)

DeepSeek-V2 has other layers (H heads, nope = qk_nope_head_dim, rope = qk_rope_head_dim, R = kv_lora_rank, Q =
q_lora_rank, E routed and S shared experts, M = the experts' intermediate size):
    layers.N.input_norm.weight, layers.N.post_attention_norm.weight [hidden]
    layers.N.q_kv_a_proj.weight [Q + R + rope, hidden]: query latents, K/V latents, the key's rotary part; where
        q_lora_rank is None H * (nope + rope) rows of the queries themselves stand first
    layers.N.q_a_norm.weight [Q], layers.N.q_b_proj.weight [H * (nope + rope), Q] (absent where q_lora_rank is None)
    layers.N.kv_a_norm.weight [R]
    layers.N.w_uk [H, nope, R], layers.N.w_uv [H, v_head_dim, R]: kv_b_proj's rows of keys and of values
    layers.N.o_proj.weight [hidden, H * v_head_dim]
    dense layers: layers.N.gate_up_proj.weight, layers.N.down_proj.weight as above
    other layers: layers.N.router [E, hidden], layers.N.experts_gate_up [E + S, 2 M, hidden],
        layers.N.experts_down [E + S, hidden, M]: a shared MLP of S * M columns is S experts that every token goes to
    A head's rotary rows stand in half-split order, after its other rows.
"""

from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

FORMAT_VERSION = 1
_T = TypeVar("_T", bound=msgspec.Struct)
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]


class CheckpointError(Exception):
    """A converted model is missing, damaged or of another format; one sentence says which file and what to do."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scaling of rotary positions; the field names are Hugging Face's."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class LatentAttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: keys and values of all heads are made from one row of latents a token."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def row_dim(self) -> int:
        """Columns of a token's row in the cache: latents, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts: which layers have one, how tokens are routed. Scores are a softmax over all experts."""

    num_experts: int  # routed ones
    num_shared_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    num_dense_layers: int  # leading layers with a plain MLP
    num_groups: int = 1
    num_groups_per_token: int = 1  # experts of the other groups are left out
    scaling_factor: float = 1.0
    normalizes_weights: bool = False  # a token's weights are divided by their sum, and not scaled


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The architecture's numbers, independent of the source's spelling."""

    architecture: Literal["llama", "deepseek_v2"]
    source_architecture: str  # as the source names it, for people to read
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: DType = "float32"  # of the weights on disk
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent_attention: LatentAttentionConfig | None = None  # of deepseek_v2
    experts: ExpertsConfig | None = None  # of deepseek_v2; None: every layer is dense

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.qk_rope_head_dim


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint's generation_config: used where a request says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What tokenizer.json does not say. `bos_token`/`eos_token` are the template's variables of that name."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    add_bos: bool = False  # a raw prompt is preceded by BOS (exactly one; tokenizer.json's post-processor may do it)
    append_only_template: bool = True  # each turn's rendering is a prefix of the next one's
    generation: GenerationDefaults = GenerationDefaults()


class FileEntry(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Every file of the checkpoint folder but this one, by name."""

    format_version: int
    limpet_version: str
    source: str  # kind and name of the source, no absolute path
    num_parameters: int
    files: dict[str, FileEntry]
    linked: dict[str, dict[str, str]] = {}  # by file: tensor in it -> weight; its other tensors are no weights


class CheckpointDir:
    """Paths and small files of one converted model; `root` is the model's folder in the repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "1" / "checkpoint"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def model_path(self) -> Path:
        return self.folder / "model.json"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def tokenizer_config_path(self) -> Path:
        return self.folder / "tokenizer_config.json"

    @property
    def chat_template_path(self) -> Path:
        return self.folder / "chat_template.jinja"

    def manifest(self) -> Manifest:
        manifest = self._read(self.manifest_path, Manifest)
        if manifest.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.manifest_path.name} has format version {manifest.format_version}, this Limpet reads "
                f"{FORMAT_VERSION}: convert the model again."
            )
        return manifest

    def model_config(self) -> ModelConfig:
        return self._read(self.model_path, ModelConfig)

    def tokenizer_config(self) -> TokenizerConfig:
        return self._read(self.tokenizer_config_path, TokenizerConfig)

    def chat_template(self) -> str | None:
        return self.chat_template_path.read_text("utf-8") if self.chat_template_path.exists() else None

    def weight_files(self) -> list[Path]:
        """The safetensors files of the manifest; raises CheckpointError if one is missing or has another size."""
        entries = self.manifest().files
        for name, entry in entries.items():
            path = self.folder / name
            if not path.exists():
                raise CheckpointError(f"The converted model lacks {name}: convert it again.")
            if path.stat().st_size != entry.num_bytes:
                raise CheckpointError(
                    f"{name} has {path.stat().st_size} bytes, its manifest says {entry.num_bytes}: convert it again."
                )
        return sorted(self.folder / name for name in entries if name.endswith(".safetensors"))

    def _read(self, path: Path, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            raise CheckpointError(f"{path.name} is missing: this is no converted model, or it is damaged.") from None
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path.name} is damaged ({error}): convert the model again.") from None
