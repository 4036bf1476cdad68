"""Chat templates for checkpoints that bring none, or a wrong one."""

from dataclasses import dataclass, replace
from pathlib import Path

import limpet.converter
from limpet.converter.errors import ConversionError
from limpet.converter.source import SourceTokenizer
from limpet.converter.text_file import read_text

# A namespace package: importlib.resources stumbles over the extra path entry of an editable install.
_FOLDER = next(path for path in map(Path, limpet.converter.__path__) if path.is_dir()) / "templates"


@dataclass(frozen=True)
class _BuiltIn:
    """Tokens that the template writes, and the one that ends an answer (None: the tokenizer's own end)."""

    tokens: tuple[str, ...]
    end_of_turn: str | None


_BUILT_IN = {
    "llama2": _BuiltIn((), None),
    "llama3": _BuiltIn(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "chatml": _BuiltIn(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "deepseek-v2": _BuiltIn((), None),
}
NAMES = tuple(_BUILT_IN)


def with_template(source: SourceTokenizer, wanted: str) -> tuple[SourceTokenizer, list[str]]:
    """The tokenizer with another chat template, a built-in one or a file's, and what to warn about.

    Raises ConversionError if it is neither.
    """
    if wanted not in _BUILT_IN:
        if not Path(wanted).exists():
            raise ConversionError(f"{wanted} is no file and no template's name; names are {', '.join(NAMES)}.")
        return replace(source, chat_template=read_text(Path(wanted))), []
    built_in = _BUILT_IN[wanted]
    changed = replace(source, chat_template=read_text(_FOLDER / f"{wanted}.jinja"))
    missing = [token for token in built_in.tokens if source.tokenizer.token_to_id(token) is None]
    if missing:
        return changed, [f"The vocabulary has no token {', '.join(missing)}: template {wanted} fits another model."]
    ends = [source.tokenizer.token_to_id(built_in.end_of_turn)] if built_in.end_of_turn else []
    return replace(changed, eos_token_ids=tuple(dict.fromkeys((*source.eos_token_ids, *filter(None, ends))))), []
