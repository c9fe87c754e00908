"""Arrays of NumPy, tensors of PyTorch and arrays of JAX, as arrays of NumPy."""

from typing import Any

import numpy as np


def is_bfloat16(value: Any) -> bool:
    """Whether an array or a tensor is of bfloat16, which NumPy itself does not have."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.") == "bfloat16"


def to_numpy(value: Any) -> np.ndarray:
    """The values of an array, of a tensor on any device, or of a list.

    bfloat16 becomes float32, which holds it exactly.
    """
    if hasattr(value, "detach"):  # a tensor of PyTorch, which may require a gradient
        value = value.detach().cpu()
        return np.asarray((value.float() if is_bfloat16(value) else value).numpy())
    array = np.asarray(value)
    return array.astype(np.float32) if is_bfloat16(array) else array


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Upper halves of float32 values as uint16; exact for values that bfloat16 represents."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 numbers that are given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
