#!/usr/bin/env python3
"""Which travels, queries or keys? Holds the rule of pass-Q and pass-KV against predictions: queries.py APPS [-o FILE]

Yang et al. (arXiv 2411.01783, section 3) choose, for T new tokens behind P others on N ranks, N_H query heads and N_KV heads
of keys, each of which computes C FLOP/s and sends BW bytes/s, e bytes an element:

    (1) queries are fewer bytes   T / (T+P) <= 2 N_KV / N_H
    (2) keys are hidden           T >= N C N_KV e / (2 N_H BW)
    keys travel if (2) or not (1), else queries

Times are those of gyre-predict for ring (keys travel) and ring-query, forward, causal, dual-chunk-swap; so are C, the rate of the
kernel in ring's prediction, and BW, the machine file's slowest link of a ring. The rule knows neither the results that go
home nor the all-to-all; FILE (results/prediction/queries.txt) says how often it chooses the faster one, and what it loses.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
MACHINE = "h100-sxm-8"
TOKENS, HEADS, DIM, BYTES = 128 << 10, 32, 128, 2
KV_HEADS, RANKS = (8, 32), (8, 32)
QUERIES = (1 << 7, 1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 17)
SCHEDULES = ("ring", "ring-query", "all-gather", "all-gather-query", "all-to-all")


def predicted(apps, kv_heads, queries, folder):
    """Rows by schedule and ranks."""
    file = folder / "prediction.json"
    command = [apps / "gyre-predict", "--machine", MACHINE, "--cp", ",".join(map(str, RANKS)), "--tokens", TOKENS, "--heads", HEADS,
               "--kv-heads", kv_heads, "--head-dim", DIM, "-d", "bf16", "--queries", queries, "--layout", "dual-chunk-swap",
               "--schedule", ",".join(SCHEDULES), "--pass", "fwd", "--json", file]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"queries.py: {ran.stderr}")
    return {(r["key"]["schedule"], r["key"]["cp"]): r for r in json.loads(file.read_text())["results"]}


def keys_travel(kv_heads, queries, ranks, flops, bandwidth):
    fewer = queries / TOKENS <= 2 * kv_heads / HEADS
    hidden = queries >= ranks * flops * kv_heads * BYTES / (2 * HEADS * bandwidth)
    return hidden or not fewer


def slowest_link(ranks):
    """Bytes/s of the slowest link that a ring of these ranks uses: of large messages."""
    links = tomllib.loads((ROOT / "inputs" / "machines" / f"{MACHINE}.toml").read_text())["model"]["links"]
    used = links[:1] if ranks <= links[0]["ranks"] else links
    rates = [link["bytes_per_s"]["value"] for link in used]
    return min(rate[-1] if isinstance(rate, list) else rate for rate in rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=pathlib.Path, help="folder with gyre-predict")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results" / "prediction" / "queries.txt", metavar="FILE")
    options = parser.parse_args()
    lines = [f"{'KV':>8}{'':14}" + "".join(f"{name:>17}" for name in SCHEDULES) + "  the faster of",
             f"{'heads':>8}{'ranks':>6}{'queries':>8}" + f"{'(ms)':>17}" * len(SCHEDULES) + "  ring, ring-query  the rule says"]
    cases, right, lost = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for kv_heads in KV_HEADS:
            found = {queries: predicted(options.apps, kv_heads, queries, pathlib.Path(folder)) for queries in QUERIES}
            for ranks in RANKS:
                for queries in QUERIES:
                    time = {name: found[queries][name, ranks]["measurements"]["time"] for name in SCHEDULES}
                    ring = found[queries]["ring", ranks]["measurements"]
                    flops = 1e12 * ring["rate"] * ring["time"] / ring["kernel"]
                    rule = "ring" if keys_travel(kv_heads, queries, ranks, flops, slowest_link(ranks)) else "ring-query"
                    faster = min(("ring", "ring-query"), key=time.get)
                    cases, right = cases + 1, right + (rule == faster)
                    if rule != faster:
                        lost.append(time[rule] / time[faster] - 1)
                    lines.append(f"{kv_heads:8}{ranks:6}{queries:8}" + "".join(f"{time[name]:17.3f}" for name in SCHEDULES)
                                 + f"  {faster:16}  {rule}")
    lines += ["", f"the rule chooses the faster of ring and ring-query in {right} of {cases} cases"
              + (f"; where it does not, its choice takes up to {100 * max(lost):.0f} % longer" if lost else "")]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
