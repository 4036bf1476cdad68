"""Special tokens, and the BOS that precedes a raw prompt."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing


def add_tokens(tokenizer: Tokenizer, special: Iterable[str], plain: Iterable[str] = ()) -> None:
    """Keep these tokens of the vocabulary whole in text; special ones are left out of decoded text as well."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def starts_with(tokenizer: Tokenizer, token: str | None) -> bool:
    """Whether encoding a raw prompt puts this token first."""
    ids = tokenizer.encode("a").ids
    return token is not None and bool(ids) and ids[0] == tokenizer.token_to_id(token)


def set_bos(tokenizer: Tokenizer, bos: str | None) -> None:
    """Put `bos` before every raw prompt, or nothing."""
    if bos is None:
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
        return
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
