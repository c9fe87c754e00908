"""Ring attention of python/examples with what goes wrong on one rank of torch."""

import os
import time

import ring_attention as right
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
