"""DeepSpeed (PyPI): DeepSpeed-Ulysses, its exchange of heads alone and around attention, for --layout contiguous."""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll


def head_exchange(x, rank, size, group, back=False):
    deepspeed.init_distributed("gloo")
    scatter, gather = (1, 2) if back else (2, 1)
    return _SeqAllToAll.apply(group, x[None], scatter, gather, 0)[0]


def attention(q, k, v, cu_seqlens, layout, group, allowed, scale):
    deepspeed.init_distributed("gloo")
    parts = [torch.empty((len(rows), layout.slots), dtype=bool) for rows in layout.index]
    torch.distributed.all_gather(parts, allowed, group=group)
    seen = torch.cat(parts)

    def local(q, k, v):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        return torch.where(seen.any(1)[:, None], out, 0).transpose(1, 2)

    return DistributedAttention(local, group)(*(x[None] for x in (q, k, v)), batch_dim_idx=0)[0], None
