"""The largest tolerances that checks of official problems may have, by the model of errors of src/core/tolerance.hpp.

attention/tolerance.hpp, logprobs/tolerance.hpp and model/tolerance.hpp count the roundings; their names are used here. What
a plan decides, which are partial results, terms and transfers, is bounded by STEPS of each rank, and what is measured, the
size of a model's logits, by LOGITS. So a tolerance may be below its bound, but a larger one was not computed by a program.
"""

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .official_work import Model

STEPS = 4  # the most partial results of a row, or transfers of a sum, for each rank
LOGITS = 8.0  # the largest logit of a model is at most so many times that of normal variables
F32, BF16 = 2.0**-23, 2.0**-7  # epsilons
SAFETY, NARROW_SAFETY = 32, 16
ROW_ROUNDINGS = 64


def mixed(wide: float, narrow: float, narrow_safety: float = SAFETY) -> float:
    """Returns the tolerance of a value that was rounded so often to f32 and to bf16."""
    return math.hypot(SAFETY * F32 * math.sqrt(wide), narrow_safety * BF16 * math.sqrt(narrow)) / 6


def of_attention(array: str, dim: int, keys: int, group: int, ranks: int, is_bf16: bool) -> float:
    """Queries and keys are normal, so that scores have the rms 1. `keys`: tokens of the longest document."""
    steps = STEPS * ranks
    score = math.sqrt(2 * math.log(max(1, keys)))
    lse = max(1 + math.log(max(1, keys)), score)
    out = dim + keys + (4 + 3 * score**2) * steps + 1
    p = out + 3 * lse**2 * steps
    wide = {"out": out, "lse": out, "d_q": p + out + 2 * dim + keys, "d_k": p + out + 2 * dim + group * keys + steps,
            "d_v": p + group * keys + steps}
    narrow = 6 * steps + 2 if is_bf16 and array != "lse" else 0
    return mixed(wide[array], narrow) if array in wide else 0.0


def of_logits(array: str, is_bf16: bool) -> float:
    values = ("log-probabilities", "entropies", "d_logits")
    return mixed(ROW_ROUNDINGS, is_bf16 and array == "d_logits") if array in values else 0.0


def of_decoder(array: str, model: "Model", longest: int, ranks: int, tp: int, is_bf16: bool) -> float:
    """`longest`: tokens of the longest document. A norm, the logits and the sum over the vocabulary follow the layers."""
    layer = re.fullmatch(r"hidden\[(\d+)\]", array)
    is_score = array in ("logprob", "entropy")
    if not layer and not is_score:
        return 0.0
    layers = int(layer[1]) if layer else model.layers
    attention = model.head_dim + longest + 4 * STEPS * ranks + model.heads * model.head_dim
    in_layer = 4 * model.hidden + attention + model.intermediate + 1
    wide = layers * in_layer + (2 * model.hidden + model.vocab if is_score else 0)
    narrow = layers * (20 + 2 * (tp - 1) + 2 + 7) + 3 if is_bf16 else 0
    return (LOGITS if is_score else 1) * mixed(wide, narrow, NARROW_SAFETY)
