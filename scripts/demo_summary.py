#!/usr/bin/env python3
"""Prints one screen about a demo run: demo_summary.py DEMO_FOLDER APPS_FOLDER. All figures come from the JSON files."""

import gzip
import json
import pathlib
import sys

# Program, JSON file, what it ran on (a format of its configuration), what its results were compared with.
CHECKED = [
    ("gyre-pack", "pack", "{source}, bins of {capacity} tokens", "documents found again in their bins"),
    ("gyre-shard", "shard", "{segments} documents in {bins} bins, cp = {cp}", "stream put together from its shards"),
    ("gyre-attention", "attention", "{tokens} tokens, {heads} heads, cp = {cp}", "float64 definition, formulas of bytes"),
    ("gyre-recurrence", "recurrence", "{tokens} tokens, {heads} heads, cp = {cp}", "float64 definition, formulas of bytes"),
    ("gyre-logprobs", "logprobs", "{tokens} tokens, {vocab} ids, tp = {tp}", "float64 definition, formulas of bytes"),
    ("gyre-pipeline", "reference", "{documents} documents, {tokens} tokens", "independent NumPy code in float64"),
    ("gyre-pipeline", "result", "{documents} documents, {tokens} tokens", "serial float64 twin of the model"),
]
FILES = [
    ("layouts.svg", "who owns, computes and needs which tokens, for every layout"),
    ("ring.svg", "who computes and sends what when: ring attention over 8 ranks, predicted"),
    ("result.json", "the model's pass over the text: samples, statistics, checks, machine"),
    ("attention.log", "every schedule: time, rate, bytes, messages, exposed communication"),
]
WIDTH = 100


def find(results, **key):
    """The measurements of the results whose key holds all of `key`."""
    return [r["measurements"] for r in results if key.items() <= r["key"].items()]


def fom(run, metric):
    return next(f["value"] for f in run["fom"] if f["metric"] == metric)


def grouped(number):
    return f"{number:,}".replace(",", " ")


def gzip_bits_per_byte(folder):
    texts = [p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()]
    return 8 * sum(len(gzip.compress(t, 9)) for t in texts) / sum(map(len, texts))


def print_checks(runs):
    print(f"{'program':16}{'ran on':38}{'compared with':40}checks")
    for program, name, problem, against in CHECKED:
        checks = runs[name]["verification"]["checks"]
        passed = sum(c["passed"] for c in checks)
        print(f"{program:16}{problem.format(**runs[name]['configuration']):38}{against:40}{passed}/{len(checks)}")
    checks = [c for run in runs.values() for c in run["verification"]["checks"]]
    worst = max(c["error_over_tolerance"] for c in checks)
    verdict = "all" if all(c["passed"] for c in checks) else "not all"
    print(f"{grouped(sum(c['count'] for c in checks))} values compared, {verdict} within tolerance"
          f" (largest error: {worst:.2f} of what it may be)")
    reasons = sorted({reason.split(":")[0] for run in runs.values() for reason in run["status"]["reasons"]})
    if reasons:
        print(f"times are not official ({', '.join(reasons)}: the runs are short, and say where): docs/run-rules.md")


def print_figures(runs, demo):
    best = max(find(runs["attention"]["results"], **{"pass": "fwd"}), key=lambda m: m["rate"])
    share = "" if best["of_peak"] is None else f", {best['of_peak']:.0f} % of the processor's measured peak"
    print(f"attention      {1000 * best['rate']:.1f} GFLOP/s a rank forward{share} ({best['schedule']})")

    rows = runs["logprobs"]["results"]
    ours, theirs = ({m["pass"]: m for m in find(rows, op="logprob", method=m)} for m in ("gyre", "upstream"))
    back = ours["bwd"]
    share = "" if back["of_bw"] is None else f", {back['of_bw']:.0f} % of the memory's measured bandwidth"
    print(f"log-probs      {back['rate']:.1f} GB/s a rank backward{share}")
    ratio = sum(m["time"] for m in theirs.values()) / sum(m["time"] for m in ours.values())
    mark = "~" if runs["logprobs"]["status"]["reasons"] else ""
    print(f"               {mark}{ratio:.0f} times as fast as NeMo RL's algorithm; {ours['fwd']['extra']:.2f} MB"
          f" beside the logits, not {theirs['fwd']['extra']:.0f} MB")
    print(f"text           {fom(runs['result'], 'bits_per_byte'):.2f} bits per byte by the model;"
          f" gzip -9, file by file: {gzip_bits_per_byte(demo / 'text'):.2f}")


def print_layouts(run):
    print(f"{'layout':17}{'slowest rank computes':>23}{'a rank needs of others keys':>31}{'predicted step':>17}")
    for m in (r["measurements"] for r in run["results"]):
        print(f"{m['layout']:21}{m['pairs']:11.2f} x mean{m['need']:29.0f} %{m['step']:14.1f} ms")


def print_next(demo, apps):
    print("look at")
    for name, what in FILES:
        print(f"  {demo / name!s:21} {what}")
    print("try")
    for command in (
            f"mpirun -n 2 {apps}/gyre-attention --tokens 4K --schedule ring --layout all",
            f"{apps}/gyre-attention --explain --cp 64 --tokens 1M --tflops 400 --gbps 50",
            f"{apps}/gyre-shard --gen dist=long-tailed,count=4K,max=16K --capacity 64K --cp 32"):
        print(f"  {command}")
    print("  README.md says what the programs do, docs/ what their numbers mean")


def main():
    demo, apps = map(pathlib.Path, sys.argv[1:])
    runs = {name: json.loads((demo / f"{name}.json").read_text()) for _, name, _, _ in CHECKED}
    for section in (lambda: print_checks(runs), lambda: print_figures(runs, demo),
                    lambda: print_layouts(runs["shard"]), lambda: print_next(demo, apps)):
        print("-" * WIDTH)
        section()
    if any(run["verification"]["passed"] is not True for run in runs.values()):
        sys.exit("demo: a verification failed")


if __name__ == "__main__":
    main()
