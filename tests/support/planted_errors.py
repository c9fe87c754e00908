"""Operations of python/examples/ranks_numpy.py with one error each, as users of other frameworks report them.

ERRORS names the contract, the kind of error that gyre conform must find, and words of what it must say.
"""

import functools
import os
import time

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


attention_case = functools.partial(planted, contract="attention", case="attention_causal")


def places(layout, rank, lengths):
    """Slots of the rank's rows [rows, 1] and all slots; their documents; which are real."""
    slots = np.arange(layout.cu_seqlens[-1])
    document = np.searchsorted(layout.cu_seqlens, slots, side="right") - 1
    real = slots - layout.cu_seqlens[document] < np.asarray(lengths)[document]
    i = layout.index[rank][:, None]
    return i, slots, document[i] == document, real[i] & real


def owner_of(layout):
    found = np.empty(layout.index.size, int)
    found[layout.index] = np.arange(len(layout.index))[:, None]
    return found


@attention_case("leak", "a key of another document")
def leak_between_documents(q, k, v, cu_seqlens, layout, group, allowed, scale, lengths):
    i, j, _, real = places(layout, group.rank, lengths)
    return right.attention(q, k, v, cu_seqlens, layout, group, real & (j <= i), scale)


@planted("scale-lost", "gradients of q and k lack the scale", "attention", case="attention_groups_8")
def gradients_without_scale(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)

    def wrong(d_out):
        d_q, d_k, d_v = backward(d_out)
        return d_q / scale, d_k / scale, d_v

    return out, lse, wrong


@planted("ranks-disagree", "rank 1 returned no d_logprob", "logprob", case="logprobs_plain")
def no_gradient_on_one_rank(logits_shard, targets, group, first, temperature, vocab_size):
    answer = right.logprob(logits_shard, targets, group, first, temperature, vocab_size)
    return answer if group.rank == 0 else answer[0]


@planted("window-lost", "the window is lost", "attention", case="attention_window_1")
def lost_window(q, k, v, cu_seqlens, layout, group, scale, lengths, window):
    i, j, same, real = places(layout, group.rank, lengths)
    return right.attention(q, k, v, cu_seqlens, layout, group, real & same & (j <= i), scale)


@planted("window-off-by-one", "wider by one", "attention", case="attention_window_sinks")
def window_off_by_one(q, k, v, cu_seqlens, layout, group, scale, lengths, window, sinks):
    i, j, same, real = places(layout, group.rank, lengths)
    pairs = real & same & (j <= i) & (j >= i - window)
    return right.attention(q, k, v, cu_seqlens, layout, group, pairs, scale, sinks)


@attention_case("mask-lost-under-cp", "for keys of other ranks")
def mask_lost_under_cp(q, k, v, cu_seqlens, layout, group, allowed, scale, lengths):
    i, j, same, real = places(layout, group.rank, lengths)
    own = owner_of(layout) == group.rank
    return right.attention(q, k, v, cu_seqlens, layout, group, np.where(own, allowed, real & same), scale)


@attention_case("local-keys", "its own keys alone")
def local_keys(q, k, v, cu_seqlens, layout, group, allowed, scale):
    own = owner_of(layout) == group.rank
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed & own, scale)


@attention_case("dropped-shard", "the keys of rank 1", ranks=4)
def dropped_shard(q, k, v, cu_seqlens, layout, group, allowed, scale):
    lost = (owner_of(layout) == 1) & (group.rank != 1)
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed & ~lost, scale)


@attention_case("dropped-shard", "rank r + 1", ranks=4)
def last_step_of_the_ring(q, k, v, cu_seqlens, layout, group, allowed, scale):
    lost = owner_of(layout) == (group.rank + 1) % group.size
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed & ~lost, scale)


@attention_case("local-positions", "taken for positions", layout="striped")
def mask_by_rows(q, k, v, cu_seqlens, layout, group, allowed, scale, lengths):
    _, j, same, real = places(layout, group.rank, lengths)
    row = np.empty(layout.index.size, int)
    row[layout.index] = np.arange(layout.index.shape[1])
    pairs = real & same & (row[j] <= np.arange(len(q))[:, None])
    return right.attention(q, k, v, cu_seqlens, layout, group, pairs, scale)


@planted("padding", "padding is read as keys", "attention", case="attention_uneven_full")
def padding_read(q, k, v, cu_seqlens, layout, group, scale, mask, lengths):
    i, _, same, real = places(layout, group.rank, lengths)
    mine = np.isin(i, layout.tokens)
    return right.attention(q, k, v, cu_seqlens, layout, group, same & mine, scale)


@planted("scale", "1 / sqrt(D)", "attention", case="attention_scale")
def wrong_scale(q, k, v, cu_seqlens, layout, group, allowed, scale):
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, q.shape[2] ** -0.5)


@attention_case("factor-cp", "a factor 2 = cp")
def gradients_times_cp(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return out, lse, lambda d_out: [group.size * g for g in backward(d_out)]


@attention_case("gradient-dropped", "lack those of other ranks' queries")
def gradients_not_sent_home(q, k, v, cu_seqlens, layout, group, allowed, scale):
    class Alone:
        rank, size, all_gather = group.rank, group.size, group.all_gather

        @staticmethod
        def all_to_all(parts):
            return [parts[group.rank]]

    return right.attention(q, k, v, cu_seqlens, layout, Alone, allowed, scale)


@attention_case("lse-base", "base 2")
def lse_to_the_base_2(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return out, (lse / np.log(2)).astype(lse.dtype), backward


@planted("zero-gradient", "d_sinks is 0", "attention", case="attention_sinks")
def sinks_without_gradient(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks)
    return out, lse, lambda d_out: [*backward(d_out)[:3], *([] if sinks is None else [np.zeros_like(sinks)])]


@planted("sinks-repeated", "every rank adds the sink", "attention", case="attention_sinks")
def sinks_of_every_rank(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks):
    repeated = None if sinks is None else sinks + np.float32(np.log(group.size))
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale, repeated)


@planted("sinks-ignored", "sinks are ignored", "attention", case="attention_sinks_full")
def sinks_ignored(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return out, lse, lambda d_out: [*backward(d_out), *([] if sinks is None else [np.ones_like(sinks)])]


@planted("group-gradient", "of the first query head alone", "attention", case="attention_groups_4")
def gradient_of_one_head(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    first = np.arange(q.shape[1]) % (q.shape[1] // k.shape[1]) == 0

    def alone(d_out):
        mine = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)[2](d_out * first[:, None])
        return [backward(d_out)[0], *mine[1:]]

    return out, lse, alone


@planted("shared-gradient", "the last head alone", "attention", case="attention_keys_shared")
def shared_gradient_of_one_head(q, k, v, cu_seqlens, layout, group, allowed, scale, k_shared):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale, k_shared=k_shared)

    def alone(d_out):
        last = np.where(np.arange(q.shape[1]) == q.shape[1] - 1, 1, 0)
        return [*backward(d_out)[:3], *backward((d_out * last[:, None]).astype(d_out.dtype))[3:]]

    return out, lse, alone


@planted("kv-heads", "head h reads h mod K", "attention", case="attention_groups_4")
def heads_mixed_up(q, k, v, cu_seqlens, layout, group, allowed, scale):
    share = q.shape[1] // k.shape[1]
    order = np.arange(q.shape[1]).reshape(share, k.shape[1]).T.reshape(-1)  # heads that read KV head 0 first
    back = np.argsort(order)
    out, lse, backward = right.attention(q[:, order], k, v, cu_seqlens, layout, group, allowed, scale)

    def unordered(d_out):
        d_q, d_k, d_v = backward(d_out[:, order])
        return d_q[:, back], d_k, d_v

    return out[:, back], lse[:, back], unordered


@attention_case("wrong-rows", "order of the stream")
def rows_in_stream_order(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)

    def reordered(part):
        whole = np.empty((layout.index.size, *part.shape[1:]), part.dtype)
        for rows, piece in zip(layout.index, group.all_gather(part)):
            whole[rows] = piece
        return np.split(whole, group.size)[group.rank]

    return reordered(out), reordered(lse), backward


@attention_case("nan", "NaN in out of rank 1")
def nan_on_one_rank(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return (out * np.nan if group.rank == 1 else out), lse, backward


@attention_case("other-shape", "rank 1: out is")
def other_shape(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return (out[:-1] if group.rank == 1 else out), lse, backward


@attention_case("other-type", "out is float64; it must be float32")
def other_type(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return (out.astype(np.float64) if group.rank == 0 else out), lse, backward


@attention_case("hang", "rank 1 hangs", timeout=2)
def hang(q, k, v, cu_seqlens, layout, group, allowed, scale):
    while group.rank == 1:
        print("hanging", flush=True)
        time.sleep(60)
    return np.zeros_like(q), None


@attention_case("dead-rank", "rank 1 died: exit code 5")
def dead_rank(q, k, v, cu_seqlens, layout, group, allowed, scale):
    if group.rank == 1:
        os._exit(5)
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


@attention_case("raised", "rank 1: ValueError: no such head")
def raises(q, k, v, cu_seqlens, layout, group, allowed, scale):
    if group.rank == 1:
        raise ValueError("no such head")
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


@planted("sinks-ignored", "d_sinks is 0 everywhere", "attention", case="attention_sinks_offset")
def sinks_dropped_on_the_way(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return out, lse, lambda d_out: [*backward(d_out), *([] if sinks is None else [np.zeros_like(sinks)])]


@planted("mask-lost", "the regions are lost: the mask is causal", "attention", case="attention_prefix")
def prefix_lost(q, k, v, cu_seqlens, layout, group, scale, mask, regions, lengths):
    i, j, same, real = places(layout, group.rank, lengths)
    return right.attention(q, k, v, cu_seqlens, layout, group, real & same & (j <= i), scale)


@planted("mask-lost", "the regions are lost: the mask is causal", "attention", case="attention_blocks")
def blocks_lost(q, k, v, cu_seqlens, layout, group, scale, mask, regions, lengths):
    return prefix_lost(q, k, v, cu_seqlens, layout, group, scale, mask, regions, lengths)


@planted("no-key", "rows that see no key have an output", "attention", case="attention_no_key")
def weights_of_one(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    return np.where(allowed.any(axis=1)[:, None, None], out, v.sum() / max(1, v.size)), lse, backward


@planted("nan", "NaN in lse, out of ranks", "attention", case="attention_fewer_keys")
def softmax_of_nothing(q, k, v, cu_seqlens, layout, group, allowed, scale):
    out, lse, backward = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    with np.errstate(invalid="ignore"):
        return out / allowed.any(axis=1)[:, None, None], lse + (lse - lse), backward


model_case = functools.partial(planted, contract="model", case="attention_uneven")


@model_case("leak", "y depends on a token of another document")
def model_that_leaks(x, cu_seqlens, layout, group, lengths):
    i, j, _, real = places(layout, group.rank, lengths)
    return right.model(x, cu_seqlens, layout, group, real & (j <= i))


@model_case("mask-lost", "y depends on a token that the mask hides")
def model_that_sees_the_future(x, cu_seqlens, layout, group, lengths):
    _, _, same, real = places(layout, group.rank, lengths)
    return right.model(x, cu_seqlens, layout, group, real & same)


@model_case("gradient-dropped", "does not change that of other ranks' tokens", case="attention_long")
def model_without_remote_gradients(x, cu_seqlens, layout, group, allowed):
    class Alone:
        rank, size, all_gather = group.rank, group.size, group.all_gather

        @staticmethod
        def all_to_all(parts):
            return [parts[group.rank]]

    return right.model(x, cu_seqlens, layout, Alone, allowed)


@model_case("sinks-ignored", "y does not depend on the sinks", case="attention_sinks")
def model_without_sinks(x, cu_seqlens, layout, group, allowed, sinks):
    return right.model(x, cu_seqlens, layout, group, allowed)


@model_case("not-deterministic", "dropout?")
def model_with_dropout(x, cu_seqlens, layout, group, allowed):
    y, backward = right.model(x, cu_seqlens, layout, group, allowed)
    kept = 2 * np.random.default_rng().integers(0, 2, y.shape)
    return kept * y, lambda d_y: backward(kept * d_y)


def model_that_must_get_sinks(x, cu_seqlens, layout, group, allowed, sinks):
    return right.model(x, cu_seqlens, layout, group, allowed, sinks)


def attention_that_must_get_regions(q, k, v, cu_seqlens, layout, group, allowed, scale, regions):
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


@model_case("nothing-moves", "does not depend on its own x")
def model_that_is_constant(x, cu_seqlens, layout, group):
    return np.ones_like(x)


logprob_case = functools.partial(planted, contract="logprob", case="logprobs_uneven_vocabulary")


@logprob_case("label-shift", "row i has the target of row i + 1")
def label_shift(logits_shard, targets, group, first, vocab_size):
    return right.logprob(logits_shard, np.roll(targets, -1), group, first, 1.0, vocab_size)


@logprob_case("local-softmax", "over the target's shard alone")
def softmax_of_one_shard(logits_shard, targets, group, first, vocab_size):
    class Alone:
        rank, size, all_gather = 0, 1, staticmethod(lambda part: [part])
        all_reduce = staticmethod(lambda part: part)

    value, backward = right.logprob(logits_shard, targets, Alone, first, 1.0, vocab_size)
    return group.all_reduce(value).astype(value.dtype), backward


@logprob_case("dropped-shard", "lacks the columns of tp rank 1", tp=4)
def columns_dropped(logits_shard, targets, group, first, vocab_size):
    class Lossy:
        rank, size, all_reduce = group.rank, group.size, group.all_reduce
        zeros = [1, 0, 1]  # of what rank 1 sends, the sum gets lost

        @staticmethod
        def all_gather(part):
            parts, kept = group.all_gather(part), Lossy.zeros.pop()
            return [x if kept or rank != 1 else np.zeros_like(x) for rank, x in enumerate(parts)]

    return right.logprob(logits_shard, targets, Lossy, first, 1.0, vocab_size)


@logprob_case("factor-tp", "a factor 2 = tp")
def gradient_times_tp(logits_shard, targets, group, first, vocab_size):
    value, backward = right.logprob(logits_shard, targets, group, first, 1.0, vocab_size)
    return value, lambda d_value: group.size * backward(d_value)


@planted("temperature", "the gradient lacks 1 / temperature", "logprob", case="logprobs_temperature")
def gradient_without_temperature(logits_shard, targets, group, first, vocab_size, temperature):
    value, backward = right.logprob(logits_shard, targets, group, first, temperature, vocab_size)
    return value, lambda d_value: (temperature * backward(d_value)).astype(np.float32)


@planted("padding", "columns of padding", "logprob", case="logprobs_padding_huge")
def padding_in_the_softmax(logits_shard, targets, group, first, vocab_size):
    return right.logprob(logits_shard, targets, group, first, 1.0, 1 << 30)


@planted("unknown-target", "is clamped", "logprob", case="logprobs_nobody")
def unknown_target_clamped(logits_shard, targets, group, first, vocab_size):
    return right.logprob(logits_shard, np.clip(targets, 0, vocab_size - 1), group, first, 1.0, vocab_size)


@logprob_case("uneven-shards", "its rank times its own columns")
def equal_shards_assumed(logits_shard, targets, group, vocab_size):
    x = logits_shard - group.all_reduce(logits_shard.max(axis=1, initial=-np.inf), "max")[:, None]
    total = group.all_reduce(np.exp(x).sum(axis=1))
    column = targets - group.rank * x.shape[1]  # as if all shards were as wide as this one
    mine = (column >= 0) & (column < x.shape[1])
    one_hot = np.where(mine[:, None], np.arange(x.shape[1]) == column[:, None], False)
    value = group.all_reduce(np.where(one_hot, x, 0).sum(axis=1)) - np.log(total)
    return value, lambda d_value: (d_value[:, None] * (one_hot - np.exp(x) / total[:, None])).astype(x.dtype)


@logprob_case("ranks-disagree", "ranks 0 and 1 return different")
def value_of_the_owner_alone(logits_shard, targets, group, first, vocab_size):
    value, backward = right.logprob(logits_shard, targets, group, first, 1.0, vocab_size)
    return np.where((targets >= first) & (targets < first + logits_shard.shape[1]), value, 0), backward


loss_case = functools.partial(planted, contract="loss", case="logprobs_uneven_vocabulary", cp=2)


def scaled(factor, *arguments):
    value, backward = right.loss(*arguments)
    return np.asarray(value * factor, np.float32), lambda one: (factor * backward(one)).astype(np.float32)


@loss_case("factor-cp", "a factor 2 = cp")
def loss_times_cp(logits_shard, labels, group, data_group, first, weights):
    return scaled(data_group.size, logits_shard, labels, group, data_group, first, weights)


@loss_case("normalisation", "rows that are ignored are counted")
def ignored_counted(logits_shard, labels, group, data_group, first, weights, count):
    rows = data_group.all_reduce(np.int64(len(labels)))
    return scaled(count / rows, logits_shard, labels, group, data_group, first, weights)


@loss_case("normalisation", "a mean of the ranks' means", case="logprobs_float16")
def mean_of_means(logits_shard, labels, group, data_group, first, weights, count):
    mine = np.where(labels == -100, 0, weights).sum()
    return right.loss(logits_shard, labels, group, data_group, first, weights / mine)


@loss_case("normalisation", "a mean of the replicas' means", dp=2, case="logprobs_float16")
def mean_of_replicas(logits_shard, labels, group, data_group, cp_group, dp_group, first, weights):
    mine = cp_group.all_reduce(np.where(labels == -100, 0, weights).sum())
    return right.loss(logits_shard, labels, group, data_group, first, weights / mine)


@loss_case("factor-dp", "a factor 2 = dp", cp=1, dp=2)
def loss_times_dp(logits_shard, labels, group, data_group, dp_group, first, weights):
    value, backward = right.loss(logits_shard, labels, group, data_group, first, weights)
    return value * dp_group.size, lambda d_loss: backward(d_loss * dp_group.size)


@loss_case("normalisation", "a sum, not a mean")
def sum_of_losses(logits_shard, labels, group, data_group, first, weights, count):
    return scaled(count, logits_shard, labels, group, data_group, first, weights)


@loss_case("label-shift", "row i has the label of row i + 1, of its rank's rows")
def rolled_on_the_rank(logits_shard, labels, group, data_group, first, weights):
    return right.loss(logits_shard, np.roll(labels, -1), group, data_group, first, np.roll(weights, -1))


@loss_case("weights", "weights are ignored")
def weights_ignored(logits_shard, labels, group, data_group, first, weights):
    return right.loss(logits_shard, labels, group, data_group, first, np.ones_like(weights))


@loss_case("convention", "the convention is partial, not mean")
def part_of_the_rank(logits_shard, labels, group, data_group, first, weights, count):
    value, backward = right.loss(logits_shard, labels, group, data_group, first, weights)
    mine = right.logprob(logits_shard, labels, group, first, vocab_size=logits_shard.shape[1])[0]
    counted = np.where(labels == -100, 0, weights)
    return np.asarray(-(counted * mine).sum() / count, np.float32), backward


@loss_case("dropped-shard", "the rows of cp rank 1")
def rows_dropped(logits_shard, labels, group, data_group, first, weights):
    return right.loss(logits_shard, labels, group, data_group, first, weights * (data_group.rank != 1))


shard_case = functools.partial(planted, contract="shard", case="packed_odd_cp2")


@shard_case("labels-of-shards", "shifted after sharding")
def labels_shifted_after_sharding(batch, rank, size, layout):
    found = right.shard(batch, rank, size, layout)
    return {**found, "labels": np.roll(found["ids"], -1)}


@shard_case("labels-rolled", "rolled over the stream")
def labels_rolled(batch, rank, size, layout):
    return right.shard({**batch, "labels": np.roll(batch["ids"], -1)}, rank, size, layout)


@shard_case("labels-rolled", "by boundaries without padding")
def labels_rolled_without_padding(batch, rank, size, layout):
    labels = batch["ids"].copy()
    for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:]):
        labels[begin:end] = np.roll(labels[begin:end], -1)
    return right.shard({**batch, "labels": labels}, rank, size, layout)


@shard_case("padding", "0, not -100")
def padding_has_labels(batch, rank, size, layout):
    return right.shard({**batch, "labels": np.maximum(batch["labels"], 0)}, rank, size, layout)


@shard_case("positions", "anew on every rank")
def positions_of_the_rank(batch, rank, size, layout):
    found = right.shard(batch, rank, size, layout)
    return {**found, "positions": np.broadcast_to(np.arange(len(found["ids"])), found["positions"].shape)}


ERRORS["positions_of_the_rank_on_all_axes"] = (*ERRORS["positions_of_the_rank"][:3], {"case": "packed_positions_cp2"})
positions_of_the_rank_on_all_axes = positions_of_the_rank


@planted("positions", "count the stream", "shard", case="packed_positions_cp2")
def positions_of_the_stream(batch, rank, size, layout):
    counted = np.broadcast_to(np.arange(len(batch["ids"])), batch["positions"].shape)
    return right.shard({**batch, "positions": counted}, rank, size, layout)


@planted("positions", "every axis has the positions of the first", "shard", case="packed_positions_cp2")
def positions_of_one_axis(batch, rank, size, layout):
    found = right.shard(batch, rank, size, layout)
    return {**found, "positions": np.broadcast_to(found["positions"][:1], found["positions"].shape)}


@shard_case("boundaries", "of the whole stream over cp")
def boundaries_divided(batch, rank, size, layout):
    return {**right.shard(batch, rank, size, layout), "cu_seqlens": batch["cu_seqlens"] // size}


@shard_case("layout", "the layout is zigzag")
def another_layout(batch, rank, size):
    chunks = {name: np.split(batch[name], 2 * size, axis=-1) for name in ("ids", "labels", "positions")}
    return {name: np.concatenate([c[rank], c[2 * size - 1 - rank]], axis=-1) for name, c in chunks.items()}


@shard_case("dropped-shard", "every rank has the shard of rank 0")
def same_shard_everywhere(batch, rank, size, layout):
    return right.shard(batch, 0, size, layout)


@planted("label-shift", "1 tokens on, not 2", "labels", case="packed_odd_cp2")
def shift_of_one(batch, shift, rank, size):
    return right.labels(batch, 1, rank, size)


@planted("labels-rolled", "rolled over the stream", "labels", case="packed_odd_cp2")
def shift_over_documents(batch, shift, rank, size):
    rolled = np.roll(batch["ids"], -shift)
    return right.shard({**batch, "labels": rolled}, rank, size, "dual-chunk-swap")["labels"]


@planted("layout", "one behind the other", "unshard", case="packed_odd_cp2")
def joined_without_order(shard, rank, size, group):
    return {name: np.concatenate(group.all_gather(part), axis=-1) for name, part in shard.items()}


relayout_case = functools.partial(planted, contract="relayout", case="packed_odd_cp2")
sum_case = functools.partial(planted, contract="sum_over_group", case="logprobs_plain", tp=2)


@relayout_case("layout", "no row moves")
def shards_as_they_are(rows, rank, size, group):
    return rows, lambda d_rows: d_rows


@relayout_case("gradient-dropped", "another rank have no gradient")
def gradient_of_own_rows(rows, rank, size, group, cu_seqlens_padded, source, target):
    value, backward = right.relayout(rows, rank, size, group, cu_seqlens_padded, source, target)
    index = [right.layout_of(name, cu_seqlens_padded, size).index[rank] for name in (source, target)]
    return value, lambda d: backward(d) * np.isin(*index)[:, None]


@relayout_case("factor-cp", "a factor 2 = cp")
def gradient_of_a_gather_that_is_summed(rows, rank, size, group, cu_seqlens_padded, source, target):
    value, backward = right.relayout(rows, rank, size, group, cu_seqlens_padded, source, target)
    return value, lambda d: size * backward(d)


@relayout_case("layout", "taken for those of zigzag")
def whole_stream_cut_head_and_tail(rows, rank, size, group, cu_seqlens_padded, target):
    source = "zigzag" if target == "contiguous" else "contiguous"
    return right.relayout(rows, rank, size, group, cu_seqlens_padded, source, target)


@sum_case("convention", "a factor tp = 2")
def sum_whose_gradient_is_summed(x, group):
    return group.all_reduce(x), group.all_reduce


@sum_case("convention", "other ranks are lost", convention="sum")
def sum_whose_gradient_is_not_summed(x, group):
    return right.sum_over_group(x, group)


@sum_case("no-gradient", "--forward-only")
def sum_without_gradient(x, group):
    return group.all_reduce(x)


@sum_case("gradient", "must be a constant", convention="none")
def constant_with_a_gradient(x, group):
    return right.sum_over_group(x, group)


@sum_case("zero", "the gradient is 0")
def sum_whose_gradient_is_lost(x, group):
    return group.all_reduce(x), np.zeros_like


@sum_case("factor-1/tp", "1/2 = 1/tp")
def mean_over_the_group(x, group):
    return group.all_reduce(x) / group.size, lambda d_y: d_y / group.size


@planted("wrong-group", "over all ranks", "sum_over_group", case="logprobs_plain", cp=2, tp=2)
def sum_over_everyone(x, group, data_group):
    return data_group.all_reduce(group.all_reduce(x)), lambda d_y: d_y


kl_case = functools.partial(planted, contract="topk_kl", case="logprobs_plain", tp=2)


@kl_case("convention", "the convention is advantage, not unbiased")
def kl_of_a_policy_gradient(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first):
    return right.topk_kl(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first, one=0.0)


@kl_case("tail", "targets outside of the ids is missing")
def kl_without_a_tail(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first):
    return right.topk_kl(logits_shard, ids, ids[:, 0], teacher_ids, teacher_ids[:, 0], group, first)


@kl_case("renormalised", "normalised over the ids")
def kl_of_the_ids_alone(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first):
    def log_softmax(x):
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    whole = np.concatenate(group.all_gather(logits_shard), axis=1)
    rows = np.arange(len(ids))[:, None]
    log_q, log_p = log_softmax(whole[rows, ids]), log_softmax(teacher_ids)
    outside = (ids != targets[:, None]).all(axis=1)
    q, gaps = np.exp(log_q), log_q - log_p
    norm = np.log(np.exp(whole[rows, ids]).sum(axis=1))
    sampled = np.where(outside, whole[rows[:, 0], targets] - norm - teacher_targets, 0)

    def backward(d_kl):
        weights, more = q * (gaps + 1), np.where(outside, sampled + 1, 0)
        found = np.zeros(whole.shape)
        np.add.at(found, (rows, ids), weights - q * (weights.sum(axis=1) + more)[:, None])
        found[rows[:, 0], targets] += more
        found = (found * d_kl[:, None]).astype(np.float32)
        return found[:, first : first + logits_shard.shape[1]]

    return ((q * gaps).sum(axis=1) + sampled).astype(np.float32), backward


@planted("dropped-document", "documents are in no bin", "pack", case="documents_odd")
def last_document_lost(lengths, capacity):
    return right.pack(lengths[:-1], capacity)


@planted("over-capacity", "its capacity is", "pack", case="documents_odd")
def bins_too_full(lengths, capacity):
    return right.pack(lengths, capacity + 8)


@planted("ranks-disagree", "return different bins", "pack", case="documents_odd")
def bins_by_rank(lengths, capacity, rank):
    return right.pack(lengths, capacity)[:: -1 if rank else 1]


# What each error is of; errors that end a rank, or return what the contract does not allow, are of no case.
ORIGINS = {
    "documents are not told apart (packing without cu_seqlens)": "leak_between_documents model_that_leaks",
    "gradients of q and k lack the scale (scaled scores of a kernel, unscaled ones of its backward)": "gradients_without_scale",
    "the window is lost (huggingface/accelerate #4177)": "lost_window",
    "the window is wider by one (`<=` in place of `<`)": "window_off_by_one",
    "the mask is lost for keys of other ranks (huggingface/accelerate PR #4177)": "mask_lost_under_cp",
    "a rank sees its own keys alone (context parallelism that is not wired to the kernel)": "local_keys",
    "the keys of one rank do not arrive (a ring of size - 1 steps)": "dropped_shard last_step_of_the_ring",
    "rows of a rank are taken for positions (PyTorch context_parallel, load balancing)": "mask_by_rows",
    "padding is read as keys (NVIDIA/TransformerEngine #1929)": "padding_read",
    "the scale is 1 / sqrt(D), whatever was asked for (softmax_scale)": "wrong_scale",
    "a factor cp of gradients (NovaSky-AI/SkyRL #1420)": "gradients_times_cp loss_times_cp",
    "gradients of keys and values lack those of other ranks (all-gather without reduce-scatter)":
        "gradients_not_sent_home model_without_remote_gradients",
    "lse to the base 2 (flashinfer-ai/flashinfer, lse)": "lse_to_the_base_2",
    "d_sinks is 0 (NVIDIA/TransformerEngine PR #3551)": "sinks_without_gradient",
    "sinks are dropped on the way (PrimeIntellect-ai/prime-rl #3397)":
        "sinks_ignored sinks_dropped_on_the_way model_without_sinks",
    "every rank adds the sink (InternLM/lmdeploy #3951)": "sinks_of_every_rank",
    "gradients of a KV head are those of one query head (a store in place of an add)": "gradient_of_one_head",
    "the gradient of shared elements is that of one head (pytorch/torchtitan PR #4313)": "shared_gradient_of_one_head",
    "KV heads are mixed up: head h reads h mod K (repeat for repeat_interleave)": "heads_mixed_up",
    "rows come back in the order of the stream (a layout that is not undone)": "rows_in_stream_order",
    "the regions are lost: the mask is causal (huggingface/trl PR #6843)": "prefix_lost blocks_lost model_that_sees_the_future",
    "rows that see no key have the mean of all values (flashinfer-ai/flashinfer PR #4401)": "weights_of_one",
    "rows that see no key are NaN (NVIDIA/TensorRT-LLM #17477)": "softmax_of_nothing",
    "dropout that nobody asked for (a module in training mode)": "model_with_dropout",
    "y does not depend on x (a buffer that is not written)": "model_that_is_constant",
    "labels are shifted twice (a causal LM's own shift)": "label_shift rolled_on_the_rank",
    "the softmax is over the target's shard (vocabulary-parallel logits without a reduction)": "softmax_of_one_shard",
    "the sum lacks the columns of one rank (a reduction over a smaller group)": "columns_dropped",
    "gradients are summed over the ranks that share the vocabulary (NVIDIA/Megatron-LM #906)": "gradient_times_tp",
    "the gradient lacks 1 / temperature (volcengine/verl #5957)": "gradient_without_temperature",
    "columns of padding count (NVIDIA/Megatron-LM #1754)": "padding_in_the_softmax",
    "a target that no column has is clamped to an id (mode='clip')": "unknown_target_clamped",
    "the first column is the rank times its own columns (NVIDIA/Megatron-LM, VocabUtility)": "equal_shards_assumed",
    "the rank that has the target alone has the value (an all-reduce that is missing)": "value_of_the_owner_alone",
    "rows that are ignored are counted (reduction='mean' after a mask)": "ignored_counted",
    "a mean of means (volcengine/verl #4250)": "mean_of_means mean_of_replicas",
    "a factor dp (NovaSky-AI/SkyRL #1420)": "loss_times_dp",
    "a sum in place of a mean (calculate_per_token_loss)": "sum_of_losses",
    "weights are ignored (a mask of booleans)": "weights_ignored",
    "the convention is another one (volcengine/verl #4250)":
        "part_of_the_rank sum_whose_gradient_is_summed sum_whose_gradient_is_not_summed kl_of_a_policy_gradient",
    "the rows of one rank do not count (a reduction over a smaller group)": "rows_dropped",
    "labels are shifted after sharding (NVIDIA/Megatron-LM #4495)": "labels_shifted_after_sharding",
    "labels are rolled over the stream (NVIDIA/Megatron-LM #6205)": "labels_rolled shift_over_documents",
    "labels are rolled by boundaries without padding (NVIDIA/Megatron-LM #6205)": "labels_rolled_without_padding",
    "labels of padding are 0 (a pad id that is an id)": "padding_has_labels",
    "positions begin anew on every rank (NVIDIA/Megatron-LM #5243)": "positions_of_the_rank",
    "positions count the stream (packed documents without a reset)": "positions_of_the_stream",
    "every axis has the positions of the first (positions of text for images)": "positions_of_one_axis",
    "boundaries are divided by cp (NVIDIA/TransformerEngine #1930)": "boundaries_divided",
    "the whole stream is cut, not each document (PyTorch context_parallel)": "another_layout whole_stream_cut_head_and_tail",
    "every rank has the shard of rank 0 (a rank of the wrong group)": "same_shard_everywhere",
    "depth k is shifted by one (multi-token prediction)": "shift_of_one",
    "shards are joined without the way back (all-gather alone)": "joined_without_order",
    "no row moves (a relayout that is left out)": "shards_as_they_are",
    "rows that moved have no gradient (a collective without a backward)": "gradient_of_own_rows",
    "the gradient of a gather is summed over ranks that have other rows (NVIDIA/Megatron-LM #673)":
        "gradient_of_a_gather_that_is_summed",
    "the sum has a gradient of 0 (torch.distributed.all_reduce)": "sum_whose_gradient_is_lost",
    "a mean in place of a sum (ReduceOp.AVG)": "mean_over_the_group",
    "the sum is over all ranks (the default group)": "sum_over_everyone",
    "the sampled tail is missing (NVIDIA-NeMo/RL PR #3584)": "kl_without_a_tail",
    "both distributions are normalised over the ids (NVIDIA-NeMo/RL #3272)": "kl_of_the_ids_alone",
    "the last document is in no bin (a loop that ends early)": "last_document_lost",
    "a bin may have 8 tokens more (a capacity that is rounded up)": "bins_too_full",
    "ranks have other bins (an order that they do not share)": "bins_by_rank",
}
RIGHT = []
BUGS = [
    Bug(name, ERRORS[name][0], origin, globals()[name], ERRORS[name][3])
    for origin, names in ORIGINS.items()
    for name in names.split()
]
