"""PyTorch's own distributed operations as functions for gyre conform: DTensor, loss_parallel, context_parallel."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import loss_parallel


def split_logits(logits_shard, mesh, columns):
    """The shard as a part of a DTensor of all columns."""
    return DTensor.from_local(
        logits_shard, mesh["tp"], [Shard(1)], run_check=False, shape=(len(logits_shard), columns), stride=(columns, 1)
    )


def replicated(tensor, mesh):
    return DTensor.from_local(tensor, mesh["tp"], [Replicate()], run_check=False)


def with_ignored(targets, columns):
    """Targets that no column has are -100, which cross_entropy ignores."""
    return torch.where((targets >= 0) & (targets < columns), targets, -100)


def dtensor_log_softmax(logits_shard, targets, group, mesh, columns, temperature=1.0):
    """log_softmax of a DTensor that is split by columns, then the target's."""
    rows = F.log_softmax(split_logits(logits_shard / temperature, mesh, columns), dim=1)
    whole, targets = rows.redistribute(mesh["tp"], [Replicate()]).to_local(), with_ignored(targets, columns)
    return torch.where(targets < 0, 0.0, whole.gather(1, targets.clamp(min=0)[:, None])[:, 0])


def dtensor_cross_entropy(logits_shard, targets, group, mesh, columns, temperature=1.0):
    """cross_entropy of a DTensor that is split by columns, outside of loss_parallel."""
    logits = split_logits(logits_shard / temperature, mesh, columns)
    losses = F.cross_entropy(logits, replicated(with_ignored(targets, columns), mesh), reduction="none")
    return -losses.full_tensor()  # of large vocabularies, PyTorch splits the rows


def in_loss_parallel(logits_shard, targets, mesh, columns, temperature, sign, **options):
    """cross_entropy in loss_parallel; its backward must run in loss_parallel, too."""
    with loss_parallel():
        logits = split_logits(logits_shard / temperature, mesh, columns)
        value = sign * F.cross_entropy(logits, replicated(with_ignored(targets, columns), mesh), **options)

    def backward(gradient):
        with loss_parallel():
            return torch.autograd.grad(value, logits_shard, replicated(gradient, mesh))

    return value.to_local(), backward


def loss_parallel_logprob(logits_shard, targets, group, mesh, columns, temperature=1.0):
    """A value of cross_entropy for each row."""
    return in_loss_parallel(logits_shard, targets, mesh, columns, temperature, -1, reduction="none")


def loss_parallel_mean(logits_shard, labels, group, mesh, columns):
    """The mean of cross_entropy over rows that are not ignored."""
    return in_loss_parallel(logits_shard, labels, mesh, columns, 1.0, 1)


def autograd_kl(logits_shard, teacher_shard, group):
    """kl_div of columns, with the functional all_reduce: the convention sum."""

    def log_softmax(x):
        top = x.detach().amax(1) if x.shape[1] else x.new_full((len(x),), -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        x = x - top[:, None]
        return x - collectives.all_reduce(x.exp().sum(1), "sum", group).log()[:, None]

    log_q, log_p = log_softmax(logits_shard), log_softmax(teacher_shard)
    return collectives.all_reduce(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1), "sum", group)


def dtensor_shard(batch, rank, size, mesh):
    """Rows of distribute_tensor: the layout contiguous."""
    arrays = {n: batch[n] for n in ("ids", "labels", "positions")}
    return {n: distribute_tensor(x, mesh["cp"], [Shard(x.ndim - 1)]).to_local() for n, x in arrays.items()}


def dtensor_unshard(shard, rank, size, group, mesh):
    """full_tensor of a DTensor that is split by rows: the layout contiguous."""
    parts = {n: DTensor.from_local(x, mesh["cp"], [Shard(x.ndim - 1)], run_check=False) for n, x in shard.items()}
    return {n: x.full_tensor() for n, x in parts.items()}


def context_parallel_shard(batch, rank, size, mesh):
    """Buffers as context_parallel leaves them to each rank: head and tail, the layout zigzag."""
    buffers = {n: batch[n].clone() for n in ("ids", "labels", "positions")}
    dims = [x.ndim - 1 for x in buffers.values()]
    with context_parallel(mesh["cp"], buffers=list(buffers.values()), buffer_seq_dims=dims):
        return {n: x.clone() for n, x in buffers.items()}


def context_parallel_whole(shard, rank, size, group, mesh):
    """context_parallel_unshard of the same; it restores the order of tensors with a batch dimension alone."""
    dims = [x.ndim for x in shard.values()]
    whole = context_parallel_unshard(mesh["cp"], [x[None] for x in shard.values()], dims)
    return {n: x[0] for n, x in zip(shard, whole)}


def autograd_all_reduce(x, group):
    """The functional all_reduce; its backward is an all_reduce, too: the convention sum."""
    return collectives.all_reduce(x, "sum", group)


def constant_all_reduce(x, group):
    """all_reduce of torch.distributed, which autograd does not see: the convention none."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def context_parallel_attention(q, k, v, cu_seqlens, layout, group, mesh):
    """scaled_dot_product_attention in context_parallel: one causal document, as many KV heads as heads, on GPUs."""
    if len(cu_seqlens) > 2 or q.shape[1] != k.shape[1]:
        raise NotImplementedError("several documents, or fewer KV heads than heads")

    def context():
        return context_parallel(mesh["cp"], buffers=[torch.empty(layout.slots, device=q.device)], buffer_seq_dims=[0])

    with context():
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)

    def backward(d_out):
        with context():
            return torch.autograd.grad(out, (q, k, v), d_out)

    return out, None, backward


context_parallel_attention.needs_gpu = True
