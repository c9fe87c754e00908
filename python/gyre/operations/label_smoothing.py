"""Cross entropy with a target of which a share is spread evenly over the vocabulary."""

import numpy as np

from . import Answer, Golden, Operation, Parameter, Rows


def _define(rows: Rows) -> dict[str, np.ndarray]:
    share = rows.parameters["label_smoothing"]
    smoothed = (1 - share) * rows.hits + share / rows.z.shape[1]
    terms = np.where(smoothed > 0, -smoothed * np.where(smoothed > 0, rows.logp, 0), 0)
    slope = rows.g * rows.has_target * (np.exp(rows.logp) - smoothed) / rows.heat
    return {
        "smoothed_cross_entropy": np.where(rows.has_target, terms, 0).sum(axis=1),
        "d_smoothed_cross_entropy": slope,
    }


def _problem(rng, full):
    targets = np.array([0, 28, 7, -100, 29, 11], np.int32)
    return full(rng, 6, 29, 3, targets=targets, temperature=0.8, label_smoothing=0.3)


OPERATION = Operation(
    arrays={"smoothed_cross_entropy": Answer("T"), "d_smoothed_cross_entropy": Answer("TV")},
    parameters={"label_smoothing": Parameter(0.1, 0, 1)},
    define=_define,
    golden=Golden(
        "a smoothed target, over 29 ids, with a temperature; two tokens have no target",
        "smoothing over the ids of a rank instead of all (NVIDIA/Megatron-LM #7452), over all but the "
        "target, or of tokens without a target",
        _problem,
    ),
)
