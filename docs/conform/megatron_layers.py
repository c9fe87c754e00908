"""megatron-core (PyPI): its layers split by columns and by rows, in the decoder beside this file."""

import torch
import torch.distributed as dist
from decoder import Decoder, train_step
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
HOW = {"config": ModelParallelConfig(use_cpu_initialization=True), "init_method": torch.nn.init.zeros_}


class First(torch.nn.Sequential):
    """A layer of Megatron returns its output and a bias."""

    def forward(self, x):
        return super().forward(x)[0]


def split(linear, is_row, tp, rank):
    """The layer of Megatron with the rank's part of the weights."""
    kind, bias = RowParallelLinear if is_row else ColumnParallelLinear, linear.bias is not None
    more = {"input_is_parallel": True, "skip_bias_add": False} if is_row else {"gather_output": False}
    layer = kind(linear.in_features, linear.out_features, bias=bias, **HOW, **more)
    layer.weight.data = linear.weight.data.chunk(tp, int(is_row))[rank].contiguous()
    if bias:
        layer.bias.data = linear.bias.data if is_row else linear.bias.data.chunk(tp)[rank].contiguous()
    return First(layer)


def gradients(weights, microbatches, config, mesh, data_group):
    tp, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
    if mesh["cp"].size() > 1 or config.num_key_value_heads % tp:
        raise NotImplementedError("context parallelism, or fewer KV heads than ranks")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model, found = Decoder(config), {}
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    for path, linear in [(n, m) for n, m in model.named_modules() if n.endswith(COLUMNS + ROWS)]:
        model.set_submodule(path, split(linear, path.endswith(ROWS), tp, rank))
    train_step(model, microbatches, data_group, 0)
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=data_group)
        place = f"shard({p.partition_dim})" if getattr(p, "tensor_model_parallel", False) else "replicated"
        found[name.replace("_proj.0.", "_proj.")] = (p.grad, place)
    return found
