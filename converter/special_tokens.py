"""Special tokens, and the BOS that precedes a raw prompt."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

_BOS = "bos"  # BOS's name in the template: in a token's own text a space or a colon would be read as syntax


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
        single=f"{_BOS} $A",
        pair=f"{_BOS} $A {_BOS}:1 $B:1",
        special_tokens=[{"id": _BOS, "ids": [tokenizer.token_to_id(bos)], "tokens": [bos]}],
    )
