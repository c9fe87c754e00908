"""Which rank has which slots of a stream of documents, under the layouts of gyre-shard that have a formula."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..reference import dual_chunk_swap

NAMES = ("dual-chunk-swap", "contiguous", "zigzag", "striped", "contiguous-documents")


@dataclass(frozen=True)
class Layout:
    """Slots of a stream, and who has them.

    index [cp, slots / cp]: the slot behind each row of each rank. cu_seqlens [segments + 1]: where
    segments begin, in slots; lengths [segments]: their tokens, which come first, then padding.
    Layouts that cut the whole stream have their padding in a last segment of no token.
    """

    name: str
    index: np.ndarray
    cu_seqlens: np.ndarray
    lengths: np.ndarray

    @property
    def cp(self) -> int:
        return len(self.index)

    @property
    def slots(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def tokens(self) -> np.ndarray:
        """[tokens]: the slot of each token."""
        starts = self.cu_seqlens[:-1]
        return np.concatenate([np.arange(b, b + n) for b, n in zip(starts, self.lengths)] or [np.zeros(0, int)])

    @property
    def owner(self) -> np.ndarray:
        """[slots]: the rank that has each slot."""
        found = np.empty(self.index.size, np.int64)
        found[self.index] = np.arange(self.cp)[:, None]
        return found

    def place(self, token: int) -> str:
        """Where a token is: document, position, rank and row."""
        slot = self.tokens[token]
        document = int(np.searchsorted(self.cu_seqlens, slot, side="right")) - 1
        rank, row = (int(x[0]) for x in np.nonzero(self.index == slot))
        return (
            f"token {token} (document {document}, position {slot - self.cu_seqlens[document]}; rank {rank}, row {row})"
        )


def layout_of(name: str, offsets: np.ndarray, cp: int) -> Layout:
    """The layout of documents that lie one after another, padded as it needs."""
    lengths = np.diff(offsets).astype(np.int64)
    if name == "dual-chunk-swap":
        bounds = np.concatenate([[0], np.cumsum(-(-lengths // (2 * cp)) * 2 * cp)])
        return Layout(name, dual_chunk_swap(bounds, cp), bounds, lengths)
    if name == "contiguous-documents":
        bounds = np.concatenate([[0], np.cumsum(-(-lengths // cp) * cp)])
        parts = [np.arange(a, b).reshape(cp, -1) for a, b in pairwise(bounds)]
        return Layout(name, np.concatenate([np.zeros((cp, 0), np.int64), *parts], axis=1), bounds, lengths)
    multiple = 2 * cp if name == "zigzag" else cp
    tokens = int(offsets[-1])
    slots = -(-tokens // multiple) * multiple
    bounds = np.asarray(offsets, np.int64)
    if slots > tokens:
        bounds, lengths = np.append(bounds, slots), np.append(lengths, 0)
    if name == "zigzag":
        index = dual_chunk_swap(np.array([0, slots]), cp)
    elif name == "striped":
        index = np.arange(slots).reshape(-1, cp).T
    else:
        index = np.arange(slots).reshape(cp, -1)
    return Layout(name, index, bounds, lengths)


def segment_of(layout: Layout) -> np.ndarray:
    """[slots]: the segment that each slot is in."""
    found = np.zeros(layout.slots, np.int64)
    for segment, (begin, end) in enumerate(pairwise(layout.cu_seqlens)):
        found[begin:end] = segment
    return found


def halves_exchanged(index: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Slots of ranks [cp, rows], where the halves of each document's rows are exchanged."""
    found = index.copy()
    for rows in found:
        document = np.searchsorted(bounds, rows, side="right")
        for d in np.unique(document):
            rows[document == d] = np.roll(rows[document == d], (document == d).sum() // 2)
    return found
