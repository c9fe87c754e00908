"""DualChunkSwap: which context-parallel rank has which slots of a stream of packed segments.

Every segment is cut into 2 cp chunks; rank r has chunks r and 2 cp - 1 - r of each, segment by
segment. With two segments of 8 and 4 slots, real lengths 5 and 2, over 2 ranks:

    slots     0 1 2 3 4 5 6 7 | 8 9 10 11        rank 0 has  0 1 6 7 | 8 11   (real: 0 1, 8)
    tokens    a b c d e . . . | x y .  .         rank 1 has  2 3 4 5 | 9 10   (real: 2 3 4, 9)
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from .. import checks
from ..arrays import to_numpy
from ..reading import Group, extras_of

BOUNDS = ("bin_offsets", "cu_seqlens", "cu_seqlens_padded")
STREAMS = ("ids", "embeddings", "labels", "positions")


def dual_chunk_swap(cu_seqlens_padded: Any, cp: int) -> np.ndarray:
    """[cp, slots / cp]: the slot of the stream behind each slot of each rank.

    cu_seqlens_padded [segments + 1]: boundaries of the segments, in slots. ValueError: the slots of
    a segment are no multiple of 2 cp.
    """
    cp = checks.size("cp", cp, 1)
    bounds = checks.offsets("cu_seqlens_padded", cu_seqlens_padded)
    parts = [np.empty((cp, 0), np.int64)]
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if (end - begin) % (2 * cp):
            raise ValueError(f"segment {i} has {end - begin} slots, no multiple of 2 cp = {2 * cp}")
        chunks = np.arange(begin, end).reshape(2 * cp, (end - begin) // (2 * cp))
        parts.append(np.hstack([chunks[:cp], chunks[::-1][:cp]]))
    return np.concatenate(parts, axis=1)


def shard(stream: Any, index: np.ndarray) -> np.ndarray:
    """[cp, slots / cp, ...]: what each rank has of an array [slots, ...]."""
    return to_numpy(stream)[index]


def unshard(shards: Any, index: np.ndarray) -> np.ndarray:
    """[slots, ...]: the stream that `shard` was given."""
    parts = to_numpy(shards)
    stream = np.empty((index.size, *parts.shape[2:]), parts.dtype)
    stream[index] = parts
    return stream


def local_cu_seqlens(cu_seqlens: Any, cu_seqlens_padded: Any, index: np.ndarray) -> np.ndarray:
    """[cp, segments + 1]: running sums of the real tokens that each rank has of each segment.

    cu_seqlens, cu_seqlens_padded [segments + 1]: running sums of real tokens and of slots. Called
    with cu_seqlens_padded twice it counts slots instead.
    """
    real, slots = to_numpy(cu_seqlens), to_numpy(cu_seqlens_padded)
    segment = np.searchsorted(slots, index, side="right") - 1
    is_real = index - slots[segment] < np.diff(real)[segment]
    counts = np.zeros((len(index), len(slots)), np.int64)
    rank = np.broadcast_to(np.arange(len(index))[:, None], index.shape)
    np.add.at(counts, (rank[is_real], segment[is_real] + 1), 1)
    return np.cumsum(counts, axis=1)


def shards(packed: Mapping[str, Any], cp: int) -> dict[str, np.ndarray]:
    """What gyre-shard writes into /shards, under DualChunkSwap, of the arrays of a packed file.

    Bin after bin: index, ids or embeddings, labels, positions [cp, slots / cp, ...]; positions of several
    axes, [axes, slots] in the file, are [cp, axes, slots / cp]; cu_seqlens and
    cu_seqlens_padded [cp, segments + bins]; bin_offsets and slot_offsets [bins + 1]. The extras of a
    group that gyre.read has read: of slots [cp, slots / cp, ...], others as they are.
    """
    bin_offsets, real, slots = (to_numpy(packed[name]) for name in BOUNDS)
    streams = {name: to_numpy(packed[name]) for name in STREAMS if name in packed}
    axes = "positions" in streams and streams["positions"].ndim > 1
    if axes:
        streams["positions"] = streams["positions"].T
    whole = {}
    for name, (aligned, array) in (extras_of(packed) if isinstance(packed, Group) else {}).items():
        if cp > 1 and name == "attention_mask":
            continue  # no mask by slots can describe a shard
        (streams if aligned == "slots" else whole)[f"extras/{name}"] = array
    found: dict[str, list[np.ndarray]] = {"index": [np.empty((cp, 0), np.int64)]}
    slot_offsets, begin = [0], 0
    for b in range(len(bin_offsets) - 1):
        mine = slice(bin_offsets[b] + b, bin_offsets[b + 1] + b + 1)
        index = dual_chunk_swap(slots[mine], cp)
        end = begin + slots[mine][-1]
        pieces = {name: shard(stream[begin:end], index) for name, stream in streams.items()}
        pieces["index"] = index
        pieces["cu_seqlens"] = local_cu_seqlens(real[mine], slots[mine], index)
        pieces["cu_seqlens_padded"] = local_cu_seqlens(slots[mine], slots[mine], index)
        for name, piece in pieces.items():
            found.setdefault(name, []).append(piece)
        begin = end
        slot_offsets.append(slot_offsets[-1] + index.shape[1])
    joined = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    if axes:
        joined["positions"] = joined["positions"].swapaxes(1, 2)
    offsets = {"bin_offsets": bin_offsets, "slot_offsets": np.array(slot_offsets)}
    return joined | whole | offsets
