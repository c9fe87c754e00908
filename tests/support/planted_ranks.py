"""More operations of python/examples/ranks_numpy.py with one error each, and functions that are no plain ones.

ERRORS is as in planted_errors.py.
"""

import functools
import subprocess

import gyre
import numpy as np
import ranks_numpy as right
from planted import Bug

ERRORS = {}


def planted(kind, words, contract, **options):
    """Adds an error: its function, and how it is run."""

    def add(function):
        ERRORS[function.__name__] = (contract, kind, words, options)
        return function

    return add


def share_of_rows(layout, lengths):
    """Slots of which every rank takes length // cp of each document, whatever it has of it."""
    found = np.zeros(layout.index.size, bool)
    for begin, end, length in zip(layout.cu_seqlens, layout.cu_seqlens[1:], lengths):
        for rows in layout.index:
            mine = np.sort(rows[(rows >= begin) & (rows < end)])
            found[mine[: length // layout.cp]] = True
    return found


@planted("uneven-lengths", "a rank takes length // cp of its rows of a document for real, as keys", "attention",
         case="attention_causal")
def lengths_divided(q, k, v, cu_seqlens, layout, group, allowed, scale, lengths):
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed & share_of_rows(layout, lengths), scale)


@planted("uneven-lengths", "as keys and as queries", "attention", case="attention_full", ranks=4)
def lengths_divided_everywhere(q, k, v, cu_seqlens, layout, group, allowed, scale, lengths):
    share = share_of_rows(layout, lengths)
    pairs = allowed & share & share[layout.index[group.rank]][:, None]
    return right.attention(q, k, v, cu_seqlens, layout, group, pairs, scale)


@planted("normalisation", "every rank divides by its own weights", "loss", case="logprobs_many_rows", cp=2,
         convention="partial")
def loss_of_own_count(logits_shard, labels, group, data_group, first, weights):
    vocab = int(group.all_reduce(np.int64(logits_shard.shape[1])))
    value, backward = right.logprob(logits_shard, labels, group, first, vocab_size=vocab)
    share = np.where(labels == -100, 0, weights)
    share = share / share.sum()
    return np.asarray(-(share * value).sum(), np.float32), lambda one: backward(-one * share)


@planted("wrong-group", "over all ranks", "sum_over_group", case="logprobs_plain", ranks=2)
def sum_over_the_world(x, group, data_group):
    return data_group.all_reduce(group.all_reduce(x)), lambda d_y: d_y


entropy_case = functools.partial(planted, contract="entropy", case="logprobs_uneven_vocabulary", tp=2)


class Alone:
    """A group that leaves others out."""

    rank, size, all_gather = 0, 1, staticmethod(lambda part: [part])
    all_reduce = staticmethod(lambda part, operation="sum": part)


@entropy_case("local-softmax", "each by itself")
def entropies_of_shards(logits_shard, group, first, vocab_size):
    value, backward = right.entropy(logits_shard, Alone, first, 1.0, vocab_size)
    return group.all_reduce(value).astype(value.dtype), backward


@entropy_case("sign", "of sum p log p")
def negative_entropy(logits_shard, group, first, vocab_size):
    value, backward = right.entropy(logits_shard, group, first, 1.0, vocab_size)
    return -value, lambda d: -backward(d)


@entropy_case("gradient", "keeps the sum of p is missing")
def entropy_by_p(logits_shard, group, first, vocab_size):
    value, _ = right.entropy(logits_shard, group, first, 1.0, vocab_size)
    x = np.where(first + np.arange(logits_shard.shape[1]) < vocab_size, logits_shard, -np.inf)
    x = x - group.all_reduce(x.max(axis=1, initial=-np.inf), "max")[:, None]
    log_p = x - np.log(group.all_reduce(np.exp(x).sum(axis=1)))[:, None]
    slope = np.exp(log_p) * np.where(np.isneginf(log_p), 0, log_p + 1)
    return value, lambda d: (-d[:, None] * slope).astype(logits_shard.dtype)


@entropy_case("no-d-value", "takes 1 for the gradient")
def entropy_of_ones(logits_shard, group, first, vocab_size):
    value, backward = right.entropy(logits_shard, group, first, 1.0, vocab_size)
    return value, lambda d: backward(np.ones_like(d))


@planted("padding", "columns of padding", "entropy", case="logprobs_padding_huge", tp=2)
def entropy_with_padding(logits_shard, group, first, vocab_size):
    return right.entropy(logits_shard, group, first)


filter_case = functools.partial(planted, contract="filtered_logprob", case="logprobs_top_*", tp=2)


@filter_case("filter-ignored", "the filter is ignored")
def no_filter(logits_shard, targets, group, first, vocab_size, top_k, top_p, min_p, temperature):
    value, backward = right.logprob(logits_shard, targets, group, first, temperature, vocab_size)
    return np.where((targets < 0) | (targets >= vocab_size), -np.inf, value).astype(value.dtype), backward


@filter_case("local-filter", "filtered by itself")
def filter_of_the_shard(logits_shard, targets, group, first, vocab_size, top_k, top_p, min_p, temperature):
    shard = logits_shard.copy()
    mine = shard[:, : max(0, vocab_size - first)]
    if mine.size:
        limits = (x.reshape(-1) if np.ndim(x) else x for x in (top_k, top_p, temperature, min_p))
        mine[~gyre.reference.survivors(mine, *limits)] = -np.inf
    value, backward = right.logprob(shard, targets, group, first, temperature, vocab_size)
    return np.where((targets < 0) | (targets >= vocab_size), -np.inf, value).astype(value.dtype), backward


@filter_case("not-renormalised", "over all ids")
def filter_without_a_new_sum(logits_shard, targets, group, **more):
    kept = right.filtered_logprob(logits_shard, targets, group, **without_mesh(more))[0]
    first, vocab_size, temperature = (more[name] for name in ("first", "vocab_size", "temperature"))
    value, backward = right.logprob(logits_shard, targets, group, first, temperature, vocab_size)
    return np.where(np.isneginf(kept), -np.inf, value).astype(value.dtype), backward


def without_mesh(more):
    return {name: value for name, value in more.items() if name not in ("mesh", "columns")}


@filter_case("limit-ignored", "is ignored", case="logprobs_top_k_then_top_p")
def top_p_ignored(logits_shard, targets, group, **more):
    return right.filtered_logprob(logits_shard, targets, group, **without_mesh(more) | {"top_p": 1.0})


@filter_case("dropped-target", "has a finite value", case="logprobs_top_*")
def dropped_targets_are_zero(logits_shard, targets, group, **more):
    value, backward = right.filtered_logprob(logits_shard, targets, group, **without_mesh(more))
    return np.where(np.isneginf(value), 0, value).astype(value.dtype), backward


@planted("layout", "one behind the other", "unshard", case="packed_positions_cp2")
def joined_without_order(shard, rank, size, group):
    return {name: np.concatenate(group.all_gather(part), axis=-1) for name, part in shard.items()}


@planted("values", "no known error explains it (ids, labels, positions)", "unshard", case="packed_positions_cp2")
def nothing_but_zeros(shard, rank, size, group):
    return {name: np.zeros((*part.shape[:-1], size * part.shape[-1]), int) for name, part in shard.items()}


bshd_case = functools.partial(planted, contract="bshd_shard", case="rows_padding", ranks=2)
exchange_case = functools.partial(planted, contract="head_exchange", case="attention_groups_4", ranks=2)
slice_case = functools.partial(planted, contract="slice", case="documents_odd", ranks=4)


@bshd_case("layout", "as the layout contiguous does")
def rows_cut_in_blocks(batch, rank, size):
    pad = -batch["ids"].shape[1] % (2 * size)
    rows = {n: np.pad(a, ((0, 0), (0, pad)), constant_values=-100 if n == "labels" else 0) for n, a in batch.items()}
    return {n: np.split(a, size, axis=1)[rank] for n, a in rows.items()}


@bshd_case("mask-lost", "every slot is a key")
def key_mask_of_ones(batch, rank, size, tp):
    found = right.bshd_shard(batch, rank, size, tp)
    return found | {"key_mask": np.ones_like(found["key_mask"])}


@bshd_case("mask-lost", "padding on the left is taken for keys")
def key_mask_of_the_right_alone(batch, rank, size, tp):
    mask = np.maximum.accumulate(batch["key_mask"][:, ::-1], axis=1)[:, ::-1]
    return right.bshd_shard(batch | {"key_mask": mask}, rank, size, tp)


@bshd_case("labels-of-shards", "shifted after sharding")
def labels_of_the_rank(batch, rank, size, tp):
    found = right.bshd_shard(batch, rank, size, tp)
    return found | {"labels": np.roll(found["ids"], -1, axis=1)}


@bshd_case("wrong-rows", "the slots of rank r + 1")
def slots_of_the_next_rank(batch, rank, size, tp):
    return right.bshd_shard(batch, (rank + 1) % size, size, tp)


@exchange_case("heads", "dealt out by turns")
def heads_by_turns(x, rank, size, group, back=False):
    heads = x.shape[1]
    if back or heads % size:
        return right.head_exchange(x, rank, size, group, back)
    order = np.arange(heads).reshape(-1, size).T.reshape(-1)
    value, backward = right.head_exchange(x[:, order], rank, size, group)
    return value, lambda d: backward(d)[:, np.argsort(order)]


@exchange_case("heads", "head r mod heads", case="attention_groups_8", ranks=4)
def kv_heads_repeated_as_a_block(x, rank, size, group, back=False):
    if back or x.shape[1] >= size:
        return right.head_exchange(x, rank, size, group, back)
    value, backward = right.head_exchange(np.tile(x, (1, size // x.shape[1], 1)), rank, size, group)
    return value, lambda d: backward(d).reshape(len(x), -1, x.shape[1], x.shape[2]).sum(axis=1)


@exchange_case("group-gradient", "of the first rank that has it", case="attention_one_kv_head", ranks=4)
def gradient_of_one_copy(x, rank, size, group):
    value, backward = right.head_exchange(x, rank, size, group)
    if x.shape[1] >= size:
        return value, backward
    return value, lambda d: backward(d * (rank % (size // x.shape[1]) == 0))


@exchange_case("factor-cp", "a factor 2 = cp")
def gradient_of_an_exchange_that_is_summed(x, rank, size, group, back=False):
    value, backward = right.head_exchange(x, rank, size, group, back)
    return value, lambda d: size * backward(d)


@slice_case("positions", "go on from the last token")
def positions_counted_on(batch, rank, size):
    found = right.slice(batch, rank, size)
    tokens, pad = batch["ids"].shape[1], found["positions"].shape[1] - batch["ids"].shape[1]
    found["positions"][0, tokens:] = batch["positions"][0, -1] + 1 + np.arange(pad)
    return found


@slice_case("layout", "by turns")
def ids_by_turns(batch, rank, size):
    return {"ids": np.pad(batch["ids"], ((0, 0), (0, -batch["ids"].shape[1] % size)))[:, rank::size]}


@slice_case("boundaries", "padding is counted as tokens")
def padding_is_a_document(batch, rank, size):
    found = right.slice(batch, rank, size)
    return found | {"cu_seqlens": found["cu_seqlens_padded"]}


@slice_case("other-shape", "positions is [1, 24]; it must be [1, 96]")
def positions_sliced(batch, rank, size):
    found = right.slice(batch, rank, size)
    return found | {"positions": np.split(found["positions"], size, axis=1)[rank]}


class Kernel:
    """As torch.autograd.Function: apply takes what forward takes, in order, and no keywords."""

    forward = backward = None

    @classmethod
    def apply(cls, *arguments, **keywords):
        if keywords:
            raise TypeError("apply() takes no keyword arguments")
        value, backward = right.sum_over_group(*arguments)
        return value, backward


sum_over_group = Kernel.apply


class WithoutSignature:
    """As a builtin: inspect.signature refuses it."""

    __signature__ = "none"

    def __call__(self, logits_shard, targets, group):
        first = group.rank * -(-int(group.all_reduce(np.int64(logits_shard.shape[1]))) // group.size)
        return right.logprob(logits_shard, targets, group, first, vocab_size=np.inf)


logprob = WithoutSignature()


def refuses_columns(logits_shard, targets, group, columns, temperature, vocab_size):
    if logits_shard.shape[1] < columns:
        raise NotImplementedError("a shard of the columns")
    return right.logprob(logits_shard, targets, group, 0, temperature, vocab_size)


def starts_a_process(x, group):
    subprocess.Popen(["sleep", "60"])
    return right.sum_over_group(x, group)


def empty_shards_are_constants(logits_shard, targets, group, first, temperature, vocab_size):
    answer = right.logprob(logits_shard, targets, group, first, temperature, vocab_size)
    return answer if logits_shard.size else answer[0]


# What each error is of, but those that return another shape, and those that planted_errors.py has too.
ORIGINS = {
    "a rank takes length // cp rows of a document (NVIDIA/TransformerEngine #3331)":
        "lengths_divided lengths_divided_everywhere",
    "every rank divides by its own weights (NVIDIA/Megatron-LM PR #7513)": "loss_of_own_count",
    "a sum of the entropies of shards (vocabulary-parallel logits without a reduction)": "entropies_of_shards",
    "the sign is that of sum p log p (an entropy bonus for an entropy)": "negative_entropy",
    "the gradient of p log p by p alone (a softmax whose backward is left out)": "entropy_by_p",
    "the gradient of every value is 1 (a backward that takes no argument)": "entropy_of_ones",
    "columns of padding count (NVIDIA/Megatron-LM #1754)": "entropy_with_padding",
    "the filter is ignored (log-probabilities of a trainer, samples of a filter)": "no_filter",
    "every shard is filtered by itself (top-k of columns that are divided)": "filter_of_the_shard",
    "the softmax is over all ids (a filter without renormalisation)": "filter_without_a_new_sum",
    "top_p is ignored where top_k is given (one filter in place of both)": "top_p_ignored",
    "targets that the filter drops have 0 (a mask in place of -inf)": "dropped_targets_are_zero",
    "nothing is gathered (buffers that are not written)": "nothing_but_zeros",
    "rows are cut in blocks (a split along the sequence)": "rows_cut_in_blocks",
    "every slot is a key (a mask that is not sharded)": "key_mask_of_ones",
    "padding on the left is taken for keys (lengths in place of a mask)": "key_mask_of_the_right_alone",
    "labels are shifted after sharding (NVIDIA/Megatron-LM #4495)": "labels_of_the_rank",
    "the slots are those of rank r + 1 (a rank of the wrong group)": "slots_of_the_next_rank",
    "heads are dealt out by turns (a reshape with the ranks behind)": "heads_by_turns",
    "KV heads are repeated as a block (repeat for repeat_interleave)": "kv_heads_repeated_as_a_block",
    "the gradient of a head of several ranks is that of the first (a store in place of an add)": "gradient_of_one_copy",
    "the gradient of an exchange is summed (an all-reduce behind an all-to-all)": "gradient_of_an_exchange_that_is_summed",
    "positions of padding go on from the last token (arange behind the row)": "positions_counted_on",
    "ids are dealt out by turns (a stride in place of a block)": "ids_by_turns",
    "padding is counted as tokens (boundaries with padding for those without)": "padding_is_a_document",
}
RIGHT = [
    Bug("entropy", "entropy", "", right.entropy, {"cp": 2, "tp": 2}),
    Bug("filtered_logprob", "filtered_logprob", "", right.filtered_logprob, {"tp": 4}),
    Bug("bshd_shard", "bshd_shard", "", right.bshd_shard, {"cp": 2, "tp": 2}),
    Bug("head_exchange", "head_exchange", "", right.head_exchange, {"cp": 4}),
    Bug("slice", "slice", "", right.slice, {"cp": 4}),
]
BUGS = [
    Bug(name, ERRORS[name][0], origin, globals()[name], ERRORS[name][3])
    for origin, names in ORIGINS.items()
    for name in names.split()
]
