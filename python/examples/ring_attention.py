"""Ring attention with torch.distributed alone, forward and backward, for any layout and mask.

Keys and values go round the ring; each rank folds a block into a running maximum and sum. Backward,
they go round again, and their gradients with them: after the last step these are home.
"""

import torch
import torch.distributed as dist


def passed_on(block, group):
    """The block of the rank before this one; this rank's goes to the one after it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peer = [dist.get_global_rank(group, (rank + step) % size) for step in (1, -1)]
    arrived = torch.empty_like(block)
    operations = [dist.P2POp(dist.isend, block, peer[0], group), dist.P2POp(dist.irecv, arrived, peer[1], group)]
    for work in dist.batch_isend_irecv(operations) if size > 1 else ():
        work.wait()
    return arrived if size > 1 else block


def scores(q, k, allowed, scale, softcap):
    """[heads, rows, keys]: scaled products, with a softcap if there is one, -inf where the mask hides the key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    x = scale * torch.einsum("qhd,khd->hqk", q, k)
    return (softcap * torch.tanh(x / softcap) if softcap else x).masked_fill(~allowed, -torch.inf)


def per_kv_head(gradient, heads):
    """[rows, query heads, elements] summed over the query heads of each KV head."""
    return gradient.unflatten(1, (heads, -1)).sum(2)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, layout, group, allowed, scale, softcap):
        rank, size, share = dist.get_rank(group), dist.get_world_size(group), q.shape[1] // k.shape[1]
        masks = [allowed[:, torch.from_numpy(layout.index[(rank - step) % size])] for step in range(size)]
        q32, kv = q.float(), torch.cat([k, v], dim=2).float()
        top = (
            sinks.float()[:, None].repeat(1, len(q))
            if sinks is not None
            else q32.new_full((q.shape[1], len(q)), -torch.inf)
        )
        total, out = torch.exp(top - top.nan_to_num(neginf=0)), q32.new_zeros(*q.shape[:2], v.shape[2])
        for step in range(size):
            keys, values = kv.split([k.shape[2], v.shape[2]], dim=2)
            x = scores(q32, keys, masks[step], scale, softcap)
            new = torch.maximum(top, x.amax(2) if x.shape[2] else top)
            safe = new.nan_to_num(neginf=0)
            p, kept = torch.exp(x - safe[:, :, None]), torch.exp(top - safe)
            out = out * kept.T[:, :, None] + torch.einsum("hqk,khd->qhd", p, values.repeat_interleave(share, dim=1))
            total, top = total * kept + p.sum(2), new
            kv = passed_on(kv, group)
        out = out / torch.where(total > 0, total, 1).T[:, :, None]
        lse = top + torch.log(total)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *masks)
        ctx.group, ctx.scale, ctx.softcap = group, scale, softcap
        return out.to(q.dtype), lse.T.contiguous()

    @staticmethod
    def backward(ctx, d_out, _):
        q, k, v, sinks, out, lse, *masks = ctx.saved_tensors
        share, q32, d_out = q.shape[1] // k.shape[1], q.float(), d_out.float()
        delta, safe = (out * d_out).sum(2).T, lse.nan_to_num(neginf=0)
        widths = [k.shape[2], v.shape[2]]
        kv, d_q = torch.cat([k, v], dim=2).float(), torch.zeros_like(q32)
        d_kv = torch.zeros_like(kv)
        for mask in masks:
            keys, values = kv.split(widths, dim=2)
            wide_k, wide_v = (x.repeat_interleave(share, dim=1) for x in (keys, values))
            x = scores(q32, keys, mask, ctx.scale, ctx.softcap)
            p = torch.exp(x - safe[:, :, None])
            d_x = ctx.scale * p * (torch.einsum("qhd,khd->hqk", d_out, wide_v) - delta[:, :, None])
            if ctx.softcap:
                d_x *= 1 - (x.clamp(min=-ctx.softcap) / ctx.softcap) ** 2
            d_q += torch.einsum("hqk,khd->qhd", d_x, wide_k)
            d_k, d_v = d_kv.split(widths, dim=2)
            d_k += per_kv_head(torch.einsum("hqk,qhd->khd", d_x, q32), k.shape[1])
            d_v += per_kv_head(torch.einsum("hqk,qhd->khd", p, d_out), k.shape[1])
            kv, d_kv = passed_on(torch.stack([kv, d_kv]), ctx.group)
            d_kv = d_kv.contiguous()
        d_sinks = None if sinks is None else -(torch.exp(sinks.float()[:, None] - safe) * delta).sum(1).to(sinks.dtype)
        d_k, d_v = d_kv.split(widths, dim=2)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, None, None, None, None, None


def attention(q, k, v, cu_seqlens, layout, group, allowed, scale, sinks=None, k_shared=None, softcap=None):
    """The function for gyre conform: out and lse of this rank's rows."""
    if k_shared is not None:  # every head of k ends with it
        k = torch.cat([k, k_shared[:, None].expand(-1, k.shape[1], -1)], dim=2)
    return Ring.apply(q, k, v, sinks, layout, group, allowed, scale, softcap)
