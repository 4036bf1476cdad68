"""Names for full cache blocks: a SHA-256 chain over everything that their keys and values depend on. No torch."""

import hashlib

from limpet.backend.link.messages import pack_ids


def chain_root(cache_salt: str) -> bytes:
    """Start of a chain; requests share blocks only within one root."""
    return hashlib.sha256(b"limpet\0" + cache_salt.encode()).digest()


def extend_chain(parent: bytes, block_tokens: list[int]) -> bytes:
    """Hash of a full block, given the hash of the block before it (or the root)."""
    return hashlib.sha256(parent + pack_ids(block_tokens)).digest()
