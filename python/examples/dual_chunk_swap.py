from itertools import pairwise

import numpy as np

import gyre


def my_shard(stream, bounds, rank, cp):
    """Chunks rank and 2 cp - 1 - rank of every segment."""
    parts = []
    for begin, end in pairwise(bounds):
        chunks = np.split(stream[begin:end], 2 * cp)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return np.concatenate(parts)


cp, bounds = 4, np.array([0, 8, 32, 32, 48])  # cu_seqlens_padded of a pack; a segment is empty
stream = np.random.default_rng(1).integers(0, 50000, bounds[-1])
index = gyre.reference.dual_chunk_swap(bounds, cp)
mine = np.stack([my_shard(stream, bounds, rank, cp) for rank in range(cp)])
gyre.assert_close(mine, gyre.reference.shard(stream, index))
gyre.assert_close(gyre.reference.unshard(mine, index), stream)
