#!/usr/bin/env python3
"""Documents scored by a model: gyre-pipeline beside PyTorch, same weights, tokens and processor.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch numpy h5py
    build/torch-venv/bin/python bench/model_vs_torch.py [FILE...] [--build build/cpu]
    python3 bench/model_vs_torch.py --random --backend cuda --dtype bf16 --build build/cuda

Needs PyTorch 2.5 or newer, NumPy and h5py in the Python that runs it (exit 77 without them) and the
programs of a build. FILE: text; default: four licences that Debian has, 1.5 to 11 thousand tokens.
--random: 32 documents of 4096 random tokens, and a random model: 8 layers of 2048 channels, 32 query and
8 KV heads of 64, 8192 in the MLP, 32 K ids.

    ours      gyre-pipeline on --ranks ranks (context-parallel; one thread each)
    torch     the same decoder, eager, in the same type. On a CPU: on as many threads, a document at a
              time, with the flash kernel for CPUs of scaled_dot_product_attention. On a GPU: documents
              of equal length in batches of 8, with the kernel that PyTorch chooses. Log-softmax in
              blocks of rows
    compiled  on a GPU: the same, with torch.compile of a layer

Passes of the sides alternate, so that all meet the same disturbances; of each of ours, the median of
gyre-pipeline's own passes counts. Printed are medians, their spread, (max - min) / median, FLOP/s,
and bits per byte (bits per token with --random); exit code 1 if these differ by more than 0.001
(bf16: 0.02). ratio = PyTorch's time / the side's.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import machine

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [os.path.join(ROOT, "inputs"), os.path.join(ROOT, "python")]

SKIPPED, FAILED = 77, 1

try:
    import h5py
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"skipped: {error}; see {__file__} --help", file=sys.stderr)
    sys.exit(SKIPPED)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
from gyre.reading import read_arrays  # noqa: E402

LICENCES = [
    f"/usr/share/common-licenses/{name}" for name in ("Apache-2.0", "Artistic", "BSD", "CC0-1.0")
]
ROWS = 4096  # whose logits are held at a time
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BATCH = 8  # documents, on a GPU
RANDOM_MODEL = {
    "vocab_size": 32768,
    "vocab_padded": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
RANDOM_DOCUMENTS, RANDOM_LENGTH = 32, 4096


class Decoder:
    """The model of a file (inputs/SCHEMA.md): RMSNorm, RoPE, grouped heads, SwiGLU."""

    def __init__(self, path, device="cpu", dtype=torch.float32):
        self.device, self.dtype = device, dtype
        with h5py.File(path) as file:
            attributes = file["model"].attrs.items()
            self.config = {key: value.item() if hasattr(value, "item") else value for key, value in attributes}
        arrays = read_arrays(path, "model")
        self.weights = {
            name: torch.from_numpy(array).to(device, dtype) for name, array in arrays.items()
        }
        self.layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config["num_key_value_heads"])
        self.dim = int(self.config["head_dim"])
        self.run_layer = self.layer

    def compiled(self):
        """The same decoder with compiled layers."""
        other = object.__new__(Decoder)
        other.__dict__.update(self.__dict__)
        other.run_layer = torch.compile(self.layer)
        return other

    def norm(self, x, weight):
        """RMS norm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], weight, float(self.config["rms_norm_eps"]))

    def rotate(self, x, cos, sin):
        """Rotary embedding of [documents, heads, tokens, dim]; cos, sin [tokens, dim / 2]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def layer(self, x, w, cos, sin):
        """One layer of x [documents, tokens, hidden]; w: its weights."""
        many, count = x.shape[:2]
        h = self.norm(x, w["attn_norm"])
        q, k, v = ((h @ w[name]).view(many, count, -1, self.dim).transpose(1, 2)
                   for name in ("wq", "wk", "wv"))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads > self.kv_heads
        )
        x = x + mixed.transpose(1, 2).reshape(many, count, -1) @ w["wo"]
        h = self.norm(x, w["mlp_norm"])
        return x + (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]

    def hidden(self, tokens):
        """Hidden states of documents [documents, tokens] of one length, [..., hidden]."""
        count = tokens.shape[1]
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        turns = float(self.config["rope_theta"]) ** -steps
        angle = torch.arange(count, dtype=torch.float64)[:, None] * turns
        cos, sin = (f.to(self.device, self.dtype) for f in (angle.cos(), angle.sin()))
        x = self.weights["embed"][tokens]
        for layer in range(self.layers):
            at = f"layers/{layer}/"
            weights = {
                name[len(at):]: w for name, w in self.weights.items() if name.startswith(at)
            }
            x = self.run_layer(x, weights, cos, sin)
        return self.norm(x, self.weights["final_norm"])

    def bits(self, tokens):
        """Bits of all tokens of documents but the first of each."""
        x = self.hidden(tokens)[:, :-1].flatten(0, 1)
        is_tied = self.config.get("tie_word_embeddings", 0)
        head = self.weights["embed"].T if is_tied else self.weights["head"]
        head = head[:, : self.config["vocab_size"]]
        losses = [
            F.cross_entropy((rows @ head).float(), targets, reduction="none").double().sum()
            for rows, targets in zip(x.split(ROWS), tokens[:, 1:].flatten().split(ROWS))
        ]
        return float(sum(losses)) / math.log(2)

    def flops(self, documents):
        """Of a pass: products, and visible pairs of attention."""
        c = self.config
        width = self.heads * self.dim
        layer = c["hidden_size"] * (
            2 * width + 2 * self.kv_heads * self.dim + 3 * c["intermediate_size"]
        )
        linear = 2.0 * (self.layers * layer + c["hidden_size"] * c["vocab_size"])
        pairs = sum(len(d) * (len(d) + 1) / 2 for d in documents)
        return linear * sum(len(d) for d in documents) + 4.0 * self.layers * width * pairs


def batches_of(documents, device):
    """Documents of equal length, together: [documents, tokens]."""
    most = 1 if device == "cpu" else BATCH
    batches = []
    for document in documents:
        if batches and len(batches[-1]) < most and len(batches[-1][0]) == len(document):
            batches[-1].append(document)
        else:
            batches.append([document])
    return [torch.stack(batch).to(device) for batch in batches]


def write_random(folder):
    """Files of a random model and of random documents."""
    import gyre_files  # of inputs/

    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in gyre_files.model_shapes(RANDOM_MODEL).items():
        scale = 1 if len(shape) == 1 or name == "embed" else shape[0] ** -0.5
        weights[name] = np.ones(shape, np.float32) if len(shape) == 1 else (
            rng.standard_normal(shape, np.float32) * np.float32(scale)
        )
    model = os.path.join(folder, "model.h5")
    gyre_files.write_model(model, RANDOM_MODEL, weights, {"generator": "bench/model_vs_torch.py"})
    documents = [
        (f"random {d}", rng.integers(0, 256, RANDOM_LENGTH)) for d in range(RANDOM_DOCUMENTS)
    ]
    path = os.path.join(folder, "documents.h5")
    gyre_files.write_documents(path, documents, {"generator": "bench/model_vs_torch.py"})
    return model, path


def read_documents(path):
    """Tokens of every document."""
    with h5py.File(path) as file:
        offsets = file["documents/offsets"][()]
        tokens = torch.from_numpy(file["documents/tokens"][()].astype("int64"))
    return [tokens[begin:end] for begin, end in zip(offsets[:-1], offsets[1:])]


def time_torch(decoder, batches, threads):
    """Seconds and bits of a pass."""
    if decoder.device == "cpu":
        torch.set_num_threads(threads)
    on_gpu = decoder.device != "cpu"
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        bits = sum(decoder.bits(batch) for batch in batches)
    return time.perf_counter() - start, bits


def run_ours(args, path, folder):
    """The result file of gyre-pipeline, as a dictionary."""
    result = os.path.join(folder, "result.json")
    check = ["--check", "none"]
    if args.backend == "cuda" and not os.path.exists(result):  # the first run is verified
        check = ["--check-tokens", "24", "--check-seconds", "5"]
    options = ["--backend", "cuda", "--bin", "32K"] if args.backend == "cuda" else []
    run = subprocess.run(
        [args.mpiexec, "-n", str(args.ranks), os.path.join(args.build, "apps", "gyre-pipeline"),
         "--input", path, "--model", args.model, "--cp", str(args.ranks), "--json", result,
         "--iters", str(args.iters), "--warmup", "1", "--dtype", args.dtype, *check, *options,
         *args.ours],
        check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if run.returncode != 0:
        sys.exit(f"gyre-pipeline: exit code {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    if "--check" not in check:
        print("\n".join(l for l in run.stdout.splitlines() if l.startswith(("VERIFY", "#  ", "# phase", "# limits"))))
    with open(result, encoding="utf-8") as file:
        return json.load(file)


def rows_of(times, scores, documents, tokens, threads, flops):
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
            "flops_per_s": flops / medians[name],
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
    parser.add_argument("--random", action="store_true", help="a random model and random documents")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    parser.add_argument("--dtype", choices=list(TYPES), default="f32", help="(f32)")
    parser.add_argument("--ours", action="append", default=[], metavar="OPTION",
                        help="one more option of gyre-pipeline, such as --ours=--residual=bf16")
    args = parser.parse_args()
    if args.backend == "cuda" and not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} sees no GPU", file=sys.stderr)
        return SKIPPED
    times, scores = {"ours": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        if args.random:
            args.model, path = write_random(folder)
        else:
            path = os.path.join(folder, "documents.h5")
            importer = os.path.join(args.build, "apps", "gyre-import")
            subprocess.run([importer, "-o", path, *(args.files or LICENCES)], check=True,
                           stdout=subprocess.DEVNULL)
        documents = read_documents(path)
        tokens = sum(document.numel() for document in documents)
        # Bits are per byte, without the first and last token of each document, or per prediction.
        units = tokens - (1 if args.random else 2) * len(documents)
        sides = {"torch": Decoder(args.model, args.backend, TYPES[args.dtype])}
        if args.backend == "cuda":
            sides["compiled"] = sides["torch"].compiled()
        batches = batches_of(documents, args.backend)
        for name, decoder in sides.items():
            times[name] = []
            time_torch(decoder, batches, args.ranks)  # a first pass, not counted
        for _ in range(args.repetitions):
            for name, decoder in sides.items():
                seconds, bits = time_torch(decoder, batches, args.ranks)
                times[name].append(seconds)
                scores[name] = bits / units
            result = run_ours(args, path, folder)
            times["ours"].append(result["results"][0]["statistics_ms"]["median"] / 1e3)
            entropy = {fom["metric"]: fom["value"] for fom in result["fom"]}
            text = tokens - (0 if args.random else 2 * len(documents))
            scores["ours"] = entropy["bits_per_byte"] * text / units
        flops = sides["torch"].flops(documents)
    processor = (torch.cuda.get_device_name() if args.backend == "cuda"
                 else torch.backends.cpu.get_cpu_capability())
    print(machine.text())
    print(f"# PyTorch {torch.__version__}, {processor}; {args.build}; {args.dtype}")
    print(f"# {len(documents)} documents, {tokens} tokens; {args.ranks} ranks; medians of"
          f" {args.repetitions} alternating passes")
    print(f"{'':8} {'ms':>9} {'tokens/s':>9} {'TFLOP/s':>8} {'spread':>7}"
          f" {'bits':>10} {'ratio':>6}")
    rows = rows_of(times, scores, len(documents), tokens, args.ranks, flops)
    for row in rows:
        print(f"{row['side']:8} {row['time']:9.0f} {row['rate']:9.0f} {row['flops_per_s'] / 1e12:8.2f}"
              f" {row['spread']:7.0%} {row['bits_per_byte']:10.5f} {row['ratio']:6.2f}")
    if args.json:
        machine.write_benchmarks(args.json, rows, pytorch=torch.__version__, device=processor,
                                 dtype=args.dtype)
    most = 1e-3 if args.dtype == "f32" else 2e-2
    if max(scores.values()) - min(scores.values()) > most:
        print("the scores differ", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
