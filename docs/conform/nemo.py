"""NeMo RL: log-probabilities, entropies and divergences of a split vocabulary, some in chunks of rows. PYTHONPATH names its
folder."""

from nemo_rl.distributed.model_utils import (
    ChunkedDistributedEntropy,
    ChunkedDistributedLogprob,
    DistributedCrossEntropy,
    DistributedLogprob,
)


def logprob(logits_shard, targets, group, first):
    last = first + logits_shard.shape[1]
    return DistributedLogprob.apply(logits_shard[None], targets[None], first, last, group)[0]


def chunked_logprob(logits_shard, targets, group, first):
    last = first + logits_shard.shape[1]
    return ChunkedDistributedLogprob.apply(logits_shard[None], targets[None], first, last, 4, group)[0]


def entropy(logits_shard, group):
    """NeMo RL's is the sum of p log p."""
    return -ChunkedDistributedEntropy.apply(logits_shard[None], 4, group, False)[0]


def kl(logits_shard, teacher_shard, group):
    """NeMo RL has the cross entropy, and the sum of p log p."""
    cross_entropy = DistributedCrossEntropy.apply(logits_shard[None], teacher_shard[None], group)[0]
    return cross_entropy + ChunkedDistributedEntropy.apply(teacher_shard[None], 4, group, True)[0]
