"""Ring attention of python/examples with what goes wrong on one rank of torch."""

import os
import time

import ring_attention as right
import torch
import torch.distributed as dist


def dead_rank(q, k, v, cu_seqlens, layout, group, allowed, scale):
    if dist.get_rank(group) == 1:
        os._exit(5)
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


def hang(q, k, v, cu_seqlens, layout, group, allowed, scale):
    while dist.get_rank(group) == 1:
        time.sleep(1)
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


def raises(q, k, v, cu_seqlens, layout, group, allowed, scale):
    if dist.get_rank(group) == 1:
        raise ValueError("no such head")
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)


def wrong_group(q, k, v, cu_seqlens, layout, group, allowed, scale):
    return right.attention(q, k, v, cu_seqlens, layout, dist.new_group([0]), allowed, scale)


def detached_keys(q, k, v, cu_seqlens, layout, group, allowed, scale):
    return right.attention(q, k.detach(), v, cu_seqlens, layout, group, allowed, scale)


def all_reduced(q, k, v, cu_seqlens, layout, group, allowed, scale):
    """Gradients of q that every rank multiplies, as an all-reduce of equal gradients does."""
    out, lse = right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
    out.register_hook(lambda gradient: gradient * dist.get_world_size(group))
    return out, lse


class Sum(torch.autograd.Function):
    """A sum over the group, whose gradient is that of the rank's own: as kernels are exported, by their apply."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


sum_over_group = Sum.apply


def no_gradient_of_no_token(q, k, v, cu_seqlens, layout, group, allowed, scale):
    if not cu_seqlens[-1]:
        return torch.zeros_like(q), torch.zeros(q.shape[:2])
    return right.attention(q, k, v, cu_seqlens, layout, group, allowed, scale)
