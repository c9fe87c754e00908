#!/usr/bin/env python3
"""Top-k sparse attention: one layout for the indexer and for attention, or one for each? top_k.py APPS [-o FILE]

An indexer scores all keys up to each query, a triangle; attention reads the K best of them, a constant number for most queries.
Pairs of each rank are those of gyre-attention --explain for --mask causal and, since a query that selects K keys has as many as one
with a window of K, for --window K; at 8K tokens this is compared with --mask top-k. FLOPs of a pair, forward, are those of
DeepSeek-V3.2: 2 x 64 x 128 in the indexer, 2 x 128 x (576 + 512) in attention, which reads latents.

With two layouts the indexer's queries (64 heads of 128 in FP8 and their f32 weights) go to the rank that scores them, and what they
select (K positions of 4 bytes) comes back; the rows that move are those of gyre-shard's indices of both layouts. Two layouts pay if
they save more FLOPs for each byte sent than the machine computes while it sends one. FILE is results/prediction/top-k.txt.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import h5py
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYOUTS = ("contiguous", "dual-chunk-swap", "striped")
KEYS, RANKS, TOKENS = 2048, (8, 64), (2 << 10, 16 << 10, 128 << 10, 1 << 20)
INDEXER, ATTENTION = 2 * 64 * 128, 2 * 128 * (576 + 512)
QUERY, INDEX, INDEX_KEY, CANDIDATE = 64 * 128 + 64 * 4, 4, 128 + 4, 4 + 4  # bytes; a key: FP8 and its scale; a candidate: position, score


def run(apps, program, *options):
    ran = subprocess.run([str(word) for word in (apps / program, *options)], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"top_k.py: {program}: {ran.stderr}")


def counted(apps, folder, tokens, ranks, *mask):
    """Pairs of each rank [ranks] by layout, and rows that a rank sends in an all-gather of keys."""
    run(apps, "gyre-attention", "--explain", "--cp", ranks, "--tokens", tokens, "--heads", 1, "--kv-heads", 1, "--head-dim", 1,
        "--layout", ",".join(LAYOUTS), "--schedule", "all-gather", "--pass", "fwd", *mask, "--json", folder / "plans.json")
    plans = json.loads((folder / "plans.json").read_text())["plans"]
    of_ranks = {plan["layout"]: plan["passes"][0]["ranks"] for plan in plans}
    sent = of_ranks[LAYOUTS[0]][0]["bytes_sent"] // 8  # a key and a value of one f32
    return {layout: np.array([rank["pairs"] for rank in some]) for layout, some in of_ranks.items()}, sent


def moved(apps, folder, ranks):
    """Share of a rank's rows, at most, that have another rank under the second layout."""
    owners = []
    for layout in LAYOUTS[:2]:
        run(apps, "gyre-shard", "--gen", f"dist=fixed,length={2 * ranks},count=1", "--capacity", 2 * ranks, "--cp", ranks, "--layout", layout,
            "-o", folder / "shards.h5")
        with h5py.File(folder / "shards.h5") as file:
            index = file["shards/index"][...]
        owners.append(np.repeat(np.arange(ranks), 2)[np.argsort(index.ravel())])
    return np.bincount(owners[0][owners[0] != owners[1]], minlength=ranks).max() / 2


def imbalance(pairs):
    return 100 * (pairs.max() / pairs.mean() - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=pathlib.Path, help="folder with gyre-attention and gyre-shard")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results" / "prediction" / "top-k.txt", metavar="FILE")
    options = parser.parse_args()
    balance = [f"pairs of the busiest rank over the mean, less 1; {KEYS} keys", f"{'tokens':>9}{'cp':>4}  {'layout':16}{'indexer':>9}{'attention':>11}"]
    cost = ["forward, TFLOP of the slowest rank; two: the indexer under dual-chunk-swap, attention contiguous",
            f"{'tokens':>9}{'cp':>4}{'mean':>9}" + "".join(f"{name:>17}" for name in (*LAYOUTS, "two")) + f"{'sent for two':>15}{'saved, FLOP/byte':>18}"]
    keys = ["sent by a rank (MB), forward", f"{'tokens':>9}{'cp':>4}{'index keys':>12}{'candidates':>12}"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        check = [counted(options.apps, folder, 8 << 10, RANKS[0], *mask)[0] for mask in (("--mask", "top-k,keys=512"), ("--window", 512))]
        if any((check[0][layout] != check[1][layout]).any() for layout in LAYOUTS):
            sys.exit("top_k.py: selected keys and a window of as many have other pairs")
        for ranks in RANKS:
            share = moved(options.apps, folder, ranks)
            for tokens in TOKENS:
                scored, sent = counted(options.apps, folder, tokens, ranks)
                attended, _ = counted(options.apps, folder, tokens, ranks, "--window", KEYS)
                flops = {layout: INDEXER * scored[layout] + ATTENTION * attended[layout] for layout in LAYOUTS}
                two = INDEXER * scored[LAYOUTS[1]].max() + ATTENTION * attended[LAYOUTS[0]].max()
                rows = tokens // ranks
                back = share * rows * (QUERY + INDEX * KEYS)
                saved = (flops[LAYOUTS[0]].max() - two) / back
                balance += [f"{tokens:9}{ranks:4}  {layout:16}{imbalance(scored[layout]):8.1f}%{imbalance(attended[layout]):10.1f}%" for layout in LAYOUTS]
                cost += [f"{tokens:9}{ranks:4}{flops[LAYOUTS[0]].mean() / 1e12:9.3f}" + "".join(f"{flops[layout].max() / 1e12:17.3f}" for layout in LAYOUTS)
                         + f"{two / 1e12:17.3f}{back / 1e6:12.1f} MB{saved:18.0f}"]
                keys += [f"{tokens:9}{ranks:4}{sent * INDEX_KEY / 1e6:12.1f}{(ranks - 1) * rows * KEYS * CANDIDATE / 1e6:12.1f}"]
    options.output.write_text("\n".join([*balance, "", *cost, "", *keys]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
