#!/usr/bin/env python3
"""Attention of this project's CPU kernel beside PyTorch's, on the same shapes in the same run.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch
    build/torch-venv/bin/python bench/attention_vs_torch.py [--build build/cpu] [--repetitions 7]

Needs PyTorch 2.5 or newer in the Python that runs it (exit 77 without it) and the program
bench/bench-kernels of a build. The shapes are those of its benchmarks attention_forward and
attention_backward that hold causal documents of f32, of equal length, without a window.

    PyTorch   scaled_dot_product_attention(is_causal=True), grouped KV heads not repeated
              (enable_gqa), in one of three ways:
      batch     one call of its flash kernel for CPUs on [documents, heads, length, dim]: what a
                padded batch is where nothing needs padding, its best case
      calls     one call of that kernel a document, on views of [tokens, heads, dim]
      nested    one call on jagged nested tensors (PyTorch 2.15 has no causal kernel for them on CPUs)
    ours      BlockKernel on [tokens, heads * dim], all documents in one call

For one document the three are one; it is called batch.

forward: output and log-sum-exp. forward+backward: also dQ, dK, dV; the delta of PyTorch's backward,
a small part of its time, is inside its figure and not in ours. FLOPs are those of visible pairs:
4 dim each forward, 10 dim backward. Repetitions of the two alternate, so that both meet the same
disturbances; a repetition of ours is the median of the program's own. Medians are shown, and of all
repetitions the spread (max - min) / median. On one
thread, time is CPU time; on more, elapsed time. ratio = PyTorch's time / ours: above 1, ours is
faster. Where bench-kernels has no benchmark for a number of threads (an argument "threads"; none
means 1), PyTorch stands alone.
"""

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings

import machine

SKIPPED, USAGE = 77, 2

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(
        f"skipped: no PyTorch 2.5 or newer in {sys.executable} ({error}); to get one:\n"
        "  python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch\n"
        "and run this with build/torch-venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(SKIPPED)

ARGUMENT = re.compile(r"([a-z_0-9]+):(\d+)")
WAYS = ("batch", "calls", "nested")


class Case:
    """One shape, pass, way and number of threads; seconds of both sides, by repetition."""

    def __init__(self, shape, direction, way, threads, ours):
        self.tokens, self.document, self.heads, self.kv_heads, self.dim = shape
        self.direction, self.way, self.threads = direction, way, threads
        self.ours = ours  # names of benchmarks whose times are added, or none
        self.times = {"ours": [], "torch": []}
        self.refused = None  # PyTorch's reason

    def median(self, side_name):
        """Seconds of one side, or none."""
        times = self.times[side_name]
        return statistics.median(times) if times else None

    def ratio(self):
        """PyTorch's time over ours, or none."""
        ours, other = self.median("ours"), self.median("torch")
        return other / ours if ours and other else None

    def row(self):
        """What a file says of it; times in ms."""
        medians = {name: self.median(name) for name in self.times}
        return {
            "name": "attention-vs-torch",
            **{key: getattr(self, key) for key in ("tokens", "document", "heads", "kv_heads")},
            "dim": self.dim,
            "threads": self.threads,
            "pass": self.direction,
            "way": self.way,
            **{name: seconds and seconds * 1e3 for name, seconds in medians.items()},
            "ratio": self.ratio(),
            "refused": self.refused,
            "seconds": self.times,
        }

    def flops(self):
        """Floating-point operations of the visible pairs."""
        pairs = self.tokens * (self.document + 1) // 2 * self.heads
        return (4 if self.direction == "forward" else 14) * pairs * self.dim


def arguments_of(name):
    """The named arguments of a benchmark."""
    return {key: int(value) for key, value in ARGUMENT.findall(name)}


def list_benchmarks(program):
    """(direction, shape, threads) -> name, of the benchmarks that PyTorch can answer."""
    listed = subprocess.run(
        [program, "--benchmark_list_tests=true"], capture_output=True, text=True, check=True
    )
    found = {}
    for name in listed.stdout.split():
        match = re.match(r"attention_(forward|backward)/", name)
        a = arguments_of(name)
        if not match or a.get("window", 0) or a.get("bf16", 0) or a["tokens"] % a["document"]:
            continue
        shape = (a["tokens"], a["document"], a["heads"], a["kv_heads"], a["dim"])
        found[match[1], shape, a.get("threads", 1)] = name
    return found


def make_cases(benchmarks, args):
    """Every shape, pass, way and number of threads, in the order of the benchmarks."""
    cases = []
    for threads in args.threads:
        for shape in dict.fromkeys(shape for _, shape, _ in benchmarks):
            tokens, document, _, _, dim = shape
            if args.dim and dim not in args.dim:
                continue
            if args.document and document not in args.document:
                continue
            forward = benchmarks.get(("forward", shape, threads))
            backward = benchmarks.get(("backward", shape, threads))
            both = [forward, backward] if forward and backward else []
            for way in WAYS if document < tokens else WAYS[:1]:
                ours = [forward] if forward else []
                cases.append(Case(shape, "forward", way, threads, ours))
                cases.append(Case(shape, "forward+backward", way, threads, both))
    return cases


def time_ours(program, names, threads, minimum):
    """Seconds of each benchmark, by name: the median of the repetitions that its name has, in `minimum` seconds."""
    pattern = "|".join(f"^{re.escape(name)}$" for name in names)
    repeats = max(arguments_of(name).get("repeats", 1) for name in names)
    done = subprocess.run(
        [
            program,
            f"--benchmark_filter={pattern}",
            f"--benchmark_min_time={minimum / repeats}",
            "--benchmark_format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    clock = "cpu_time" if threads == 1 else "real_time"
    return {
        result["run_name"]: result[clock] * units[result["time_unit"]]
        for result in json.loads(done.stdout)["benchmarks"]
        if result.get("aggregate_name", "median") == "median"
    }


def torch_step(case):
    """A function that runs the case once in PyTorch."""
    wanted = case.direction != "forward"
    documents, grouped = case.tokens // case.document, case.heads != case.kv_heads

    def random(heads, gradient):
        if case.way == "batch":
            x = torch.rand(documents, heads, case.document, case.dim)
        else:
            x = torch.rand(case.tokens, heads, case.dim)
        return (x * 4 - 2).requires_grad_(gradient)

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )

    inputs = [random(heads, wanted) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    d_out = random(case.heads, False)
    offsets = torch.arange(documents + 1) * case.document

    def outputs_and_gradients():
        """Pairs of an output and its gradient."""
        if case.way == "batch":
            return [(attend(*inputs), d_out)]
        if case.way == "nested":
            jagged = torch.nested.nested_tensor_from_jagged
            out = attend(*(jagged(x, offsets).transpose(1, 2) for x in inputs))
            return [(out.transpose(1, 2).values(), d_out)]
        views = [x.split(case.document) for x in (*inputs, d_out)]
        return [
            (attend(*(x.transpose(0, 1)[None] for x in (q, k, v))), g.transpose(0, 1)[None])
            for q, k, v, g in zip(*views)
        ]

    def step():
        pairs = outputs_and_gradients()
        if wanted:
            for tensor in inputs:
                tensor.grad = None
            torch.autograd.backward(*zip(*pairs))

    return step


def time_torch(case, minimum):
    """Seconds of one run, averaged over as many as take the minimum; none if it refuses."""
    clock = time.process_time if case.threads == 1 else time.perf_counter
    torch.set_num_threads(case.threads)
    step = torch_step(case)
    nested = case.way == "nested"
    with sdpa_kernel(SDPBackend.MATH if nested else SDPBackend.FLASH_ATTENTION):
        try:
            step()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            case.refused = str(error).splitlines()[0]
            return None
        runs, start, begin = 0, clock(), time.perf_counter()
        while runs == 0 or time.perf_counter() - begin < minimum:
            step()
            runs += 1
        return (clock() - start) / runs


def measure(program, cases, repetitions, minimum):
    """Fills in the times, the two sides taking turns."""
    for repetition in range(repetitions):
        for case in cases:
            if sys.stderr.isatty():
                print(f"\r{repetition + 1}/{repetitions} ", end="", file=sys.stderr, flush=True)
            seconds = None if case.refused else time_torch(case, minimum)
            if seconds is not None:
                case.times["torch"].append(seconds)
            if case.ours:
                times = time_ours(program, case.ours, case.threads, minimum)
                case.times["ours"].append(sum(times[name] for name in case.ours))


def side(case, name):
    """Median ms, TFLOP/s and spread of one side, as text."""
    times, median = case.times[name], case.median(name)
    if not times:
        return f"{'n/a':>9} {'n/a':>8} {'n/a':>7}"
    spread = (max(times) - min(times)) / median
    return f"{median * 1e3:9.2f} {case.flops() / median / 1e12:8.4f} {spread:7.0%}"


def refusals(cases):
    """Number of cases that PyTorch refuses, by reason."""
    return collections.Counter(f"{case.way}: {case.refused}" for case in cases if case.refused)


def report(cases):
    """Prints the table."""
    print(
        f"{'tokens':>6} {'document':>8} {'heads':>5} {'kv':>3} {'dim':>4} {'threads':>7}"
        f" {'pass':16} {'PyTorch':7}"
        f" {'ours':>9} {'':8} {'spread':>7} {'torch':>9} {'':8} {'spread':>7} {'ratio':>6}"
    )
    print(f"{'':63} {'ms':>9} {'TFLOP/s':>8} {'':>7} {'ms':>9} {'TFLOP/s':>8}")
    for case in cases:
        ratio = case.ratio()
        print(
            f"{case.tokens:6} {case.document:8} {case.heads:5} {case.kv_heads:3} {case.dim:4}"
            f" {case.threads:7} {case.direction:16} {case.way:7}"
            f" {side(case, 'ours')} {side(case, 'torch')}"
            f" {'n/a' if ratio is None else format(ratio, '.2f'):>6}"
        )
    for reason, refused in refusals(cases).items():
        print(f"# PyTorch refuses {refused} of these: {reason}")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", default="build/cpu", help="folder of a build (build/cpu)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each side (7)")
    parser.add_argument("--min-time", type=float, default=0.3, help="seconds of one (0.3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--dim", type=int, nargs="+", help="only these head dimensions")
    parser.add_argument("--document", type=int, nargs="+", help="only these lengths of documents")
    parser.add_argument("--json", metavar="FILE", help="write all times here")
    args = parser.parse_args()
    program = os.path.join(args.build, "bench", "bench-kernels")
    if not os.access(program, os.X_OK):
        print(f"there is no program '{program}'; build it, or name a --build", file=sys.stderr)
        return USAGE
    if args.repetitions < 1 or min(args.threads) < 1:
        print("--repetitions and --threads must be at least 1", file=sys.stderr)
        return USAGE
    cases = make_cases(list_benchmarks(program), args)
    if not cases:
        print(f"'{program}' has no benchmark of such a shape", file=sys.stderr)
        return USAGE
    print(machine.text())
    print(f"# PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {program}")
    print(f"# causal, f32; medians of {args.repetitions} alternating repetitions")
    warnings.filterwarnings("ignore", "(?s).*attention has been runtime disabled", UserWarning)
    measure(program, cases, args.repetitions, args.min_time)
    report(cases)
    if args.json:
        machine.write_benchmarks(
            args.json, [case.row() for case in cases], pytorch=torch.__version__
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
