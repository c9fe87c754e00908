#!/usr/bin/env python3
"""This project on one GPU beside PyTorch on the same GPU, on the same shapes in the same run.

    python3 bench/gpu_vs_torch.py [BUILD] [--repetitions 5] [--only PART] [--record FOLDER]

BUILD (default build/cuda) holds apps/gyre-attention and apps/gyre-logprobs of a build with CUDA. Exit
77 without PyTorch, or where it sees no GPU.

PART is one of:

    attention         causal, bf16, forward and backward: gyre-attention (its executor, kernel cudnn and
                      kernel tiled) against scaled_dot_product_attention with PyTorch's cuDNN backend
                      and with its flash backend
    masks             packed documents, a window, blocks and a shared prefix: gyre-attention against
                      compiled FlexAttention with a block mask, which is made before the time begins
    logprob-entropy   bf16 logits: gyre-logprobs, gradients in place, against eager PyTorch after a
                      cast to f32 (log_softmax, gather, sum(p log p)), and torch.compile of it

Repetitions of all sides alternate, so that all meet the same clocks; of each, PyTorch is timed by CUDA
events, ours as the program reports it (median of its iterations). Medians are shown, and ratios:
PyTorch's time / ours; above 1, ours is faster. A side that fails shows its reason and no time.
--record writes them to FOLDER/<device>-<date>-torch.json.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "results"))
import gyre_result  # noqa: E402

SKIPPED, FAILED = 77, 1

HEADS, KV_HEADS = 16, 8

# Options of gyre-attention, and whether a query sees a key, of positions as tensors.
MASKS = {
    "documents 16 x 2048": (
        ["--gen", "dist=fixed,count=16,length=2048", "--capacity", "32768"],
        32768,
        lambda q, k: (q >= k) & (q // 2048 == k // 2048),
    ),
    "window 4096 of 32768": (
        ["--tokens", "32768", "--mask", "causal,window=4096"],
        32768,
        lambda q, k: (q >= k) & (q - k < 4096),
    ),
    "blocks of 256 of 32768": (
        ["--tokens", "32768", "--mask", "block-causal,block=256"],
        32768,
        lambda q, k: q // 256 >= k // 256,
    ),
    "prefix 1024 + 64 x 512": (
        ["--tokens", "33792", "--mask", "shared-prefix,prompt=1024,answer=512"],
        33792,
        lambda q, k: (q >= k) & ((k < 1024) | ((q - 1024) // 512 == (k - 1024) // 512)),
    ),
}


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(SKIPPED)


def our_times(arguments):
    """Median milliseconds by pass, from a program's JSON; of its last configuration."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "result.json")
        command = [*arguments, "--backend", "cuda", "--comm", "staged", "--json", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise RuntimeError(f"exit code {done.returncode}: {' '.join(last)}")
        return times_of_file(file, f"the result of {os.path.basename(arguments[0])}")


def times_of_file(path, file=None):
    """The times of a file that a program wrote; `file`: its name in messages."""
    return times_of(gyre_result.load(path, file), file or path)


def times_of(result, file="the result"):
    """{"fwd": ms, "bwd": ms} of a gyre-result/1; of a pass that is there twice, the last."""

    def entry(index, *way, kind):
        return gyre_result.get(file, result, "results", index, *way, kind=kind)

    count = len(gyre_result.get(file, result, "results", kind=gyre_result.LIST))
    return {
        entry(i, "key", "pass", kind=gyre_result.TEXT): entry(
            i, "statistics_ms", "median", kind=gyre_result.TIME
        )
        for i in range(count)
    }


def medians(samples):
    """{side: [{pass: ms}, ...]} -> {side: {pass: ms}}; passes that a side lacks are left out."""
    return {
        side: {p: statistics.median(s[p] for s in runs) for p in runs[0]}
        for side, runs in samples.items()
        if runs
    }


def ratios(times, ours):
    """PyTorch's time / ours, by side and pass, for sides that are not ours."""
    return {
        side: {p: times[side][p] / times[ours][p] for p in times[side] if p in times[ours]}
        for side in times
        if not side.startswith("gyre")
    }


def in_turns(sides, repetitions):
    """Calls each side's function `repetitions` times in turns; a side that fails is left out."""
    samples, errors = {name: [] for name in sides}, {}
    for _ in range(repetitions):
        for name, run in sides.items():
            if name in errors:
                continue
            try:
                samples[name].append(run())
            except Exception as error:  # pylint: disable=broad-except
                samples[name], errors[name] = [], str(error).splitlines()[0]
    return medians(samples), errors


def torch_timer(torch, run, iterations=10):
    """Median milliseconds of one call, by CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def forward_and_backward(torch, forward, inputs, d_out):
    """{"fwd": ms, "bwd": ms} of a function of tensors that require gradients."""
    out = forward()
    outs = out if isinstance(out, tuple) else (out,)
    backward = lambda: torch.autograd.grad(outs, inputs, d_out, retain_graph=True)  # noqa: E731
    return {"fwd": torch_timer(torch, forward), "bwd": torch_timer(torch, backward)}


def attention_sides(torch, build, tokens, head_dim):
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pylint: disable=import-error

    def tensor(heads, grad=True):
        x = torch.randn(1, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_(grad)

    q, k, v = tensor(HEADS), tensor(KV_HEADS), tensor(KV_HEADS)
    d_out = tensor(HEADS, grad=False)

    def theirs(backend):
        def run():
            with sdpa_kernel(backend):
                attention = torch.nn.functional.scaled_dot_product_attention
                forward = lambda: attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
                return forward_and_backward(torch, forward, (q, k, v), (d_out,))

        return run

    def ours(kernel):
        return lambda: our_times(
            [os.path.join(build, "apps", "gyre-attention"), "--tokens", str(tokens), "-d", "bf16",
             "--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--head-dim", str(head_dim),
             "--layout", "contiguous", "--schedule", "ring", "--kernel", kernel, "--check", "none"]
        )  # fmt: skip

    return {
        "gyre cudnn": ours("cudnn"),
        "gyre tiled": ours("tiled"),
        "torch cudnn": theirs(SDPBackend.CUDNN_ATTENTION),
        "torch flash": theirs(SDPBackend.FLASH_ATTENTION),
    }


def mask_sides(torch, build, name):
    from torch.nn.attention import flex_attention as flex  # pylint: disable=import-error

    heads, kv_heads, head_dim = 32, 8, 128
    arguments, tokens, sees = MASKS[name]

    def tensor(count, grad=True):
        x = torch.randn(1, count, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_(grad)

    def theirs():
        q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
        mask = flex.create_block_mask(lambda b, h, q, k: sees(q, k), None, None, tokens, tokens)
        attention = torch.compile(flex.flex_attention)
        forward = lambda: attention(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
        return forward_and_backward(torch, forward, (q, k, v), (tensor(heads, grad=False),))

    return {
        "gyre": lambda: our_times(
            [os.path.join(build, "apps", "gyre-attention"), *arguments, "-d", "bf16",
             "--heads", str(heads), "--kv-heads", str(kv_heads), "--head-dim", str(head_dim),
             "--partial-out", "bf16", "--partial-dq", "bf16", "--layout", "contiguous",
             "--schedule", "ring", "--check", "none"]
        ),
        "torch flex": theirs,
    }  # fmt: skip


def logprob_sides(torch, build, tokens, vocab):
    z = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(vocab, (tokens,), device="cuda")
    d_outs = tuple(torch.randn(tokens, device="cuda") for _ in range(2))

    def eager():
        logs = torch.log_softmax(z.float(), -1)
        return logs.gather(-1, ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

    compiled = torch.compile(eager)
    return {
        "gyre": lambda: our_times(
            [os.path.join(build, "apps", "gyre-logprobs"), "--op", "logprob-entropy", "--in-place",
             "--tokens", str(tokens), "--vocab", str(vocab), "-d", "bf16", "--check", "none"]
        ),
        "torch eager": lambda: forward_and_backward(torch, eager, (z,), d_outs),
        "torch compiled": lambda: forward_and_backward(torch, compiled, (z,), d_outs),
    }  # fmt: skip


def record(folder, device, results):
    os.makedirs(folder, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    path = os.path.join(folder, f"{name}-{date}-torch.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    return path


def show(case, times, ratio, errors):
    for side, by_pass in times.items():
        text = "  ".join(f"{p} {ms:9.3f} ms" for p, ms in by_pass.items())
        more = "  ".join(f"{p} x{x:.2f}" for p, x in ratio.get(side, {}).items())
        print(f"{case:<40} {side:<16} {text}   {more}")
    for side, reason in errors.items():
        print(f"{case:<40} {side:<16} n/a: {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="?", default="build/cuda")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=["attention", "masks", "logprob-entropy"])
    parser.add_argument("--record", metavar="FOLDER")
    options = parser.parse_args()
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        skip(f"no PyTorch in {sys.executable} ({error})")
    if not torch.cuda.is_available():
        skip(f"PyTorch {torch.__version__} sees no GPU")
    torch._functorch.config.donated_buffer = False  # graphs are kept for the next repetition
    device = torch.cuda.get_device_name()
    print(f"# {device}, PyTorch {torch.__version__}; ratio: PyTorch's time / ours")
    cases = [
        (f"attention D={d} tokens={t}", "gyre cudnn", attention_sides, (t, d))
        for d in (64, 128)
        for t in (8192, 16384, 32768)
    ] + [(f"masks {name}", "gyre", mask_sides, (name,)) for name in MASKS]
    cases += [(f"logprob-entropy V={v}", "gyre", logprob_sides, (4096, v)) for v in (32768, 152064)]
    cases = [case for case in cases if case[0].startswith(options.only or "")]
    results = {"device": device, "torch": torch.__version__, "repetitions": options.repetitions, "cases": []}
    for case, ours, sides, shape in cases:
        torch.cuda.empty_cache()
        times, errors = in_turns(sides(torch, options.build, *shape), options.repetitions)
        ratio = ratios(times, ours) if ours in times else {}
        show(case, times, ratio, errors)
        results["cases"].append({"case": case, "median_ms": times, "ratio": ratio, "errors": errors})
    if options.record:
        print(f"recorded {record(options.record, device, results)}")
    return FAILED if any("gyre" in name for c in results["cases"] for name in c["errors"]) else 0


if __name__ == "__main__":
    sys.exit(main())
