"""Ulysses attention with torch.distributed alone: rows are exchanged for heads, and back.

Every rank then has all rows of some heads; KV heads are repeated where there are fewer than ranks. It
refuses query heads that are no multiple of the ranks.
"""

import math

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):
    """[size, ...]: slice r goes to rank r; the gradient takes the same way back."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group, arrived = group, torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.group), None


def heads_of_all_rows(x, order, group):
    """[slots, heads / size, ...] in the order of the stream, of this rank's rows of all heads."""
    parts = torch.stack(x.tensor_split(dist.get_world_size(group), dim=1))
    return Exchange.apply(parts, group).flatten(0, 1)[order.argsort()]


def rows_of_all_heads(x, order, group):
    """The way back."""
    parts = torch.stack(x[order].tensor_split(dist.get_world_size(group), dim=0))
    return torch.cat(list(Exchange.apply(parts, group)), dim=1)


def attention(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks=None, k_shared=None, softcap=None):
    """The function for gyre conform: out and lse of this rank's rows."""
    if k_shared is not None:  # every head of k ends with it
        k = torch.cat([k, k_shared[:, None].expand(-1, k.shape[1], -1)], dim=2)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if q.shape[1] % size:
        raise NotImplementedError(f"{q.shape[1]} heads over {size} ranks")
    k, v = (x.repeat_interleave(size // math.gcd(size, k.shape[1]), dim=1) for x in (k, v))
    order = torch.from_numpy(layout.index.reshape(-1))
    masks = [torch.empty_like(allowed) for _ in range(size)]
    dist.all_gather(masks, allowed.contiguous(), group=group)
    mask = torch.cat(masks)[order.argsort()]
    queries, keys, values = (heads_of_all_rows(x, order, group).float() for x in (q, k, v))
    share = q.shape[1] // k.shape[1]  # query heads of a KV head
    keys, values = (x.repeat_interleave(share, dim=1) for x in (keys, values))
    x = scale * torch.einsum("qhd,khd->hqk", queries, keys)
    x = (softcap * torch.tanh(x / softcap) if softcap else x).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        mine = sinks.float().tensor_split(size)[rank]
        x = torch.cat([x, mine[:, None, None].expand(-1, x.shape[1], 1)], dim=2)
    seen = torch.isfinite(x).any(dim=2, keepdim=True)
    safe = torch.where(seen, x, 0.0)  # a row that sees nothing has no softmax
    p = torch.where(seen, torch.softmax(safe, dim=2), 0.0)[:, :, : len(keys)]
    out = torch.einsum("hqk,khd->qhd", p, values)
    lse = torch.where(seen, torch.logsumexp(safe, dim=2, keepdim=True), -torch.inf)[:, :, 0].T
    return rows_of_all_heads(out, order, group).to(q.dtype), rows_of_all_heads(lse.detach(), order, group)
