"""Which documents are kept out of training: a share of them, by a digest of their contents.

A document is held out where its digest, read as a number in [0, 1), lies below `data.validation`. Invariants: the
choice depends on the contents of the document alone, not on seed, order, tokenizer or the rest of the data; equal
documents go the same way, wherever they stand; a larger share holds out all that a smaller one does.

Cost: one hash of every document when it is tokenised, 8 bytes of it in the cache.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DigestArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


def content_digests(contents: Sequence[str | bytes]) -> DigestArray:
    """A digest of each document. Shape [num_documents]."""
    parts = (content.encode() if isinstance(content, str) else content for content in contents)
    return np.frombuffer(b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in parts), dtype="<u8")


def is_held_out(digests: DigestArray, share: float) -> BoolArray:
    """Which documents `data.validation` = `share` keeps out of training. Shape [num_documents]."""
    return digests < np.uint64(int(share * 2**53) << 11)
