#!/usr/bin/env python3
"""Log-probabilities of this project beside PyTorch's, on the same shapes in the same run.

    python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch numpy h5py
    build/torch-venv/bin/python bench/logprobs_vs_torch.py [--build build/cpu] [--repetitions 5]

Needs PyTorch 2.5 or newer in the Python that runs it (exit 77 without it) and the program
apps/gyre-logprobs of a build; h5py only to compare results.

    logprob-entropy  log-probability of one id a token, and entropy; backward of both
    soft-ce          cross entropy with a teacher's distribution; backward to the student
    top-k            the 64 largest logits and their ids; no backward
    filtered         log-probability under top-k 50 and top-p 0.9; backward

    ours      gyre-logprobs, bf16 logits, gradients in place
    eager     PyTorch operation by operation, after a cast of the bf16 logits to f32, as NeMo RL
              does: log_softmax, gather, sum(p log p); for filters sort, cumsum, scatter, fill
    bf16      the same without the cast: less memory, poor sums
    compiled  torch.compile of eager (first op only; compiling takes a minute a shape)

PyTorch's temporaries stay in memory that the process has, as with its caching allocator on GPUs: by
default (--fresh-memory) each would be new memory, whose page faults are three quarters of the time.

On two ranks the vocabulary is split: ours under MPI; PyTorch with gloo, as autograd functions with
the collectives of NeMo RL's DistributedLogprob and ChunkedDistributedEntropy: three all-reduces
each, three more in the entropy's backward, and gradients from above that are the same on all ranks.

First the results are compared (not with --no-compare): the timed functions, run in f64, write the
answers into a file that gyre-logprobs checks its own against, on one rank and on two, values and
gradients; and PyTorch's own f32 and two-rank results are compared with the f64 ones.

Logits are normal, with 32 columns a row that stand out by 12. Times are elapsed, but PyTorch's on
one thread is CPU time, which other programs cannot lengthen: to its advantage. That of a repetition
is the best of its iterations, on two ranks of the slower rank. Repetitions of all sides
alternate, so that all meet the same disturbances; medians are shown, the spread of ours,
(max - min) / median, and ratios: PyTorch's time / ours, above 1, ours is faster. `best` is the
ratio of the best repetitions of eager and ours. n/a: not run, or more than --memory.
"""

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import machine

SKIPPED, FAILED = 77, 1

# Makes glibc keep freed memory: no separate mappings for large blocks, and no trimming.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
if __name__ == "__main__" and "--fresh-memory" not in sys.argv:
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as processes
except ImportError as error:
    print(
        f"skipped: no PyTorch 2.5 or newer in {sys.executable} ({error}); to get one:\n"
        "  python3 -m venv build/torch-venv && build/torch-venv/bin/pip install torch numpy h5py\n"
        "and run this with build/torch-venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(SKIPPED)

PICKS, TOP_K, TOP_P = 64, 50, 0.9
PEAKS, HEIGHT = 32, 12.0
OPERATIONS = ("logprob-entropy", "soft-ce", "top-k", "filtered")
SIDES = ("eager", "bf16", "compiled")
# Most bytes per element: what autograd keeps, and temporaries.
PEAK_BYTES = {"logprob-entropy": 26, "soft-ce": 34, "top-k": 10, "filtered": 60}
# Quiets the MPI library.
ENVIRONMENT = {"UCX_MEM_EVENTS": "n", "HWLOC_COMPONENTS": "-pci,-linux:pci"}


# ---- PyTorch, one process ------------------------------------------------------------------------


def logprob_entropy(z, targets):
    """log p of the targets, and entropies: [n], [n]."""
    logp = torch.log_softmax(z, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def gathered(z, ids):
    """log p of several ids of each row: [n, K]."""
    return torch.log_softmax(z, -1).gather(-1, ids)


def soft_cross_entropy(z, teacher):
    """-Σ p(teacher) log p: [n]."""
    return -(torch.softmax(teacher, -1) * torch.log_softmax(z, -1)).sum(-1)


def filtered(z, targets, top_k=TOP_K, top_p=TOP_P):
    """log p of the targets among the survivors: [n]."""
    with torch.no_grad():
        value, order = torch.sort(z, dim=-1, stable=True)
        low = value < value[:, -top_k, None]
        value = value.masked_fill(low, -torch.inf)
        drop = torch.softmax(value, -1).cumsum(-1) <= 1 - top_p
        drop[:, -1] = False
        dropped = torch.empty_like(drop).scatter_(-1, order, drop | low)
    left = z.masked_fill(dropped, -torch.inf)
    return torch.log_softmax(left, -1).gather(-1, targets[:, None])[:, 0]


class Problem:
    """Inputs of one shape, in bf16."""

    def __init__(self, tokens, vocab, seed=1):
        torch.manual_seed(seed)
        self.tokens, self.vocab = tokens, vocab
        self.logits = self.rows()
        self.teacher = None  # made when it is needed
        self.targets = self.peaks[:, 0].clone()
        self.g, self.h = torch.randn(tokens), torch.randn(tokens)

    def rows(self):
        """Rows of logits, [tokens, vocab]; row by row, so that the f32 ones need no memory."""
        self.peaks = torch.randint(0, self.vocab, (self.tokens, PEAKS))
        z = torch.empty(self.tokens, self.vocab, dtype=torch.bfloat16)
        for row, columns in zip(z, self.peaks):
            wide = torch.randn(self.vocab)
            wide[columns] += HEIGHT
            row.copy_(wide)
        return z

    def step(self, operation, direction, cast=torch.Tensor.float, call=None):
        """A function that runs the operation once; its results stay in .values and .gradient."""
        if operation == "soft-ce" and self.teacher is None:
            self.teacher = self.rows()
        backward = direction != "forward"
        z = self.logits.detach().requires_grad_(backward)

        def step():
            z.grad = None
            if operation == "logprob-entropy":
                logprob, entropy = (call or logprob_entropy)(cast(z), self.targets)
                loss, values = (logprob * self.g).sum() + (entropy * self.h).sum(), logprob
            elif operation == "top-k":
                torch.topk(cast(z), PICKS)
                return
            elif operation == "soft-ce":
                values = soft_cross_entropy(cast(z), cast(self.teacher))
                loss = (values * self.g).sum()
            else:
                values = filtered(cast(z), self.targets)
                loss = (values * self.g).sum()
            if backward:
                loss.backward()
            del loss, values

        return step


def best_time(step, minimum, threads):
    """Seconds of the fastest of as many runs as take the minimum, two at least."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times, begin = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - begin < minimum:
        start = clock()
        step()
        times.append(clock() - start)
    return min(times)


COMPILED = []


def upcast_and_score(z, targets):
    """What is compiled: the cast is part of it."""
    return logprob_entropy(z.float(), targets)


def torch_step(problem, operation, direction, side):
    """The step of one side."""
    if side == "bf16":
        return problem.step(operation, direction, cast=lambda z: z)
    if side == "compiled":
        if not COMPILED:
            COMPILED.append(torch.compile(upcast_and_score, dynamic=False))
        return problem.step(operation, direction, cast=lambda z: z, call=COMPILED[0])
    return problem.step(operation, direction)


# ---- PyTorch, two ranks --------------------------------------------------------------------------


def all_reduce(x, op=dist.ReduceOp.SUM):
    """In place; returns it."""
    dist.all_reduce(x, op=op)
    return x


def shard_log_softmax(z):
    """Log-softmax of a shard's columns over all ranks: two all-reduces."""
    x = z - all_reduce(z.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    return x - all_reduce(x.exp().sum(-1, keepdim=True)).log()


class ShardLogprob(torch.autograd.Function):
    """Three all-reduces; the f32 softmax is kept; no communication backward."""

    @staticmethod
    def forward(ctx, z, targets, first):
        logp = shard_log_softmax(z.float())
        local = targets - first
        mine = (local >= 0) & (local < z.shape[-1])
        local = local.clamp(0, z.shape[-1] - 1)[:, None]
        picked = logp.gather(-1, local)[:, 0].masked_fill(~mine, 0)
        ctx.save_for_backward(logp.exp_(), local, mine)
        return all_reduce(picked)

    @staticmethod
    def backward(ctx, g):
        p, local, mine = ctx.saved_tensors
        gradient = p.neg().mul_(g[:, None])
        gradient.scatter_add_(-1, local, (g * mine)[:, None])
        return gradient, None, None


class ShardEntropy(torch.autograd.Function):
    """Three all-reduces; the logits are kept; three more backward."""

    @staticmethod
    def entropy(z):
        """Log-softmax, softmax and entropy."""
        logp = shard_log_softmax(z.float())
        p = logp.exp()
        return logp, p, -all_reduce((p * logp).sum(-1))

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return ShardEntropy.entropy(z)[2]

    @staticmethod
    def backward(ctx, g):
        logp, p, entropy = ShardEntropy.entropy(*ctx.saved_tensors)
        return logp.add_(entropy[:, None]).mul_(p).mul_(-g[:, None])


def rank_step(z, targets, first, g, h, backward):
    """One forward pass of a rank, and backward."""
    z.grad = None
    logprob, entropy = ShardLogprob.apply(z, targets, first), ShardEntropy.apply(z)
    if backward:
        ((logprob * g).sum() + (entropy * h).sum()).backward()
    return logprob, entropy


def rank_main(rank, ranks, meeting, commands):
    """A rank: answers commands (a problem's shape or its tensors) until it gets None."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    problems = {}
    while (command := commands.recv()) is not None:
        shape, minimum, tensors = command
        if tensors is not None:  # a comparison
            z, targets, g, h = tensors
            first = z.shape[-1] // ranks * rank
            shard = z[:, first : first + z.shape[-1] // ranks].clone().requires_grad_()
            logprob, entropy = rank_step(shard, targets, first, g, h, True)
            commands.send((logprob.detach(), entropy.detach(), shard.grad))
            continue
        if shape not in problems:
            problems = {shape: Problem(shape[0], shape[1] // ranks, seed=rank)}
        p = problems[shape]
        z, first = p.logits.requires_grad_(), p.vocab * rank
        targets = all_reduce(p.targets.clone()) // ranks  # the same on all ranks
        best = {}
        for direction in ("forward", "forward+backward"):
            times, spent = [], 0.0
            while len(times) < 2 or spent < minimum:
                dist.barrier()
                start = time.perf_counter()
                rank_step(z, targets, first, p.g, p.h, direction != "forward")
                slowest = all_reduce(
                    torch.tensor(time.perf_counter() - start, dtype=torch.float64),
                    dist.ReduceOp.MAX,
                )
                times.append(slowest.item())
                spent += times[-1]
            best[direction] = min(times)
        commands.send(best)
    dist.destroy_process_group()


class Ranks:
    """Processes of PyTorch, idle between commands."""

    def __init__(self, count, folder):
        context = processes.get_context("spawn")
        meeting = "file://" + os.path.join(folder, "meeting")
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            self.pipes.append(here)
            arguments = (rank, count, meeting, there)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def ask(self, shape=None, minimum=0.0, tensors=None):
        """The answers of all ranks."""
        for pipe in self.pipes:
            pipe.send((shape, minimum, tensors))
        return [pipe.recv() for pipe in self.pipes]

    def close(self):
        """Ends them."""
        for pipe, process in zip(self.pipes, self.processes):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(30)


# ---- ours ----------------------------------------------------------------------------------------


def launch(args, ranks, threads, options):
    """Runs gyre-logprobs."""
    command = [os.path.join(args.build, "apps", "gyre-logprobs"), *map(str, options)]
    if ranks > 1:
        command = [args.mpiexec, "-n", str(ranks), *command]
    environment = {k: v for k, v in os.environ.items() if k not in KEEP_MEMORY}
    environment.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads))
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def time_ours(args, case, folder):
    """Seconds of the fastest iteration, by pass."""
    table = os.path.join(folder, "ours.csv")
    options = ["--op", case.operation, "--tokens", case.tokens, "--vocab", case.vocab, "-d", "bf16"]
    options += ["--threads", case.threads, "--tp", case.ranks, "--picks", PICKS, "--top-k", TOP_K]
    options += ["--top-p", TOP_P, "--peaks", PEAKS, "--peak-height", HEIGHT, "-n", args.iterations]
    options += ["--pass", "fwd" if case.operation == "top-k" else "both", "-c", "none"]
    done = launch(args, case.ranks, case.threads, [*options, "--csv", table])
    if done.returncode != 0:
        sys.exit(f"gyre-logprobs failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    with open(table, encoding="utf-8", newline="") as file:
        best = {row["pass"]: float(row["min_ms"]) / 1e3 for row in csv.DictReader(file)}
    return {"forward": best["fwd"], "forward+backward": best["fwd"] + best.get("bwd", 0)}


# ---- results -------------------------------------------------------------------------------------


def gradient_of(values, z, g):
    """Gradient of Σ g · value; values of several ids are added up."""
    total = (values.reshape(len(g), -1).sum(-1) * g).sum()
    return torch.autograd.grad(total, z, retain_graph=True)[0]  # two results share a graph


def answers(p, ids):
    """What a gyre/logprobs file holds, from the timed functions in f64."""
    z = p.logits.double().requires_grad_()
    g, teacher = p.g.double(), p.teacher.double()
    logprob, entropy = logprob_entropy(z, p.targets)
    values = {
        "logprob": logprob,
        "entropy": entropy,
        "gathered": gathered(z, ids),
        "soft_cross_entropy": soft_cross_entropy(z, teacher),
        "filtered_logprob": filtered(z, p.targets),
    }
    found = {name: value.detach() for name, value in values.items()}
    for name, value in values.items():
        found["d_" + name] = gradient_of(value, z, g)
    top = torch.sort(z.detach(), dim=-1, descending=True, stable=True)
    found["top_values"], found["top_ids"] = top.values[:, :PICKS], top.indices[:, :PICKS].int()
    found["next_token_logprob"] = torch.zeros(p.tokens, 0, dtype=torch.float64)
    return found


def write_problem(path, p, ids, found):
    """A gyre/logprobs file (inputs/SCHEMA.md); every token is a sequence."""
    import h5py  # pylint: disable=import-outside-toplevel

    with h5py.File(path, "w") as file:
        file.attrs["schema"], file.attrs["schema_version"] = "gyre/logprobs", 1
        group = file.create_group("logprobs")
        group.attrs["vocab_size"], group.attrs["temperature"] = p.vocab, 1.0
        group.attrs["top_k"], group.attrs["top_p"] = TOP_K, TOP_P
        group["offsets"] = torch.arange(p.tokens + 1).numpy()
        group["logits"], group["teacher"] = p.logits.float().numpy(), p.teacher.float().numpy()
        group["targets"], group["ids"] = p.targets.int().numpy(), ids.int().numpy()
        group["d_value"] = p.g.numpy()
        group = file.create_group("reference")
        group.attrs["generator"] = f"PyTorch {torch.__version__} in float64"
        for name, values in found.items():
            group[name] = values.numpy()


def compare_torch(ranks, p, found):
    """The largest errors of PyTorch's f32 results, by side and result."""
    z = p.logits.float().requires_grad_()
    logprob, entropy = logprob_entropy(z, p.targets)
    total = (logprob * p.g).sum() + (entropy * p.g).sum()
    sides = {"eager": (logprob, entropy, torch.autograd.grad(total, z)[0])}
    if ranks is not None:
        tensors = (p.logits.float(), p.targets, p.g, p.g)
        both = ranks.ask(tensors=tensors)
        sides["two ranks"] = (*both[0][:2], torch.cat([gradient for _, _, gradient in both], -1))
    wanted = (found["logprob"], found["entropy"], found["d_logprob"] + found["d_entropy"])
    for side, values in sides.items():
        errors = [(a.detach().double() - b).abs().max().item() for a, b in zip(values, wanted)]
        print(
            f"# PyTorch {side}: f32 against f64: log-probability {errors[0]:.1e},"
            f" entropy {errors[1]:.1e}, gradient {errors[2]:.1e}"
        )
        if max(errors) > 1e-4:  # two orders above what is usual: another function
            sys.exit("PyTorch's results do not agree among themselves")


def compare(args, ranks, folder):
    """Our results against those of the timed functions. True if they agree."""
    try:
        import h5py  # noqa: F401 pylint: disable=import-outside-toplevel,unused-import
    except ImportError:
        print("# results not compared: no h5py in this Python")
        return True
    p = Problem(48, 32768, seed=3)
    p.teacher = p.rows()
    p.targets[::3] = torch.randint(0, p.vocab, (16,))  # most of these do not survive the filter
    ids = torch.randint(0, p.vocab, (p.tokens, PICKS))
    found = answers(p, ids)
    compare_torch(ranks, p, found)
    path, agree = os.path.join(folder, "problem.h5"), True
    write_problem(path, p, ids, found)
    for count in (1, 2) if ranks is not None else (1,):
        for operation in (*OPERATIONS, "logprob", "entropy", "gather"):
            options = ["--op", operation, "--input", path, "--tp", count, "-n", 1, "-w", 0]
            done = launch(args, count, 1, [*options, "--check-tokens", p.tokens])
            verdict = [line for line in done.stdout.splitlines() if line.startswith("VERIFY")]
            print(f"# ours, ranks: {count}, {operation}: {' '.join(verdict)}", flush=True)
            if done.returncode != 0 or not verdict:
                print(done.stdout + done.stderr, file=sys.stderr)
                agree = False
    return agree


# ---- the run -------------------------------------------------------------------------------------


class Case:
    """One operation, shape and number of threads or ranks; seconds by side and pass."""

    def __init__(self, operation, tokens, vocab, threads, ranks):
        self.operation, self.tokens, self.vocab = operation, tokens, vocab
        self.threads, self.ranks = threads, ranks
        self.times = {}

    def directions(self):
        """What is timed."""
        return ("forward",) if self.operation == "top-k" else ("forward", "forward+backward")

    def sides(self, args):
        """The sides of PyTorch that are run."""
        if self.tokens * self.vocab * PEAK_BYTES[self.operation] > args.memory * 2**30:
            return ()
        if self.ranks > 1:
            return ("eager",)
        compiled = args.compile and self.operation == "logprob-entropy"
        return SIDES if compiled else SIDES[:2]

    def add(self, side, direction, seconds):
        """One repetition."""
        self.times.setdefault((side, direction), []).append(seconds)


def make_cases(args):
    """Every operation, shape and number of threads, then the shapes on two ranks."""
    shapes = [(n, v) for v in args.vocab for n in args.tokens]
    cases = [Case(o, n, v, t, 1) for o in args.op for t in args.threads for n, v in shapes]
    if args.ranks and "logprob-entropy" in args.op:
        cases += [Case("logprob-entropy", n, v, 1, 2) for n, v in shapes]
    return cases


def measure_case(args, case, problem, ranks, folder):
    """One repetition of all sides."""
    for direction, seconds in time_ours(args, case, folder).items():
        if direction in case.directions():
            case.add("ours", direction, seconds)
    torch.set_num_threads(case.threads)
    for side in case.sides(args):
        if case.ranks > 1:
            best = ranks.ask((case.tokens, case.vocab), args.min_time)
            for direction in case.directions():
                case.add(side, direction, max(answer[direction] for answer in best))
            continue
        for direction in case.directions():
            step = torch_step(problem, case.operation, direction, side)
            step()
            case.add(side, direction, best_time(step, args.min_time, case.threads))


def measure(args, cases, ranks, folder):
    """Fills in the times, the sides taking turns. A problem lives as long as its shape is next."""
    problem = None
    for number, case in enumerate(cases):
        shape = (case.tokens, case.vocab)
        if case.ranks > 1 or not case.sides(args):
            problem = None
        elif problem is None or (problem.tokens, problem.vocab) != shape:
            problem = None
            problem = Problem(*shape)
        for repetition in range(args.repetitions):
            if sys.stderr.isatty():
                done = f"\r{number + 1}/{len(cases)} {repetition + 1}/{args.repetitions} "
                print(done, end="", file=sys.stderr, flush=True)
            measure_case(args, case, problem, ranks, folder)
        report(case)


def heading():
    """Two lines over the table."""
    print(
        f"{'operation':15} {'tokens':>6} {'vocab':>6} {'ranks':>5} {'threads':>7} {'pass':16}"
        f" {'ours':>9} {'spread':>6} {'eager':>9} {'ratio':>6} {'best':>6}"
        f" {'bf16':>9} {'ratio':>6} {'compiled':>9} {'ratio':>6}"
    )
    print(f"{'':60} {'ms':>9} {'':6} {'ms':>9} {'':13} {'ms':>9} {'':6} {'ms':>9}")


def report(case):
    """The case's rows of the table."""
    for direction in case.directions():
        ours = case.times["ours", direction]
        median = statistics.median(ours)
        line = (
            f"{case.operation:15} {case.tokens:6} {case.vocab:6} {case.ranks:5} {case.threads:7}"
            f" {direction:16} {median * 1e3:9.2f} {(max(ours) - min(ours)) / median:6.0%}"
        )
        for side in SIDES:
            times = case.times.get((side, direction))
            if times is None:
                line += f" {'n/a':>9} {'n/a':>6}" + (f" {'n/a':>6}" if side == "eager" else "")
                continue
            theirs = statistics.median(times)
            line += f" {theirs * 1e3:9.2f} {theirs / median:6.2f}"
            if side == "eager":
                line += f" {min(times) / min(ours):6.2f}"
        print(line, flush=True)


def parse_arguments():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", default="build/cpu", help="folder of a build (build/cpu)")
    parser.add_argument("--mpiexec", default="mpiexec", help="starts our ranks (mpiexec)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each side (5)")
    parser.add_argument("--iterations", type=int, default=5, help="of ours in each (5)")
    parser.add_argument("--min-time", type=float, default=0.3, help="seconds of PyTorch's (0.3)")
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="(512 2048)")
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--memory", type=float, default=6, help="GiB of PyTorch at most (6)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="eager only")
    parser.add_argument("--no-ranks", dest="ranks", action="store_false", help="one rank only")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="times only")
    parser.add_argument("--fresh-memory", action="store_true", help="the C library's usual malloc")
    parser.add_argument("--json", metavar="FILE", help="write all times here")
    args = parser.parse_args()
    program = os.path.join(args.build, "apps", "gyre-logprobs")
    if not os.access(program, os.X_OK):
        parser.error(f"there is no program '{program}'; build it, or name a --build")
    numbers = (args.repetitions, args.iterations, *args.tokens, *args.threads)
    if min(numbers) < 1 or min(args.vocab) < 2 * PICKS or any(v % 2 for v in args.vocab):
        parser.error(f"numbers must be at least 1, --vocab even and at least {2 * PICKS}")
    return args


def main():
    """Compares, measures, reports."""
    args = parse_arguments()
    cases = make_cases(args)
    print(machine.text())
    memory = "fresh memory" if args.fresh_memory else "kept memory"
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"# PyTorch {torch.__version__}, {capability}, {memory}; {args.build}")
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(2, folder) if args.ranks else None
        try:
            if args.compare and not compare(args, ranks, folder):
                return FAILED
            print(f"# bf16 logits; medians of {args.repetitions} alternating repetitions")
            heading()
            measure(args, cases, ranks, folder)
        finally:
            if ranks is not None:
                ranks.close()
    if args.json:
        rows = [
            {**vars(case), "times": {" ".join(key): t for key, t in case.times.items()}}
            for case in cases
        ]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
