"""Opening a folder as Meta publishes Llama: params.json, consolidated.*.pth, tokenizer.model."""

import msgspec

from limpet.backend.checkpoint import ModelConfig, RopeScaling, TokenizerConfig
from limpet.converter.errors import ConversionError
from limpet.converter.layouts import META
from limpet.converter.meta_store import MetaStore
from limpet.converter.rules import main_dtype, require_enough_tensors
from limpet.converter.sentencepiece_model import read_sentencepiece_model
from limpet.converter.sentencepiece_vocab import build_sentencepiece
from limpet.converter.source import Source, SourceTokenizer
from limpet.converter.source_folder import SourceFolder
from limpet.converter.special_tokens import set_bos
from limpet.converter.text_file import Count, Positive, as_record, read_json
from limpet.converter.tiktoken_vocab import BEGIN, END, END_OF_MESSAGE, END_OF_TURN, build_llama3, is_tiktoken

PARAMS = "params.json"


def find_meta_folder(folder: SourceFolder) -> SourceFolder | None:
    """The folder with params.json: this one, or the only one inside it that has one; None if there is none."""
    if folder.file(PARAMS).exists():
        return folder
    nested = sorted(path.parent.name for path in folder.path.glob(f"*/{PARAMS}"))
    if len(nested) > 1:
        raise ConversionError(f"{folder.name} holds several models ({', '.join(nested)}): name one of these folders.")
    return SourceFolder(folder.file(nested[0])) if nested else None


class _Params(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of params.json that matter here."""

    dim: Count
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count | None = None
    norm_eps: Positive = 1e-5
    rope_theta: Positive | None = None
    use_scaled_rope: bool | None = None
    rope_scaling_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    sliding_window: Count | None = None  # of Mistral's own folders


def open_meta_folder(folder: SourceFolder) -> Source:
    """Read its numbers and headers; the tokenizer may lie beside the weights or one folder up."""
    params = as_record(read_json(folder.file(PARAMS)), _Params, PARAMS)
    store = MetaStore(folder, params.dim)
    tokenizer = _read_tokenizer(folder)
    config = _model_config(params, store, tokenizer)
    require_enough_tensors(config, store.tensors)
    context = config.max_position_embeddings
    warning = f"{PARAMS} does not state the context: its other values are those of a model of {context} tokens."
    return Source("Meta folder", folder.name, config, META, store, tokenizer, (warning,))


def _model_config(params: _Params, store: MetaStore, tokenizer: SourceTokenizer) -> ModelConfig:
    tied = "output.weight" not in store.tensors
    context, scaling = _context(params, tied)
    bos = tokenizer.config.bos_token
    return ModelConfig(
        architecture="llama",
        source_architecture="Llama (Meta)",
        hidden_size=params.dim,
        num_layers=params.n_layers,
        num_heads=params.n_heads,
        num_kv_heads=params.n_kv_heads or params.n_heads,
        head_dim=params.dim // params.n_heads,
        intermediate_size=_num_rows(store, "layers.0.feed_forward.w1.weight"),
        vocab_size=_num_rows(store, "tok_embeddings.weight"),
        max_position_embeddings=context,
        rms_norm_eps=params.norm_eps,
        rope_theta=params.rope_theta or 10000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
        sliding_window=params.sliding_window,
        dtype=main_dtype(store.tensors),
        bos_token_id=tokenizer.tokenizer.token_to_id(bos) if bos else None,
    )


def _context(params: _Params, tied: bool) -> tuple[int, RopeScaling | None]:
    """The context that Meta's code was given on its command line, by what tells the releases apart."""
    if params.use_scaled_rope:
        # Llama 3.1 has factor 8; of the releases with tied embeddings (3.2) it is 32.
        scaling = RopeScaling(
            rope_type="llama3",
            factor=params.rope_scaling_factor or (32.0 if tied else 8.0),
            low_freq_factor=1.0,
            high_freq_factor=params.high_freq_factor or 4.0,
            original_max_position_embeddings=8192,
        )
        return 131072, scaling
    if params.rope_theta:
        return (16384 if params.rope_theta == 1e6 else 8192), None  # Code Llama, Llama 3
    return (2048 if params.norm_eps == 1e-6 else 4096), None  # Llama 1, Llama 2


def _read_tokenizer(folder: SourceFolder) -> SourceTokenizer:
    folders = (folder, SourceFolder(folder.path.resolve().parent))
    path = next((path for each in folders if (path := each.file("tokenizer.model")).is_file()), None)
    if path is None:
        raise ConversionError(f"No tokenizer.model in {folder.name} or one folder up: the model has no tokenizer.")
    if is_tiktoken(path):
        tokenizer = build_llama3(path)
        config = TokenizerConfig(bos_token=BEGIN, eos_token=END_OF_TURN, add_bos=True)
        end_tokens = [END, END_OF_MESSAGE, END_OF_TURN]
    else:
        model = read_sentencepiece_model(path)
        tokenizer = build_sentencepiece(model.pieces, model.spaces)
        config = TokenizerConfig(bos_token=model.bos, eos_token=model.eos, add_bos=model.bos is not None)
        end_tokens = [model.eos] if model.eos else []
    set_bos(tokenizer, config.bos_token)
    ends = [end for token in end_tokens if (end := tokenizer.token_to_id(token)) is not None]
    return SourceTokenizer(tokenizer, config, None, tuple(ends))


def _num_rows(store: MetaStore, name: str) -> int:
    if name not in store.tensors:
        raise ConversionError(f"The checkpoint lacks the tensor {name}.")
    return store.tensors[name].shape[0]
