"""yunchang (PyPI): its ring of plain PyTorch, for --layout contiguous, one document and as many KV heads as heads."""

from yunchang.ring.ring_pytorch_attn import ring_pytorch_attn_func


def attention(q, k, v, cu_seqlens, layout, group, mask, scale):
    if len(cu_seqlens) != 2 or q.shape[1] != k.shape[1] or mask not in ("causal", "full"):
        raise NotImplementedError("several documents, fewer KV heads than heads, or regions")
    q, k, v = (x[None] for x in (q, k, v))
    return ring_pytorch_attn_func(q, k, v, softmax_scale=scale, causal=mask == "causal", group=group)[0], None
