#!/usr/bin/env python3
"""The gated delta rule of gyre-recurrence beside the PyTorch code of transformers, on one core in the same run.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch transformers
    build/torch-venv/bin/python bench/recurrence_vs_torch.py [--build build/cpu] [--repetitions 5]

Needs both packages in the Python that runs it (exit 77 without them), and gyre-recurrence and gyre-info of a build.

    transformers  torch_chunk_gated_delta_rule of its Qwen3-Next, chunks of 64 tokens: what its models run without a GPU.
                  Keys are repeated to the heads of values beforehand, as the model does; gradients by autograd
    ours          gyre-recurrence --kind gdn on one rank and one document, chunks of 64 tokens; f32

forward: outputs alone. forward+backward: also gradients of queries, keys, values, decays and beta. FLOPs are those of the
definition, token by token (docs/recurrence.md); chunks compute more, ours and theirs. Repetitions alternate, so that both
meet the same disturbances. Medians of elapsed time are shown, and of all repetitions the spread (max - min) / median;
ratio = transformers' time / ours; of peak: rate of ours over that of f32 FMAs on a core, by gyre-info.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import machine

SKIPPED, USAGE = 77, 2
SHAPES = ((512, 4, 4, 64), (2048, 4, 4, 128), (2048, 4, 2, 128), (8192, 2, 1, 128))  # tokens, heads, key heads, dim

try:
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
except ImportError as error:
    print(f"skipped: no PyTorch and transformers in {sys.executable} ({error}); to get them:\n"
          "  python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch transformers\n"
          "and run this with build/torch-venv/bin/python", file=sys.stderr)
    sys.exit(SKIPPED)


def results_of(command, folder):
    """The result file of a run."""
    file = os.path.join(folder, "result.json")
    ran = subprocess.run([*command, "--json", file], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"recurrence_vs_torch.py: {' '.join(command)}: {ran.stderr}")
    with open(file, encoding="utf-8") as opened:
        return json.load(opened)


def time_ours(apps, shape, folder):
    """Seconds and FLOPs, forward and forward+backward."""
    tokens, heads, key_heads, dim = map(str, shape)
    command = [os.path.join(apps, "gyre-recurrence"), "--kind", "gdn", "--tokens", tokens, "--heads", heads, "--key-heads",
               key_heads, "--key-dim", dim, "--value-dim", dim, "-n", "3", "--check", "none"]
    rows = {row["key"]["pass"]: row for row in results_of(command, folder)["results"]}
    times = {name: row["statistics_ms"]["median"] / 1e3 for name, row in rows.items()}
    flops = {name: row["model"]["flops"] for name, row in rows.items()}
    return {"forward": (times["fwd"], flops["fwd"]),
            "forward+backward": (times["fwd"] + times["bwd"], flops["fwd"] + flops["bwd"])}


def time_torch(shape, backward):
    """Seconds of the faster of two runs."""
    tokens, heads, key_heads, dim = shape

    def random(count):
        return torch.randn(1, tokens, count, dim, requires_grad=backward)

    q, k, v = random(key_heads), random(key_heads), random(heads)
    g = (-torch.rand(1, tokens, heads)).requires_grad_(backward)
    beta = torch.rand(1, tokens, heads).requires_grad_(backward)
    d_out, best = torch.randn(1, tokens, heads, dim), float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        with torch.set_grad_enabled(backward):
            repeated = [x.repeat_interleave(heads // key_heads, 2) for x in (q, k)]
            out, _ = torch_chunk_gated_delta_rule(*repeated, v, g, beta, use_qk_l2norm_in_kernel=False)
            if backward:
                torch.autograd.grad(out, (q, k, v, g, beta), d_out)
        best = min(best, time.perf_counter() - begin)
    return best


def text_of(times):
    median = statistics.median(times)
    return f"{1e3 * median:10.1f} {(max(times) - min(times)) / median:7.0%}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", default="build/cpu", help="folder of a build (build/cpu)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each side (5)")
    parser.add_argument("--json", metavar="FILE", help="write all times here")
    args = parser.parse_args()
    apps = os.path.join(args.build, "apps")
    if not os.access(os.path.join(apps, "gyre-recurrence"), os.X_OK) or args.repetitions < 1:
        print(f"no gyre-recurrence in '{apps}', or no repetitions; build it, or name a --build", file=sys.stderr)
        return USAGE
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    ours, theirs, flops = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        rates = results_of([os.path.join(apps, "gyre-info")], folder)["measured"]["rates"]
        peak = rates["one_core_fma_flops_per_s"]["value"]
        for _ in range(args.repetitions):
            for shape in SHAPES:
                for name, (seconds, work) in time_ours(apps, shape, folder).items():
                    ours.setdefault((shape, name), []).append(seconds)
                    theirs.setdefault((shape, name), []).append(time_torch(shape, name != "forward"))
                    flops[shape, name] = work
    print(f"{machine.text()}; {peak / 1e9:.0f} GFLOP/s a core")
    print(f"{'tokens':>6} {'heads':>5} {'key heads':>9} {'dim':>4} {'pass':16} {'ours':>10} {'spread':>7} {'of peak':>8} "
          f"{'transformers':>12} {'spread':>7} {'ratio':>6}\n{'':44}{'(ms)':>10} {'':7} {'':8} {'(ms)':>12}")
    rows = []
    for (shape, name), times in ours.items():
        mine, other = statistics.median(times), statistics.median(theirs[shape, name])
        share = flops[shape, name] / mine / peak
        print(f"{shape[0]:6} {shape[1]:5} {shape[2]:9} {shape[3]:4} {name:16} {text_of(times)} {share:8.1%} "
              f"  {text_of(theirs[shape, name])} {other / mine:6.2f}")
        rows.append({"name": "recurrence-vs-torch", **dict(zip(("tokens", "heads", "key_heads", "dim"), shape)), "pass": name,
                     "ours": 1e3 * mine, "torch": 1e3 * other, "ratio": other / mine, "of_peak": 100 * share,
                     "seconds": {"ours": times, "torch": theirs[shape, name]}})
    if args.json:
        machine.write_benchmarks(args.json, rows, torch=torch.__version__, peak=peak)
    return 0


if __name__ == "__main__":
    sys.exit(main())
