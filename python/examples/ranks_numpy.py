"""Operations on several ranks in NumPy, for `gyre conform --backend numpy`: what each contract asks for."""

import numpy as np

import gyre
from gyre.distributed.layouts import layout_of


def attention(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks=None):
    """Every rank gathers all keys and values; gradients go home by an all-to-all."""
    share = q.shape[1] // k.shape[1]  # query heads of a KV head
    keys, values = (np.empty((cu_seqlens[-1], *x.shape[1:])) for x in (k, v))
    for rows, k_part, v_part in zip(layout.index, group.all_gather(k), group.all_gather(v)):
        keys[rows], values[rows] = k_part, v_part
    keys, values = (np.repeat(x, share, axis=1) for x in (keys, values))
    z = np.full(q.shape[1], -np.inf) if sinks is None else sinks
    x = np.where(allowed, scale * np.einsum("qhd,khd->hqk", q, keys), -np.inf)
    top = np.maximum(x.max(axis=2, initial=-np.inf), z[:, None])
    top[top == -np.inf] = 0  # a row that sees nothing
    p = np.exp(x - top[:, :, None])
    total = p.sum(axis=2) + np.exp(z[:, None] - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p /= np.where(total == 0, 1, total)[:, :, None]
    out = np.einsum("hqk,khd->qhd", p, values)

    def backward(d_out):
        delta = (out * d_out).sum(axis=2).T
        d_x = scale * p * (np.einsum("qhd,khd->hqk", d_out, values) - delta[:, :, None])
        gradients = [np.einsum("hqk,khd->qhd", d_x, keys)]
        for whole in (np.einsum("hqk,qhd->khd", d_x, q), np.einsum("hqk,qhd->khd", p, d_out)):
            whole = whole.reshape(len(whole), k.shape[1], share, whole.shape[2]).sum(axis=2)
            gradients.append(sum(group.all_to_all([whole[rows] for rows in layout.index])))
        if sinks is not None:
            gradients.append(-(np.exp(z[:, None] - np.where(total == 0, 0, lse)) * delta).sum(axis=1))
        return [gradient.astype(q.dtype) for gradient in gradients]

    return out.astype(q.dtype), lse.T.astype(q.dtype), backward


def logprob(logits_shard, targets, group, first, temperature=1.0, vocab_size=None):
    """One all-gather of a maximum, a sum and a target's logit for each row."""
    tokens, columns = logits_shard.shape
    real = first + np.arange(columns) < vocab_size
    x = np.where(real, logits_shard.astype(np.float64), -np.inf) / temperature
    top = x.max(axis=1, initial=-np.inf)
    total = np.exp(x - np.where(np.isfinite(top), top, 0)[:, None]).sum(axis=1)
    here = (targets >= first) & (targets < first + columns) & (targets < vocab_size)
    column = np.where(here, targets - first, 0)
    mine = np.where(here, x[np.arange(tokens), column] if columns else 0, -np.inf)
    tops, totals, targeted = (np.stack(group.all_gather(part)) for part in (top, total, mine))
    highest = tops.max(axis=0)
    total = (totals * np.exp(np.where(totals > 0, tops - highest, 0))).sum(axis=0)
    known = group.all_reduce(here.astype(np.int64)) > 0
    value = np.where(known, targeted.max(axis=0) - highest - np.log(total), 0)

    def backward(d_value):
        d = np.where(known, d_value, 0)[:, None] / temperature
        gradient = np.where(real, -d * np.exp(x - highest[:, None]) / total[:, None], 0)
        gradient[np.flatnonzero(here), column[here]] += d[here, 0]
        return gradient.astype(logits_shard.dtype)

    return value.astype(logits_shard.dtype), backward


def topk_kl(logits_shard, ids, targets, teacher_ids, teacher_targets, group, first, one=1.0):
    """Log-probabilities of ids and targets by the contract logprob, whose gradients are weighted."""
    asked = np.concatenate([ids, targets[:, None]], axis=1)
    scored = [logprob(logits_shard, column, group, first, vocab_size=np.inf) for column in asked.T]
    log_q = np.stack([value for value, _ in scored], axis=1)
    gaps = log_q - np.concatenate([teacher_ids, teacher_targets[:, None]], axis=1)
    weights = np.exp(log_q)
    weights[:, -1] = (ids != targets[:, None]).all(axis=1)
    slopes = weights * (gaps + [*[1.0] * ids.shape[1], one])

    def backward(d_kl):
        return sum(gradient(d_kl * slope) for (_, gradient), slope in zip(scored, slopes.T))

    return (weights * gaps).sum(axis=1), backward


def loss(logits_shard, labels, group, data_group, first, weights):
    """The mean over all labels of all ranks that are not ignored, by their weights."""
    vocab = int(group.all_reduce(np.int64(logits_shard.shape[1])))
    value, backward = logprob(logits_shard, labels, group, first, vocab_size=vocab)
    counted = np.where(labels == -100, 0, weights)
    total = data_group.all_reduce(counted.sum())
    mean = data_group.all_reduce(-(counted * value).sum()) / total
    return np.asarray(mean, logits_shard.dtype), lambda d_loss: backward(-d_loss * counted / total)


def shard(batch, rank, size, layout):
    """Rows of a rank under DualChunkSwap; boundaries are counted again."""
    bounds, lengths = batch["cu_seqlens_padded"], np.diff(batch["cu_seqlens"])
    rows, real, slots = [], [0], [0]
    for begin, end, length in zip(bounds[:-1], bounds[1:], lengths):
        chunks = np.split(np.arange(begin, end), 2 * size)
        mine = np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])
        rows.append(mine)
        real.append(int((mine < begin + length).sum()))
        slots.append(len(mine))
    index = np.concatenate([np.zeros(0, int), *rows])
    found = {name: batch[name][..., index] for name in ("ids", "labels", "positions")}
    return found | {"cu_seqlens": np.cumsum(real), "cu_seqlens_padded": np.cumsum(slots)}


def pack(lengths, capacity):
    """First-fit decreasing: bins as lists of documents."""
    bins, room = [], []
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        fits = next((b for b, free in enumerate(room) if free >= lengths[document]), len(bins))
        if fits == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fits].append(document)
        room[fits] -= lengths[document]
    return bins


def model(x, cu_seqlens, layout, group, allowed, sinks=None):
    """One layer of attention, whose heads are parts of a token: what the probes change tokens of."""
    heads = x.reshape(len(x), 4, -1)
    out, _, backward = attention(heads, heads, heads, cu_seqlens, layout, group, allowed, 1.0, sinks)
    return out.reshape(x.shape), lambda d_y: sum(backward(d_y.reshape(heads.shape))[:3]).reshape(x.shape)


model.layers = 1


def labels(batch, shift, rank, size):
    """Labels of the whole stream, then the rows of the rank."""
    ids, wanted = batch["ids"], np.full(len(batch["ids"]), -100)
    for begin, length in zip(batch["cu_seqlens_padded"], np.diff(batch["cu_seqlens"])):
        wanted[begin : begin + max(0, length - shift)] = ids[begin + shift : begin + max(shift, length)]
    return shard({**batch, "labels": wanted}, rank, size, "dual-chunk-swap")["labels"]


def relayout(rows, rank, size, group, cu_seqlens_padded, source, target):
    """Every row goes to its owner under the other layout, and its gradient comes back the same way."""
    old, new = (layout_of(name, cu_seqlens_padded, size).index for name in (source, target))

    def moved(rows, held, wanted):
        owner, place = np.empty((2, held.size), int)
        owner[wanted], place[wanted] = np.arange(size)[:, None], np.arange(held.shape[1])
        mine = owner[held[rank]]
        arrived = group.all_to_all([rows[mine == peer] for peer in range(size)])
        found = np.empty_like(rows)
        for peer, part in enumerate(arrived):
            slots = held[peer]
            found[place[slots[owner[slots] == rank]]] = part
        return found

    return moved(rows, old, new), lambda d_rows: moved(d_rows, new, old)


def sum_over_group(x, group):
    """The sum; every rank computes the same loss of it, so its gradient is that of y."""
    return group.all_reduce(x), lambda d_y: d_y


def unshard(shard, rank, size, group, cu_seqlens_padded):
    """All shards are gathered, and each row goes to its slot."""
    index = gyre.reference.dual_chunk_swap(cu_seqlens_padded, size)
    return {name: gyre.reference.unshard(group.all_gather(part.T), index).T for name, part in shard.items()}
