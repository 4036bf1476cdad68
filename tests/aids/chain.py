"""The chain: which token follows which, and the weights of a real Llama that computes just that.

Attention and MLP add nothing (all their matrices are zero), so the last hidden state is norm(embed[i]). Every token j
has a code c_j of ±1 in lm_head, and embed[i] = c_next(i): the logit of next(i) is LOGIT_SCALE * HIDDEN_SIZE, that of
any other token at least MIN_LOGIT_GAP less, exactly so in every dtype, and beyond reach of sampling at temperature 1.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from tests.aids.chain_scripts import DEFAULT, SCRIPTS, ChainScript
from tests.aids.chain_tokenizer import EOS_ID, key_id, piece_ids, vocabulary

HIDDEN_SIZE = 64
LOGIT_SCALE = 2.0
MIN_LOGIT_GAP = 24.0

Floats = npt.NDArray[np.float32]


def script(key: str) -> ChainScript:
    """The script of that key."""
    return next(each for each in SCRIPTS if each.key == key)


def answer_ids(key: str) -> list[int]:
    """The ids that answer a prompt whose last word is `key`, with the end id; one round of a script that loops."""
    chosen = script(key)
    return piece_ids(chosen) if chosen.loops else [*piece_ids(chosen), EOS_ID]


@cache
def next_tokens() -> npt.NDArray[np.int64]:
    """The map: next token of every token. Tokens that belong to no script start the default one. # [vocab]"""
    following = np.full(len(vocabulary()), answer_ids(DEFAULT.key)[0], dtype=np.int64)
    for each in SCRIPTS:
        ids = answer_ids(each.key)
        following[[key_id(each), *ids[:-1]]] = ids
        if each.loops:
            following[ids[-1]] = ids[0]
    return following


@cache
def codes() -> Floats:
    """The code of every token. # [vocab, hidden]"""
    uniform = np.random.Generator(np.random.PCG64(2)).random((len(vocabulary()), HIDDEN_SIZE))
    return np.where(uniform < 0.5, -1.0, 1.0).astype(np.float32)
