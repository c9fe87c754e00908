"""yunchang (PyPI): its ring of plain PyTorch, a document at a time; --layout contiguous-documents."""

import torch
from yunchang.ring.ring_pytorch_attn import ring_pytorch_attn_func


def attention(q, k, v, cu_seqlens, layout, group, scale):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # it has no grouped queries
    parts, bounds = [q[:0]], (cu_seqlens // layout.cp).tolist()
    for a, b in zip(bounds, bounds[1:]):
        if a < b:
            mine = (x[None, a:b] for x in (q, k, v))
            parts.append(ring_pytorch_attn_func(*mine, softmax_scale=scale, causal=True, group=group)[0])
    return torch.cat(parts), None


attention.needs_gpu = True  # PyTorch has its kernel for CUDA alone
