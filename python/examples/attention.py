from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

import gyre

problem = gyre.read("inputs/attention_causal.h5")
q, k, v = (torch.from_numpy(problem.inputs[name]).requires_grad_() for name in ("q", "k", "v"))
group = q.shape[1] // k.shape[1]  # query heads of a KV head
out = torch.empty_like(q)
bounds = problem.inputs["offsets"].tolist()
for rows in (slice(a, b) for a, b in pairwise(bounds) if a < b):
    heads = (q[rows], k[rows].repeat_interleave(group, 1), v[rows].repeat_interleave(group, 1))
    one = scaled_dot_product_attention(*(x.transpose(0, 1) for x in heads), is_causal=True)
    out[rows] = one.transpose(0, 1)
out.backward(torch.from_numpy(problem.inputs["d_out"]))

mine = {"out": out, "d_q": q.grad, "d_k": k.grad, "d_v": v.grad}
gyre.assert_close(mine, problem.reference, common=True, rtol=1e-5, atol=1e-5)
