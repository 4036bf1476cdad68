"""Opening a folder as Meta publishes Llama: params.json, consolidated.*.pth, tokenizer.model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from limpet.backend.checkpoint import ModelConfig, RopeScaling, TokenizerConfig
from limpet.converter.errors import ConversionError
from limpet.converter.json_file import read_json
from limpet.converter.layouts import META
from limpet.converter.meta_store import MetaStore
from limpet.converter.rules import main_dtype
from limpet.converter.sentencepiece_model import read_sentencepiece_model
from limpet.converter.sentencepiece_vocab import build_sentencepiece
from limpet.converter.source import Source, SourceTokenizer
from limpet.converter.special_tokens import set_bos
from limpet.converter.targets import Shape
from limpet.converter.tiktoken_vocab import BEGIN, END, END_OF_MESSAGE, END_OF_TURN, build_llama3, is_tiktoken

PARAMS = "params.json"


def find_meta_folder(folder: Path) -> Path | None:
    """The folder with params.json: this one, or the only one inside it that has one; None if there is none."""
    if (folder / PARAMS).exists():
        return folder
    nested = sorted(path.parent for path in folder.glob(f"*/{PARAMS}"))
    if len(nested) > 1:
        names = ", ".join(path.name for path in nested)
        raise ConversionError(f"{folder.name} holds several models ({names}): name one of these folders.")
    return nested[0] if nested else None


def open_meta_folder(folder: Path) -> Source:
    """Read its numbers and headers; the tokenizer may lie beside the weights or one folder up."""
    params = read_json(folder / PARAMS)
    store = MetaStore(folder, _int(params, "dim"))
    tokenizer = _read_tokenizer(folder)
    config = _model_config(params, store, tokenizer)
    context = config.max_position_embeddings
    warning = f"{PARAMS} does not state the context: its other values are those of a model of {context} tokens."
    return Source("Meta folder", folder.resolve().name, config, META, store, tokenizer, (warning,))


def _model_config(params: Mapping[str, Any], store: MetaStore, tokenizer: SourceTokenizer) -> ModelConfig:
    hidden_size, num_heads = _int(params, "dim"), _int(params, "n_heads")
    tied = "output.weight" not in store.tensors
    context, scaling = _context(params, tied)
    bos = tokenizer.config.bos_token
    return ModelConfig(
        architecture="llama",
        source_architecture="Llama (Meta)",
        hidden_size=hidden_size,
        num_layers=_int(params, "n_layers"),
        num_heads=num_heads,
        num_kv_heads=_int({"n_kv_heads": num_heads} | {k: v for k, v in params.items() if v is not None}, "n_kv_heads"),
        head_dim=hidden_size // num_heads,
        intermediate_size=_shape(store, "layers.0.feed_forward.w1.weight")[0],
        vocab_size=_shape(store, "tok_embeddings.weight")[0],
        max_position_embeddings=context,
        rms_norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(params.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings=tied,
        dtype=main_dtype(store.tensors),
        bos_token_id=tokenizer.tokenizer.token_to_id(bos) if bos else None,
    )


def _context(params: Mapping[str, Any], tied: bool) -> tuple[int, RopeScaling | None]:
    """The context that Meta's code was given on its command line, by what tells the releases apart."""
    if params.get("use_scaled_rope"):
        # Llama 3.1 has factor 8; of the releases with tied embeddings (3.2) it is 32.
        factor = float(params.get("rope_scaling_factor") or (32.0 if tied else 8.0))
        scaling = RopeScaling(
            rope_type="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=float(params.get("high_freq_factor") or 4.0),
            original_max_position_embeddings=8192,
        )
        return 131072, scaling
    if params.get("rope_theta"):
        return (16384 if params["rope_theta"] == 1e6 else 8192), None  # Code Llama, Llama 3
    return (2048 if params.get("norm_eps") == 1e-6 else 4096), None  # Llama 1, Llama 2


def _read_tokenizer(folder: Path) -> SourceTokenizer:
    paths = (folder / "tokenizer.model", folder.resolve().parent / "tokenizer.model")
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ConversionError(f"No tokenizer.model in {folder.name} or one folder up: the model has no tokenizer.")
    if is_tiktoken(path):
        tokenizer = build_llama3(path)
        config = TokenizerConfig(bos_token=BEGIN, eos_token=END_OF_TURN, add_bos=True)
        end_tokens = [END, END_OF_MESSAGE, END_OF_TURN]
    else:
        model = read_sentencepiece_model(path)
        tokenizer = build_sentencepiece(model.pieces, model.add_dummy_prefix)
        config = TokenizerConfig(bos_token=model.bos, eos_token=model.eos, add_bos=model.bos is not None)
        end_tokens = [model.eos] if model.eos else []
    set_bos(tokenizer, config.bos_token)
    ends = [end for token in end_tokens if (end := tokenizer.token_to_id(token)) is not None]
    return SourceTokenizer(tokenizer, config, None, tuple(ends))


def _shape(store: MetaStore, name: str) -> Shape:
    if name not in store.tensors:
        raise ConversionError(f"The checkpoint lacks the tensor {name}.")
    return store.tensors[name].shape


def _int(params: Mapping[str, Any], key: str) -> int:
    value = params.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConversionError(f"{PARAMS} says {key} is {value!r}; a positive integer is needed.")
    return value
