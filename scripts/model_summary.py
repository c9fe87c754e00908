#!/usr/bin/env python3
"""Prints what scripts/model.sh found: model_summary.py FOLDER TEXT... All figures come from the files in FOLDER."""

import gzip
import json
import pathlib
import sys

import h5py

RUNS = (("one-rank", "1 rank"), ("two-ranks", "2 ranks, cp = 2"))


def fom(run, metric):
    return next(f["value"] for f in run["fom"] if f["metric"] == metric)


def print_run(name, run):
    checks = run["verification"]["checks"]
    passed = sum(check["passed"] for check in checks)
    error = max(check["error_over_tolerance"] for check in checks)
    print(f"{name:19}{fom(run, 'bits_per_byte'):9.4f}  {passed}/{len(checks)} against the float64 twin, largest error "
          f"{error:.2f} of its tolerance")


def main(folder, texts):
    with h5py.File(folder / "model.h5") as model, h5py.File(folder / "docs.h5") as docs:
        shape = model["model"].attrs
        tokens, predicted = docs["documents/tokens"].size, docs["documents/text_bytes"][()].sum()
        print(f"model              {shape['num_hidden_layers']} layers, {shape['hidden_size']} wide, {shape['vocab_size']} tokens")
        print(f"text               {len(texts)} documents, {tokens} tokens, {predicted} bytes predicted")
        print("                   bits/byte")
    runs = [(name, json.loads((folder / f"{file}.json").read_text())) for file, name in RUNS]
    for name, run in runs:
        print_run(name, run)
    with h5py.File(folder / "one-rank.h5") as one, h5py.File(folder / "two-ranks.h5") as two:
        differences = [abs(one[name][()] - two[name][()]).max() for name in ("results/logprob", "results/entropy")]
    print(f"{'both':28}  largest difference {differences[0]:.1e} of log-probabilities, {differences[1]:.1e} of entropies, nats")
    contents = [pathlib.Path(text).read_bytes() for text in texts]
    bits = 8 * sum(len(gzip.compress(content, 9)) for content in contents) / sum(map(len, contents))
    print(f"{'gzip -9, each text':19}{bits:9.4f}")
    for name, run in runs:
        measured = run["results"][0]["measurements"]
        print(f"{name}: {measured['rate']:.0f} tokens/s in one pass, {run['status']['result']}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
