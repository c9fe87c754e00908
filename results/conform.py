#!/usr/bin/env python3
"""Runs the functions of python/examples through gyre conform and prints a table: conform.py [FILE]

Needs torch. FILE, results/cpu-2core/conform.txt as a rule, takes the table instead of the screen.
"""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / "python"), str(ROOT / "python" / "examples")]
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
sys.path[:0] = PATHS

RUNS = (
    (
        "ring_attention:attention",
        "attention",
        ({"ranks": 2}, {"ranks": 4}, {"ranks": 4, "layout": "striped"}, {"cp": 2, "tp": 2}),
    ),
    ("ulysses_attention:attention", "attention", ({"ranks": 2}, {"ranks": 4})),
    ("torch_peers:context_parallel_attention", "attention", ({"ranks": 2, "layout": "zigzag"},)),
    ("torch_peers:dtensor_log_softmax", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:dtensor_cross_entropy", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:loss_parallel_logprob", "logprob", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:loss_parallel_mean", "loss", ({"tp": 2}, {"tp": 4})),
    ("torch_peers:autograd_all_reduce", "sum_over_group", ({"tp": 2, "convention": "sum"},)),
    ("torch_peers:constant_all_reduce", "sum_over_group", ({"tp": 2, "convention": "none"},)),
    (
        "torch_peers:context_parallel_shard",
        "shard",
        ({"ranks": 2, "layout": "zigzag"}, {"ranks": 4, "layout": "zigzag"}),
    ),
    (
        "torch_peers:context_parallel_whole",
        "unshard",
        ({"ranks": 2, "layout": "zigzag"}, {"ranks": 4, "layout": "zigzag"}),
    ),
    (
        "torch_peers:dtensor_shard",
        "shard",
        ({"ranks": 2, "layout": "contiguous"}, {"ranks": 4, "layout": "contiguous"}),
    ),
    (
        "torch_peers:dtensor_unshard",
        "unshard",
        ({"ranks": 2, "layout": "contiguous"}, {"ranks": 4, "layout": "contiguous"}),
    ),
)
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


def main():
    import torch

    from gyre.distributed import conform, contracts

    lines, notes = [HEADER], {}
    for function, contract, some in RUNS:
        for options in some:
            report = conform(str(ROOT / "inputs" / "golden"), function, contract=contract, **options)
            count = {s: sum(v.status == s for v in report.verdicts) for s in ("passed", "failed", "left out")}
            o = report.options
            layout = o.layout if contracts.named(contract).USES_LAYOUT else "-"
            lines.append((function, str(o.cp), str(o.tp), layout, *map(str, count.values())))
            notes[len(lines) - 1] = list(reasons(report))
            print(*lines[-1], file=sys.stderr, flush=True)
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [f"# gyre conform inputs/golden, torch {torch.__version__.split('+')[0]}, gloo, float32"]
    for i, line in enumerate(lines):
        cells = [
            c.ljust(w) if HEADER[k] in ("function", "layout") else c.rjust(w)
            for k, (c, w) in enumerate(zip(line, widths))
        ]
        text += ["  ".join(cells).rstrip(), *notes.get(i, [])]
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text("\n".join(text) + "\n", encoding="utf-8")
    else:
        print("\n".join(text))


if __name__ == "__main__":
    main()
