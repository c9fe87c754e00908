"""The contracts: a module each, with a docstring that is the contract, KIND, problems and call."""

import importlib
from typing import Any

NAMES = (
    "attention",
    "recurrence",
    "logprob",
    "entropy",
    "filtered_logprob",
    "loss",
    "mtp_loss",
    "router_loss",
    "policy_loss",
    "shard",
    "labels",
    "unshard",
    "relayout",
    "bshd_shard",
    "head_exchange",
    "slice",
    "pack",
    "sum_over_group",
    "topk_kl",
    "kl",
    "model",
    "gradients",
    "grad_norm",
    "optimizer_step",
    "invariant",
)


def named(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")
