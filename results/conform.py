#!/usr/bin/env python3
"""Runs the functions of python/examples and docs/conform through gyre conform and prints a table: conform.py [FILE]

Needs torch. FILE, results/cpu-2core/conform.txt as a rule, takes the table instead of the screen. Packages of docs/conform
that cannot be imported are left out; GYRE_FOREIGN names folders of those that are not installed.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREIGN = [folder for folder in os.environ.get("GYRE_FOREIGN", "").split(os.pathsep) if folder]
PATHS = [str(ROOT / "python"), str(ROOT / "python" / "examples"), str(ROOT / "docs" / "conform"), *FOREIGN]
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
sys.path[:0] = PATHS

RUNS = (
    ("ring_attention:attention", "attention",
     ({"ranks": 2}, {"ranks": 4}, {"ranks": 4, "layout": "striped"}, {"cp": 2, "tp": 2})),
    ("ulysses_attention:attention", "attention", ({"ranks": 2}, {"ranks": 4})),
    ("torch_peers:context_parallel_attention", "attention", ({"ranks": 2, "layout": "zigzag"},)),
    ("torch_peers:dtensor_log_softmax", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:dtensor_cross_entropy", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:loss_parallel_logprob", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:loss_parallel_mean", "loss", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:autograd_all_reduce", "sum_over_group", ({"tp": 2, "convention": "sum"},)),
    ("torch_peers:constant_all_reduce", "sum_over_group", ({"tp": 2, "convention": "none"},)),
    ("torch_peers:autograd_kl", "kl", ({"tp": 2, "convention": "sum"}, {"tp": 2})),
    ("torch_peers:context_parallel_shard", "shard",
     ({"ranks": 2, "layout": "zigzag"}, {"ranks": 4, "layout": "zigzag"})),
    ("torch_peers:context_parallel_whole", "unshard",
     ({"ranks": 2, "layout": "zigzag"}, {"ranks": 4, "layout": "zigzag"})),
    ("torch_peers:dtensor_shard", "shard",
     ({"ranks": 2, "layout": "contiguous"}, {"ranks": 4, "layout": "contiguous"})),
    ("torch_peers:dtensor_unshard", "unshard",
     ({"ranks": 2, "layout": "contiguous"}, {"ranks": 4, "layout": "contiguous"})),
    # Of docs/conform.
    ("fsdp2:gradients", "gradients", ({"ranks": 2}, {"dp": 2, "cp": 2, "tp": 1})),
    ("fsdp2:gradients_in_bfloat16", "gradients", ({"dp": 2, "cp": 2, "tp": 1, "dtype": "bfloat16"},)),
    ("megatron_layers:gradients", "gradients", ({"tp": 2},)),
    ("deepspeed_ulysses:head_exchange", "head_exchange", ({"ranks": 2, "timeout": 300},)),
    ("deepspeed_ulysses:attention", "attention", ({"ranks": 2, "layout": "contiguous", "timeout": 300},)),
    ("nemo:logprob", "logprob", ({"tp": 2},)),
    ("nemo:chunked_logprob", "logprob", ({"tp": 2},)),
    ("nemo:entropy", "entropy", ({"tp": 2},)),
    ("nemo:kl", "kl", ({"tp": 2},)),
    ("verl_megatron:logprob", "logprob", ({"tp": 2},)),
    ("verl_megatron:entropy", "entropy", ({"tp": 2},)),
    ("verl_megatron:loss", "loss", ({"tp": 2},)),
)
# Of docs/conform: the packages that a function needs besides torch.
NEEDS = {
    "deepspeed_ulysses": ("deepspeed",),
    "nemo": ("nemo_rl",),
    "verl_megatron": ("verl", "megatron"),
    "megatron_layers": ("megatron",),
}
RELEASED = {"nemo_rl": "NeMo RL", "megatron": "megatron-core"}
HEADER = ("function", "cp", "tp", "layout", "passed", "failed", "left out")


def reasons(report):
    """Why cases failed, and why they were left out, with the cases of each reason."""
    found = {}
    for verdict in report.verdicts:
        if verdict.status != "passed":
            text = "; ".join(f.text for f in verdict.findings) or verdict.note
            general = re.sub(r"\b\d[\d.e-]*\b", "N", text)
            found.setdefault((verdict.status, general), []).append((verdict.case, text))
    for (status, _), cases in found.items():
        names = ", ".join(name for name, _ in cases[:2]) + (f" and {len(cases) - 2} more" if len(cases) > 2 else "")
        yield f"    {status}: {names}: {cases[0][1]}"


def missing(function):
    """Packages of a function of docs/conform that are not here."""
    needs = NEEDS.get(function.split(":")[0], ())
    return [name for name in needs if importlib.util.find_spec(name) is None]


def versions():
    """Of the packages that are here, as they say themselves."""
    for name in dict.fromkeys(name for names in NEEDS.values() for name in names):
        if importlib.util.find_spec(name) is not None:
            called = RELEASED.get(name, name)
            try:
                version = importlib.metadata.version(called)
            except importlib.metadata.PackageNotFoundError:  # a folder of GYRE_FOREIGN
                version = "from " + os.environ.get("GYRE_FOREIGN_VERSIONS", "a checkout")
            yield f"{called} {version}"


def main():
    import torch

    from gyre.distributed import conform, contracts

    lines, notes = [HEADER], [[]]
    for function, contract, some in RUNS:
        if lacking := missing(function):
            print(function, "is left out: no", *lacking, file=sys.stderr, flush=True)
            continue
        suite = [] if hasattr(contracts.named(contract), "CASES") else str(ROOT / "inputs" / "golden")
        for options in some:
            report = conform(suite, function, contract=contract, **options)
            count = {s: sum(v.status == s for v in report.verdicts) for s in ("passed", "failed", "left out")}
            o = report.options
            layout = o.layout if contracts.named(contract).USES_LAYOUT else "-"
            cp, tp = (str(o.cp), str(o.tp)) if len(report.grids) == 1 else ("all", "all")
            lines.append((function, cp, tp, layout, *map(str, count.values())))
            notes.append(list(reasons(report)))
            print(*lines[-1], file=sys.stderr, flush=True)
    widths = [max(map(len, column)) for column in zip(*lines)]
    named = ", ".join([f"torch {torch.__version__.partition('+')[0]}", *versions()])
    text = [f"# gyre conform inputs/golden, {named}, gloo"]
    for line, note in zip(lines, notes):
        cells = [
            c.ljust(w) if name in ("function", "layout") else c.rjust(w) for name, c, w in zip(HEADER, line, widths)
        ]
        text += ["  ".join(cells).rstrip(), *note]
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text("\n".join(text) + "\n", encoding="utf-8")
    else:
        print("\n".join(text))


if __name__ == "__main__":
    main()
