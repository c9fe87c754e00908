"""Random configurations of all programs, for soak.py. Choices are read from --help: a new schedule is drawn by itself."""

import functools
import re
import subprocess

import runs

MAX_RANKS = 8
H5, JSON = ("-o", "out.h5"), ("-J", "out.json")


@functools.lru_cache(None)
def choices(program, option):
    """What --help lists for an option: "--layout all|contiguous|zigzag=..."."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    text = re.sub(r"\|\n +", "|", text)  # a list continues after "|"
    found = re.search(rf"^ +(?:-\w,)?{option} ([a-z0-9-]+(?:\|[a-z0-9-]+)+)", text, re.MULTILINE)
    if not found:
        raise RuntimeError(f"{program} --help lists nothing for {option}")
    return found[1].split("|")


class Draw:
    """One configuration, option by option."""

    def __init__(self, site, name, rng):
        self.site, self.name, self.rng, self.arguments = site, name, rng, []
        self.ranks = rng.choice((1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8))

    def give(self, option, value=None):
        self.arguments += [option] if value is None else [option, value]

    def maybe(self, probability, option, *values):
        """With this probability, the option with one of the values; a flag where there is none."""
        if self.rng.random() < probability:
            self.give(option, self.rng.choice(values) if values else None)

    def choose(self, option, without=()):
        value = self.rng.choice([c for c in choices(self.site.program(self.name), option) if c not in without])
        self.give(option, value)
        return value

    def size(self, least, most):
        """Small ones as often as large ones."""
        return int(least * (most / least) ** self.rng.random())

    def split(self, parts):
        """The ranks as a product of so many factors."""
        left, factors = self.ranks, []
        for _ in range(parts - 1):
            factors.append(self.rng.choice([d for d in range(1, left + 1) if left % d == 0]))
            left //= factors[-1]
        return [*factors, left]

    def lengths(self):
        kind = self.rng.choice(("dist=long-tailed,max=600", "dist=uniform,min=1,max=400", "dist=fixed,length=97",
                                "dist=log-normal,min=1,max=900,median=120,sigma=1"))
        return f"{kind},count={self.size(1, 60)},seed={self.rng.randrange(1000)}"

    def layout(self):
        layout = self.choose("--layout", ("all",))
        if layout == "striped":
            self.maybe(0.5, "--stripe", 1, 2, 7, 64)
        if layout.startswith("balanced") and self.name != "logprobs":
            self.maybe(0.5, "--chunk", 1, 16, 100)
        return layout

    def program(self, *outputs):
        return runs.Program(self.name, self.arguments, self.ranks, outputs)


def attention(d, _work):
    many = d.rng.random() < 0.15  # schedules
    kv, group = d.rng.choice((1, 2, 4, 8)), d.rng.choice((1, 1, 2, 4))
    d.give("--kv-heads", kv)
    d.give("--heads", kv * group)
    d.give("--head-dim", d.rng.choice((8, 16, 40, 64, 96, 128)))
    if d.rng.random() < 0.4:
        d.give("--gen", d.lengths())
        d.give("--capacity", d.size(1000, 8000))
    else:
        d.give("--tokens", d.size(1, 200 if many else 1500))
        d.maybe(0.5, "--batch", 1, 2, 5)
    if d.rng.random() < 0.3:
        d.give("--mask", "full")
    else:
        d.maybe(0.3, "--window", 1, 5, 64, 300)
    d.maybe(0.3, "--sinks")
    for option in ("--dtype", "--partial-out", "--partial-dq", "--wire-dkv"):
        d.maybe(0.3, option, "f32", "bf16")
    d.maybe(0.2, "--threads", 2)
    d.maybe(0.1, "--emulate-network", "alpha=20us,beta=2G", "alpha=1us,beta=20G,node=2")
    d.give("--pass", d.rng.choice(("fwd", "bwd", "both")))
    d.give("-n", d.rng.choice((1, 2)))
    d.maybe(0.3, "-c", "all")
    d.layout()
    if many:
        d.give("--schedule", "all")
        return d.program(JSON)
    d.choose("--schedule", ("all",))
    return d.program(JSON, H5)


def logprobs(d, _work):
    tp, cp = d.split(2)
    vocab = d.size(10, 30000)
    for option, value in (("--tp", tp), ("--cp", cp), ("--vocab", vocab), ("--tokens", d.size(1, 1000)),
                          ("--picks", d.rng.randrange(1, min(vocab, 64) + 1)), ("-n", d.rng.choice((1, 2)))):
        d.give(option, value)
    op = d.choose("--op")
    if op == "all" or d.rng.random() < 0.1:  # few others have a counterpart
        d.maybe(0.5, "--method", "all")
        d.maybe(0.3 if "--method" in d.arguments else 0, "--chunk", 1, 100)
    for option, values in (("--sequences", (1, 2, 7)), ("--hidden", (1, 33, 256)), ("--temperature", (0.5, 2)),
                           ("--top-k", (1, 5, 50)), ("--top-p", (0.1, 0.99, 1)), ("--zero-fraction", (0.5, 1)),
                           ("-d", ("f32", "bf16")), ("--list-length", (1, 1000)), ("--threads", (2,))):
        d.maybe(0.3, option, *values)
    d.maybe(0.3, "--out-of-place")
    d.give("--pass", d.rng.choice(("fwd", "bwd", "both")))
    if op in ("all", "packed", "packed-prerolled"):
        d.layout()
    return d.program(JSON)


def pack(d, _work):
    inputs = d.site.source / "inputs"
    cp, tp = d.rng.choice((1, 2, 3, 8)), d.rng.choice((1, 1, 2))
    d.give("--cp", cp)
    d.give("--tp", tp)
    if d.rng.random() < 0.2:
        d.give("--input", inputs / d.rng.choice(("bshd_tiny.h5", "bshd_left.h5")))
        d.maybe(0.5, "--chunks", 1, 2)
        return d.program(JSON, H5)
    written = d.rng.random() < 0.7
    d.give(*(("--input", inputs / d.rng.choice(("docs_tiny.h5", "docs_small.h5"))) if written else ("--gen", d.lengths())))
    d.give("--capacity", 2 * cp * tp * d.size(20, 1000))
    for option, values in (("--dp", (2, 4)), ("--min-bins", (5,)), ("--bin-multiple", (3,))):
        d.maybe(0.3, option, *values)
    d.maybe(0.8, "--oversize", "own-bin")
    d.choose("--algorithm", ("all",) if written else ())
    return d.program(JSON, *([H5] if written else []))


def shard(d, work):
    if d.rng.random() < 0.3:
        d.give("--input", work / "packed.h5")
    else:
        d.give("--gen", d.lengths())
        d.give("--capacity", 128 * d.size(10, 100))
    if d.rng.random() < 0.2:
        d.give("--ulysses")
        d.give("--heads", d.rng.choice((8, 24)))
        d.give("--kv-heads", d.rng.choice((4, 8)))
        return d.program(JSON)
    cp = d.rng.choice((1, 2, 4, 8, 64, d.ranks, d.ranks))
    d.give("--cp", cp)
    d.maybe(0.3, "--repad")
    d.maybe(0.4 if cp == d.ranks else 0, "--gather-gradient", "split", "sum", "none", "all")
    if d.rng.random() < 0.5:
        d.layout()
    return d.program(JSON)


def pipeline(d, _work):
    dp, cp, tp = d.split(3)
    inputs = d.site.source / "inputs"
    documents, model = d.rng.choice((("docs_tiny.h5", "model_tiny.h5"), ("docs_small.h5", "model.h5")))
    for option, value in (("--input", inputs / documents), ("--model", inputs / model),
                          ("--dp", dp), ("--cp", cp), ("--tp", tp)):
        d.give(option, value)
    d.maybe(0.5, "--bin", 2 * cp * d.size(100, 1000))
    d.choose("--schedule", ("halo",))  # it needs a window, which no model has
    d.layout()
    d.give("-n", d.rng.choice((1, 2)))
    return d.program(JSON, H5)


def predict(d, _work):
    d.ranks = 1
    machines = sorted((d.site.source / "inputs/machines").glob("*.toml"))
    kv, tp = d.rng.choice((1, 2, 8)), d.rng.choice((1, 1, 2))
    for option, value in (("--machine", d.rng.choice(machines)), ("--kv-heads", kv * tp), ("--tp", tp),
                          ("--heads", kv * tp * d.rng.choice((1, 2, 8))), ("--head-dim", d.rng.choice((32, 64, 128, 200))),
                          ("--cp", d.rng.choice(("1", "2,3", "8", "1,16", "64")))):
        d.give(option, value)
    if d.rng.random() < 0.4:
        d.give("--gen", d.lengths())
        d.give("--capacity", d.size(1000, 8000))
    else:
        d.give("--tokens", d.size(1, 6000))  # chunks of one token are as many rectangles as pairs
        d.maybe(0.3, "--batch", 2, 5)
    d.maybe(0.2, "--mask", "full")
    d.maybe(0.2, "--window", 1, 64, 3000)
    d.maybe(0.3, "--link", "node=1G", "switch=5G")
    d.give("--pass", d.rng.choice(("fwd", "bwd", "both")))
    d.choose("--schedule")
    d.layout()
    return d.program(JSON)


def text_import(d, _work):
    d.ranks = 1
    folders = [d.site.source / name for name in ("src/core", "docs", "tests/apps", "LICENSE")]
    for path in d.rng.sample(folders, d.rng.randrange(1, len(folders) + 1)):
        d.arguments.append(path)
    d.maybe(0.5, "--max-tokens", 3, 100, 4096)
    return d.program(H5)


def compare(d, _work):
    d.ranks = 1
    inputs = d.site.source / "inputs"
    a = inputs / d.rng.choice([file.name for file in sorted(inputs.glob("*.h5"))])
    d.arguments += [a, a, "--equal-nan"]
    return d.program()


PROGRAMS = {"attention": attention, "logprobs": logprobs, "pack": pack, "shard": shard, "pipeline": pipeline,
            "predict": predict, "import": text_import, "compare": compare}


def configuration(site, work, name, rng):
    return PROGRAMS[name](Draw(site, name, rng), work)
