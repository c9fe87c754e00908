"""A decoder in plain PyTorch, for the examples beside it: grouped-query attention, SwiGLU, names as transformers has them."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Core(nn.Module):
    """Attention of [1, heads, rows, elements] over keys that a hook may have gathered."""

    def forward(self, query, key, value, seen):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width, wide, narrow = c.head_dim, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, narrow, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, narrow, bias=c.attention_bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=c.attention_bias)
        self.core = Core()

    def forward(self, x, turn, seen):
        q, k, v = (
            p(x).unflatten(1, (-1, self.width)).transpose(0, 1)[None] for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.core(turned(q, turn), turned(k, turn), v, seen)[0].transpose(0, 1).flatten(1))


class SwiGLU(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(c), SwiGLU(c)

    def forward(self, x, turn, seen):
        x = x + self.self_attn(self.input_layernorm(x), turn, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.num_experts or c.attention_sinks:
            raise NotImplementedError("experts, sinks")
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size)})
        self.model["layers"] = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.model["norm"] = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight
        self.config = c

    def forward(self, ids, positions, seen):
        half = torch.arange(self.config.head_dim // 2)
        turn = positions[:, None] * self.config.rope_theta ** (-half / len(half))
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"]:
            x = layer(x, turn, seen)
        return self.lm_head(self.model["norm"](x))


def turned(x, turn):
    """The rotary embedding: the second half of the elements turns with the first."""
    (a, b), c, s = x.chunk(2, dim=-1), turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def visible(cu_seqlens, layout, rank):
    """[rows, slots]: the keys that each row of a rank sees, where keys are gathered in the order of ranks."""
    mine, keys = torch.from_numpy(layout.index[rank]), torch.from_numpy(layout.index.reshape(-1))
    document = torch.searchsorted(cu_seqlens, torch.arange(len(keys)), right=True)
    return (mine[:, None] >= keys) & (document[mine][:, None] == document[keys])


def train_step(model, microbatches, data_group, cp_rank, factor=1):
    """Gradients of the mean over the labels of all microbatches and ranks, times factor."""
    count = sum((b["weights"] * (b["labels"] != -100)).sum().float() for b in microbatches)
    dist.all_reduce(count, group=data_group)
    for b in microbatches:
        logits = model(b["ids"], b["positions"], visible(b["cu_seqlens"], b["layout"], cp_rank))
        loss = b["weights"] * F.cross_entropy(logits.float(), b["labels"], reduction="none")
        (loss.sum() * factor / count.clamp(min=1e-9)).backward()
