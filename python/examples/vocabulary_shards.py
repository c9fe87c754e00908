import numpy as np

RANKS = 3


def logprob(problem):
    """A rank has columns [begin, end) of the logits; sums over ranks stand for all-reduces."""
    vocab, targets = int(problem["vocab_size"]), problem["targets"]
    x = problem["logits"][:, :vocab].astype(np.float32) 
    x = x / np.reshape(problem["temperature"], (-1, 1)).astype(np.float32)  # one, or one of each token
    top, total, mine = x.max(axis=1), np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    bounds = [vocab * rank // RANKS for rank in range(RANKS + 1)]
    for begin, end in zip(bounds, bounds[1:]):
        total += np.exp(x[:, begin:end] - top[:, None]).sum(axis=1)
        is_here = (targets >= begin) & (targets < end)
        mine[is_here] += x[is_here, targets[is_here]]
    is_id = (targets >= 0) & (targets < vocab)
    return np.where(is_id, mine - top - np.log(total), 0)


FUNCTIONS = {"logprobs/logprob": logprob}
