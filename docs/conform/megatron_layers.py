"""megatron-core (PyPI): its column- and row-parallel layers, in the decoder beside this file."""

import torch.distributed as dist
import torch.nn.functional as F
from decoder import Decoder, visible
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
