"""References in NumPy float64, small and readable, for other people's code to be compared with."""

from ._attention import attention, visible
from ._logprobs import (
    entropy,
    filtered,
    gather,
    log_softmax,
    logprob,
    logprobs,
    next_tokens,
    score_gradient,
    soft_cross_entropy,
    survivors,
    top_k,
)
from ._selection import drawn_scores, index_scores, selected_keys
from ._sharding import dual_chunk_swap, local_cu_seqlens, shard, shards, unshard

__all__ = [
    "attention",
    "drawn_scores",
    "dual_chunk_swap",
    "entropy",
    "filtered",
    "gather",
    "index_scores",
    "local_cu_seqlens",
    "log_softmax",
    "logprob",
    "logprobs",
    "next_tokens",
    "score_gradient",
    "selected_keys",
    "shard",
    "shards",
    "soft_cross_entropy",
    "survivors",
    "top_k",
    "unshard",
    "visible",
]
