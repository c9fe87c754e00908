#!/usr/bin/env python3
"""A text scored by the trained model: gyre-pipeline beside PyTorch, same weights, text and cores.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch numpy h5py
    build/torch-venv/bin/python bench/model_vs_torch.py [FILE...] [--build build/cpu]

Needs PyTorch 2.5 or newer, NumPy and h5py in the Python that runs it (exit 77 without them) and the
programs of a build. FILE: text; default: four licences that Debian has, 1.5 to 11 thousand tokens.

    ours      gyre-pipeline on --ranks ranks (context-parallel; one thread each)
    PyTorch   the same decoder in f32 on as many threads, a document at a time, with the flash
              kernel for CPUs of scaled_dot_product_attention and grouped KV heads; log-softmax in
              blocks of rows

Passes of the two alternate, so that both meet the same disturbances; of each of ours, the median of
gyre-pipeline's own passes counts. Printed are medians, their spread, (max - min) / median, and bits
per byte; exit code 1 if these differ by more than 0.001. ratio = PyTorch's time / the side's.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import machine

SKIPPED, FAILED = 77, 1

try:
    import h5py
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"skipped: {error}; see {__file__} --help", file=sys.stderr)
    sys.exit(SKIPPED)

LICENCES = [
    f"/usr/share/common-licenses/{name}" for name in ("Apache-2.0", "Artistic", "BSD", "CC0-1.0")
]
ROWS = 4096  # whose logits are held at a time


class Decoder:
    """The model of a file (inputs/SCHEMA.md): RMSNorm, RoPE, grouped heads, SwiGLU."""

    def __init__(self, path):
        with h5py.File(path) as file:
            model = file["model"]
            self.config = dict(model.attrs)
            self.weights = {}
            model.visititems(self.keep)
        self.layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config["num_key_value_heads"])
        self.dim = int(self.config["head_dim"])

    def keep(self, name, item):
        """Keeps a dataset as a tensor."""
        if isinstance(item, h5py.Dataset):
            self.weights[name] = torch.from_numpy(item[()]).float()

    def norm(self, x, name):
        """RMS norm over the last dimension."""
        epsilon = float(self.config["rms_norm_eps"])
        return F.rms_norm(x, x.shape[-1:], self.weights[name], epsilon)

    def rotate(self, x, cos, sin):
        """Rotary embedding of [heads, tokens, dim]; cos, sin [tokens, dim / 2]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def hidden(self, tokens):
        """Hidden states of one document, [tokens, hidden]."""
        w, count = self.weights, tokens.numel()
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        turns = float(self.config["rope_theta"]) ** -steps
        angle = torch.arange(count, dtype=torch.float64)[:, None] * turns
        cos, sin = angle.cos().float(), angle.sin().float()
        x = w["embed"][tokens]
        for layer in range(self.layers):
            at = f"layers/{layer}/"
            h = self.norm(x, at + "attn_norm")
            q, k, v = ((h @ w[at + name]).view(count, -1, self.dim).transpose(0, 1)
                       for name in ("wq", "wk", "wv"))
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            mixed = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=self.heads > self.kv_heads
            )
            x = x + mixed[0].transpose(0, 1).reshape(count, -1) @ w[at + "wo"]
            h = self.norm(x, at + "mlp_norm")
            x = x + (F.silu(h @ w[at + "w_gate"]) * (h @ w[at + "w_up"])) @ w[at + "w_down"]
        return self.norm(x, "final_norm")

    def bits(self, tokens):
        """Bits of all tokens of a document behind the first."""
        x, head = self.hidden(tokens)[:-1], self.weights["head"][:, : self.config["vocab_size"]]
        losses = (
            F.cross_entropy(rows @ head, targets, reduction="none").double().sum()
            for rows, targets in zip(x.split(ROWS), tokens[1:].split(ROWS))
        )
        return float(sum(losses)) / math.log(2)


def read_documents(path):
    """Tokens of every document."""
    with h5py.File(path) as file:
        offsets = file["documents/offsets"][()]
        tokens = torch.from_numpy(file["documents/tokens"][()].astype("int64"))
    return [tokens[begin:end] for begin, end in zip(offsets[:-1], offsets[1:])]


def time_torch(decoder, documents, threads):
    """Seconds and bits of a pass."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        bits = sum(decoder.bits(tokens) for tokens in documents)
    return time.perf_counter() - start, bits


def run_ours(args, path, folder):
    """The result file of gyre-pipeline, as a dictionary."""
    result = os.path.join(folder, "result.json")
    subprocess.run(
        [args.mpiexec, "-n", str(args.ranks), os.path.join(args.build, "apps", "gyre-pipeline"),
         "--input", path, "--model", args.model, "--cp", str(args.ranks), "--json", result,
         "--iters", str(args.iters), "--warmup", "1", "--check", "none"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with open(result, encoding="utf-8") as file:
        return json.load(file)


def rows_of(times, scores, documents, tokens, threads):
    """What a file says of both sides; times in ms."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        {
            "name": "model-vs-torch",
            "side": name,
            "documents": documents,
            "tokens": tokens,
            "cores": threads,
            "time": medians[name] * 1e3,
            "rate": tokens / medians[name],
            "spread": (max(seconds) - min(seconds)) / medians[name],
            "bits_per_byte": scores[name],
            "ratio": medians["torch"] / medians[name],
            "seconds": seconds,
        }
        for name, seconds in times.items()
    ]


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="text (four licences)")
    parser.add_argument("--build", default="build/cpu", help="folder of a build (build/cpu)")
    parser.add_argument("--model", default="inputs/model.h5", help="(inputs/model.h5)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, and threads of PyTorch (2)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each side (5)")
    parser.add_argument("--iters", type=int, default=1, help="passes of one repetition of ours (1)")
    parser.add_argument("--mpiexec", default="mpiexec", help="starts our ranks (mpiexec)")
    parser.add_argument("--json", metavar="FILE", help="write all times here")
    args = parser.parse_args()
    decoder = Decoder(args.model)
    times, scores = {"ours": [], "torch": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "documents.h5")
        importer = os.path.join(args.build, "apps", "gyre-import")
        subprocess.run([importer, "-o", path, *(args.files or LICENCES)], check=True,
                       stdout=subprocess.DEVNULL)
        documents = read_documents(path)
        tokens = sum(document.numel() for document in documents)
        text = tokens - 2 * len(documents)  # without the first and last token of each
        time_torch(decoder, documents, args.ranks)  # a first pass, not counted
        for _ in range(args.repetitions):
            seconds, bits = time_torch(decoder, documents, args.ranks)
            times["torch"].append(seconds)
            scores["torch"] = bits / text
            result = run_ours(args, path, folder)
            times["ours"].append(result["results"][0]["statistics_ms"]["median"] / 1e3)
            scores["ours"] = next(
                fom["value"] for fom in result["fom"] if fom["metric"] == "bits_per_byte"
            )
    print(machine.text())
    print(f"# PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {args.build}")
    print(f"# {len(documents)} documents, {tokens} tokens; {args.ranks} cores; medians of"
          f" {args.repetitions} alternating passes")
    print(f"{'':8} {'ms':>9} {'tokens/s':>9} {'spread':>7} {'bits/byte':>10} {'ratio':>6}")
    rows = rows_of(times, scores, len(documents), tokens, args.ranks)
    for row in rows:
        print(f"{row['side']:8} {row['time']:9.0f} {row['rate']:9.0f} {row['spread']:7.0%}"
              f" {row['bits_per_byte']:10.5f} {row['ratio']:6.2f}")
    if args.json:
        machine.write_benchmarks(args.json, rows, pytorch=torch.__version__)
    if abs(scores["ours"] - scores["torch"]) > 1e-3:
        print("the scores differ", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
