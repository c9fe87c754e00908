"""PyTorch: FSDP2 over dp x cp, context_parallel's gather of keys and values over cp, columns and rows over tp."""

import torch
from decoder import Decoder, train_step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {f"*.{name}_proj": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
PLAN |= {f"*.{name}_proj": RowwiseParallel() for name in ("o", "down")}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def data_mesh(mesh):
    """The mesh of dp and cp, or of cp alone without replicas."""
    return mesh["dp", "cp"]._flatten("data") if "dp" in mesh.mesh_dim_names else mesh["cp"]


def gradients(weights, microbatches, config, mesh, data_group, policy=MixedPrecisionPolicy()):
    if config.num_key_value_heads % mesh["tp"].size():
        raise NotImplementedError("fewer KV heads than ranks")
    model = Decoder(config)
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    style, data = _ContextParallel(2, _ContextParallel.AttentionType.FLEX), data_mesh(mesh)
    for layer in model.model["layers"]:
        parallelize_module(layer, mesh["cp"], {"self_attn.core": style})
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)
    train_step(model, microbatches, data_group, mesh["cp"].get_local_rank(), data.size())  # FSDP2 averages
    return {name: p.grad for name, p in model.named_parameters()}


def gradients_in_bfloat16(weights, microbatches, config, mesh, data_group):
    """Parameters in float32, computed with in bfloat16, reduced in float32."""
    weights = {name: w.float() for name, w in weights.items()}
    return gradients(weights, microbatches, config, mesh, data_group, NARROW)
