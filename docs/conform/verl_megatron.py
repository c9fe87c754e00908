"""verl (PyPI) on megatron-core (PyPI): log-probabilities and entropies of a split vocabulary, whose ranks have equal shards.

verl changes the logits, hence the copies. Megatron's own cross entropy is under them, with label smoothing, too.
"""

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits


def begin(group):
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size(group))


def logprob(logits_shard, targets, group):
    begin(group)
    return vocab_parallel_log_probs_from_logits(logits_shard.clone(), targets)


def entropy(logits_shard, group):
    begin(group)
    return vocab_parallel_entropy(logits_shard.clone())


def loss(logits_shard, labels, group, data_group, count, weights, label_smoothing):
    begin(group)
    rows = vocab_parallel_cross_entropy(logits_shard.clone(), labels.clamp(min=0), label_smoothing)
    mine = (rows * weights * (labels != -100)).sum() / max(float(count), 1)
    total = mine.detach().clone()
    dist.all_reduce(total, group=data_group)
    return mine + (total - mine.detach())
