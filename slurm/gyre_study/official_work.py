"""What the definition of an official problem says of its results: documents, work, keys of rows, settings, checks.

Documents are drawn as the programs draw them (src/packing/lengths.cpp), so that FLOPs, bytes and items are computed here
and not taken from a result."""

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .cases import Case, Placement, hyphens
from .files import Study
from .official_rules import is_number
from .official_tolerances import of_attention, of_decoder, of_logits
from .sizes import parse_size

# Documents


HALF, WORD = 156, (1 << 64) - 1


def lanes(word: int) -> int:
    """The word in each of 156 lanes of 64 bits."""
    return sum(word << 64 * lane for lane in range(HALF))


ONES, UPPER, LOWER, SHIFTED = (lanes(word) for word in (1, WORD >> 31 << 31, (1 << 31) - 1, WORD >> 1))
TEMPERING = [lanes(word) for word in (0x5555555555555555 & WORD >> 29, 0x71D67FFFEDA60000, 0xFFF7EEE000000000, WORD >> 43)]


def twisted(half: int, next_half: int, other: int) -> int:
    mixed = (half & UPPER) | ((half >> 64 | (next_half & WORD) << 64 * (HALF - 1)) & LOWER)
    return other ^ (mixed >> 1 & SHIFTED) ^ (mixed & ONES) * 0xB5026F5AA96619E9


def random_bits(seed: int) -> Iterator[int]:
    """std::mt19937_64, half of its state at once: each half is one integer of 156 lanes."""
    state = [seed & WORD]
    for i in range(1, 2 * HALF):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & WORD)
    low, high = (sum(word << 64 * lane for lane, word in enumerate(part)) for part in (state[:HALF], state[HALF:]))
    while True:
        low = twisted(low, high, high)
        high = twisted(high, low, low)
        for x in (low, high):
            x ^= x >> 29 & TEMPERING[0]
            x ^= x << 17 & TEMPERING[1]
            x ^= x << 37 & TEMPERING[2]
            x ^= x >> 43 & TEMPERING[3]
            yield from struct.unpack(f"<{HALF}Q", x.to_bytes(8 * HALF, "little"))


def uniform_below(bits: Iterator[int], n: int) -> int:
    value = next(bits)
    while value >= WORD - WORD % n:
        value = next(bits)
    return value % n


def histogram_of(file: Path) -> tuple[list[int], list[float]]:
    """Ends of the intervals, and the sums of their shares."""
    below, up_to = [], [0.0]
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    for line in lines[1:]:
        end, share = line.split(",")
        below.append(int(end))
        up_to.append(float(share) + up_to[-1])
    return below, up_to[1:]


@dataclass(frozen=True)
class Documents:
    """`pairs`: of a query and a key that a causal mask shows. `source`: as programs write it."""

    count: int
    tokens: int
    longest: int
    pairs: int
    source: str
    lengths: list[int]


def documents_of(lengths: list[int], source: str = "") -> Documents:
    return Documents(len(lengths), sum(lengths), max(lengths), sum(n * (n + 1) // 2 for n in lengths), source, lengths)


@lru_cache(maxsize=None)
def drawn(spec: str) -> Documents:
    """Of "dist=histogram,file=F,tokens=N,seed=S", or count=N in the place of tokens=N."""
    words = dict(word.split("=") for word in spec.split(","))
    amount = "count" if "count" in words else "tokens"
    number, most = parse_size(words[amount]), parse_size(words.get("max", "1M"))
    below, up_to = histogram_of(Path(words["file"]))
    bits = random_bits(int(words["seed"]))
    lengths: list[int] = []
    left, last = number, len(up_to) - 1
    begins = [1, *below]
    while left > 0:
        at = ((next(bits) >> 12) + 0.5) * 2.0**-52 * up_to[-1]
        interval = min(bisect_right(up_to, at), last)
        begin = begins[interval]
        length = min(most, begin + uniform_below(bits, below[interval] - begin))
        lengths.append(length if amount == "count" else min(left, length))
        left -= 1 if amount == "count" else lengths[-1]
    name = Path(words["file"]).name
    return documents_of(lengths, f"dist=histogram,{amount}={number},file={name},max={most},seed={words['seed']}")


@dataclass(frozen=True)
class Model:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    padded: int

    @property
    def flops_of_token(self) -> float:
        """Of its products with weights."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * query + 2 * kv + 3 * self.intermediate)
        return 2.0 * (self.layers * layer + self.hidden * self.vocab)

    @property
    def parameters(self) -> int:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * query + 2 * kv + 3 * self.intermediate + 2)
        return self.layers * layer + self.hidden * (2 * self.padded + 1)


# What inputs hold whose SHA-256 belongs to the problem; a test compares.
MODELS = {
    "model.h5": Model(192, 4, 8, 4, 32, 512, 259, 264),
    "model_tiny.h5": Model(48, 2, 8, 4, 8, 64, 259, 264),
}
LENGTHS = {"docs_tiny.h5": [3, 0, 1, 2, 5, 7, 15, 16, 17, 120, 33, 12, 42, 58, 13, 10, 0]}

# What a row measures beyond its key, with units. Another name is refused.
TIMES = {"time": "ms", "min": "ms", "p95": "ms", "cv": "%", "reps": ""}
DONE = {"err_over_tol": "", "check": "", "finished": ""}


class Work:
    """Of the runs of one placement. `measured`: names and units of the measurements of a row, without its key; `optional`:
    of those that only some rows have."""

    measured: dict[str, str] = {}
    optional: dict[str, str] = {}
    passes: tuple[str, ...] = ()

    def __init__(self, study: Study, placement: Placement) -> None:
        self.study, self.placement, self.grid = study, placement, placement.common
        self.options = hyphens({**study.options, **placement.common})
        self.ranks = placement.ranks
        spec = placement.common.get("lengths")
        if spec is not None:
            self.documents = drawn(spec)

    def size(self, name: str, usual: object = 0) -> int:
        return parse_size(self.options.get(name, usual))

    def keys(self, case: Case) -> list[dict[str, Any]]:
        """Of the rows of a case."""
        return [{**self.key(case), "pass": one} for one in self.passes] if self.passes else [self.key(case)]

    def key(self, case: Case) -> dict[str, Any]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Values in the configuration that are no option's own; a tuple: one of them."""
        raise NotImplementedError

    def flops(self, key: dict[str, Any]) -> float | None:
        return None

    def figures(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Measurements that follow from the work and the median."""
        raise NotImplementedError

    def limits(self, row: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Measurements that are not known, with the least and the most that they can be."""
        return {}

    def checks(self, key: dict[str, Any], reps: int) -> dict[str, Any]:
        """Names of the checks of a row, with a function from sampled tokens to the least and most values, or None."""
        raise NotImplementedError

    def most_tolerance(self, array: str) -> float:
        """Returns the largest tolerance that the check of an array may have; 0: values must be equal."""
        return 0.0

    def foms(self, row: dict[str, Any]) -> list[tuple[str, Any, str]]:
        """Figures of merit of a row: metric, value, unit."""
        raise NotImplementedError


SHARE = (1e-6, 105.0)  # %: what is measured to be faster than its limit by more was measured wrongly
PERCENT = (0.0, 100.0)
ANY = (0.0, math.inf)


class Attention(Work):
    measured = {
        **TIMES, "rate": "TF/s/rank", "of_peak": "%", "sent": "MB/rank", "msgs": "", "exposed": "%", "overlap": "%",
        "imbal": "%", "buffers": "MB/rank", **DONE, "compute_only": "ms", "communication_only": "ms", "exposed_time": "ms",
        "exposed_noise": "ms",
    }
    optional = {"predicted": "ms"}
    passes = ("fwd", "bwd")

    def key(self, case: Case) -> dict[str, Any]:
        axes = case.axes
        return {"schedule": axes["schedule"], "layout": axes["layout"], "tokens": self.documents.tokens, "cp": axes["cp"]}

    def facts(self) -> dict[str, Any]:
        own = self.options.get("kernel", "auto")
        return {"documents": self.documents.count, "tokens": self.documents.tokens, "network": "none", "compute": "real",
                "source": f"{self.documents.source} first-fit-shuffle", "wire_dkv": (self.options["dtype"], ""),
                "kernel": (own,) if own != "auto" else ("auto", "cpu", "tiled", "cudnn")}

    def flops(self, key: dict[str, Any]) -> float:
        """Two for each element of a product: forward one of keys and one of values, backward three and two."""
        return 2.0 * self.size("heads") * self.documents.pairs * self.size("head-dim") * (2 if key["pass"] == "fwd" else 5)

    def figures(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        stated, wire = row["measurements"], row["model"]["bytes_wire"]
        found = {"rate": self.flops(row["key"]) / seconds / self.ranks / 1e12}
        if self.ranks == 1:
            found |= {"sent": 0.0, "msgs": 0}
        apart = [stated.get(name) for name in ("exposed_time", "communication_only", "exposed_noise")]
        if all(map(is_number, apart)):
            exposed, alone, noise = apart
            found |= {"exposed": exposed / seconds / 10 if wire else None, "overlap": None}
            if wire and noise <= alone:
                found["overlap"] = 100 * min(max(1 - exposed / alone, 0.0), 1.0)
        return found

    def limits(self, row: dict[str, Any]) -> dict[str, tuple[float, float]]:
        rest = ["imbal", "buffers", "compute_only", "communication_only", "exposed_noise", "sent", "msgs"]
        rest += [name for name in self.optional if name in row["measurements"]]
        return {"of_peak": SHARE, "exposed_time": (-math.inf, math.inf), **dict.fromkeys(rest, ANY)}

    def checks(self, key: dict[str, Any], reps: int) -> dict[str, Any]:
        case = f"{key['schedule']}, {key['layout']}, {key['tokens']} tokens"
        heads, kv_heads, dim = (self.size(name) for name in ("heads", "kv-heads", "head-dim"))
        widths = {"lse": heads, "out": heads * dim}
        if key["pass"] == "bwd":
            widths |= {"d_q": heads * dim, "d_k": kv_heads * dim, "d_v": kv_heads * dim}
        found: dict[str, Any] = {f"{case}, {key['pass']}: {name}": times(width) for name, width in widths.items()}
        return {f"{case}: counters": None, **found,
                f"{case}, {key['pass']}: bits of timed iterations": exactly(reps * self.ranks)}

    def most_tolerance(self, array: str) -> float:
        heads, kv_heads, dim = (self.size(name) for name in ("heads", "kv-heads", "head-dim"))
        is_bf16 = self.options["dtype"] == "bf16"
        return of_attention(array, dim, self.documents.longest, heads // kv_heads, self.ranks, is_bf16)

    def foms(self, row: dict[str, Any]) -> list[tuple[str, Any, str]]:
        return [("attention_rate", row["measurements"]["rate"], "TFLOP/s/rank")]


def times(width: int) -> Callable[[int], tuple[int, int]]:
    return lambda sampled: (sampled * width, sampled * width)


def exactly(count: int) -> Callable[[int], tuple[int, int]]:
    return lambda sampled: (count, count)


class Logprobs(Work):
    measured = {
        **TIMES, "rate": "GB/s/rank", "of_bw": "%", "msgs": "", "sent": "MB/rank", "extra": "MB/rank", **DONE,
        "ideal_bytes": "B", "flop_rate": "TF/s/rank", "share_of_limit": "",
    }
    passes = ("fwd", "bwd")

    def key(self, case: Case) -> dict[str, Any]:
        axes = case.axes
        return {"op": axes["op"], "method": axes["method"], "tokens": self.documents.tokens, "vocab": self.size("vocab"),
                "tp": axes["tp"], "cp": axes["cp"]}

    def facts(self) -> dict[str, Any]:
        vocab, tp = self.size("vocab"), self.grid["tp"]
        columns = vocab + -vocab % tp
        return {"tokens": self.documents.tokens, "sequences": self.documents.count, "columns": columns,
                "columns_of_rank": f"{columns // tp}", "source": f"{self.documents.source} first-fit-shuffle"}

    def figures(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Forward reads the logits of a rank, backward reads them and writes gradients in their place."""
        stated = row["measurements"]
        share = stated.get("share_of_limit")
        found = {"flop_rate": None, "of_bw": None if share is None else 100 * share}
        amount = stated.get("ideal_bytes")
        if self.grid["cp"] == 1:
            amount = float(self.documents.tokens * self.bytes_of_row(row["key"]))
            found["ideal_bytes"] = amount
        if is_number(amount):
            found["rate"] = amount / seconds / 1e9
        return found | ({"sent": 0.0, "msgs": 0} if self.ranks == 1 else {})

    def bytes_of_row(self, key: dict[str, Any]) -> int:
        width = math.ceil(self.size("vocab") / self.grid["tp"]) * (2 if self.options["dtype"] == "bf16" else 4)
        return width if key["pass"] == "fwd" else 2 * width

    def limits(self, row: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Layouts pad documents to 2 cp tokens, or cut them elsewhere."""
        cp, width = self.grid["cp"], self.bytes_of_row(row["key"])
        rows = self.documents.tokens / cp
        most = rows + 2 * cp * self.documents.count * self.size("stripe", 1)
        return {"share_of_limit": (SHARE[0] / 100, SHARE[1] / 100), "ideal_bytes": (math.floor(rows) * width, most * width),
                **dict.fromkeys(("sent", "msgs", "extra"), ANY)}

    def checks(self, key: dict[str, Any], reps: int) -> dict[str, Any]:
        case = f"{key['op']}, {key['method']}, {key['pass']}, {key['tokens']} tokens: "
        compared: dict[str, Any] = {"log-probabilities": times(1), "entropies": times(1), "same bits on all ranks": None}
        if key["pass"] == "bwd":
            compared = {"d_logits": times(self.size("vocab"))}
        found = {"counters": None, **compared, "bits of timed calls": exactly(reps * self.ranks)}
        return {case + name: count for name, count in found.items()}

    def most_tolerance(self, array: str) -> float:
        return of_logits(array, self.options["dtype"] == "bf16")

    def foms(self, row: dict[str, Any]) -> list[tuple[str, Any, str]]:
        stated = row["measurements"]
        return [("logits_rate", stated["rate"], "GB/s/rank"),
                ("share_of_bandwidth", stated["share_of_limit"], "of measured")]


class Pack(Work):
    measured = {"items": "", "tokens": "", "bins": "", "util": "%", "eff": "%", "pad": "%", "balance": "",
                "cost": "max/mean", "cost_bound": "max/bound", "time": "ms", "check": ""}
    optional = {"step": "ms"}

    def key(self, case: Case) -> dict[str, Any]:
        return {"algorithm": case.axes["algorithm"]}

    def facts(self) -> dict[str, Any]:
        return {"source": self.documents.source}

    def figures(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The costliest bin is cost_bound times the larger of the mean bin and the longest document."""
        documents, stated = self.documents, row["measurements"]
        found: dict[str, Any] = {"items": documents.count, "tokens": documents.tokens, "eff": 100.0, "pad": 0.0}
        if "step" in stated:
            found["step"] = None  # of packers that choose by it, which no problem has
        bins, bound = stated.get("bins"), stated.get("cost_bound")
        if is_number(bins) and bins > 0 and is_number(bound):
            mean, longest = documents.pairs / bins, documents.longest * (documents.longest + 1) / 2
            found["util"] = 100 * documents.tokens / (bins * self.size("capacity"))
            found["cost"] = bound * max(mean, longest) / mean
        return found

    def limits(self, row: dict[str, Any]) -> dict[str, tuple[float, float]]:
        least = math.ceil(self.documents.tokens / self.size("capacity"))
        return {"bins": (least, self.documents.count), "balance": (0.0, 1.0), "cost_bound": (1.0, self.documents.count)}

    def checks(self, key: dict[str, Any], reps: int) -> dict[str, Any]:
        """Of all packers of a run together."""
        return {"items in one bin": None, "bins within capacity": None}

    def foms(self, row: dict[str, Any]) -> list[tuple[str, Any, str]]:
        stated = row["measurements"]
        return [("documents_per_s", 1e3 * stated["items"] / stated["time"], "1/s"),
                ("utilisation", stated["util"] / 100, "of slots"), ("cost_imbalance", stated["cost"], "max/mean")]


class Pipeline(Work):
    measured = {
        "dp": "", "cp": "", "tp": "", "tokens": "", "bins": "", "pack": "%", **TIMES, "rate": "tok/s",
        "flop_rate": "GF/s/rank", "wire": "MB", "exposed": "%", "of_limit": "%", "imb_pair": "%", "imb_time": "%", **DONE,
    }
    optional = {"predicted": "ms"}

    def __init__(self, study: Study, placement: Placement) -> None:
        super().__init__(study, placement)
        self.model = MODELS[Path(study.options["model"]).name]
        if "input" in study.options:
            self.documents = documents_of(LENGTHS[Path(study.options["input"]).name])
        self.bin = self.size("bin") or 8192

    def key(self, case: Case) -> dict[str, Any]:
        return {"grid": self.facts()["grid"], "layout": case.axes["layout"], "schedule": case.axes["schedule"]}

    def facts(self) -> dict[str, Any]:
        found = {"documents": self.documents.count, "tokens": self.documents.tokens, "parameters": self.model.parameters,
                 "grid": " ".join(f"{name}={self.grid[name]}" for name in ("dp", "cp", "tp")),
                 "bin": (self.bin, self.size("bin"))}
        return found | ({"source": self.documents.source} if self.documents.source else {})

    def flops(self, key: dict[str, Any]) -> float:
        model = self.model
        of_pair = 4.0 * model.layers * model.heads * model.head_dim
        return model.flops_of_token * self.documents.tokens + of_pair * self.documents.pairs

    def figures(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        grid = {name: self.grid[name] for name in ("dp", "cp", "tp")}
        flops = self.flops(row["key"]) / self.ranks / seconds / 1e9
        wire = row["model"]["bytes_wire"] / 1e6 if row["model"]["bytes_wire"] is not None else None
        tokens = self.documents.tokens
        return {**grid, "tokens": tokens, "rate": tokens / seconds, "flop_rate": flops, "wire": wire}

    def limits(self, row: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """A document that is longer than a bin is a bin; padding makes it longer still."""
        long = [length for length in self.documents.lengths if length > self.bin]
        rest = self.documents.tokens - sum(long)
        bins = row["measurements"].get("bins")
        slots = sum(long) + ((bins if is_number(bins) else 0) - len(long)) * self.bin
        full = 100 * self.documents.tokens / max(slots, 1)
        return {"of_limit": SHARE, "exposed": PERCENT, "imb_pair": ANY, "imb_time": ANY,
                "pack": (0.9 * full, full * (1 + 1e-9)),
                "bins": (len(long) + math.ceil(rest / self.bin), self.documents.count),
                **{name: ANY for name in self.optional if name in row["measurements"]}}

    def checks(self, key: dict[str, Any], reps: int) -> dict[str, Any]:
        predicted = lambda sampled: (sampled - self.documents.count, sampled)  # noqa: E731  (not the last of a document)
        found: dict[str, Any] = {"logprob": predicted, "entropy": predicted}
        found["bits of timed passes"] = exactly(reps * self.ranks)
        if not self.documents.source:  # the input's reference is compared whole
            hidden = exactly(self.documents.tokens * self.model.hidden)
            predictions = exactly(sum(max(0, n - 1) for n in self.documents.lengths))
            found |= {"logprob": predictions, "entropy": predictions}
            found |= {f"hidden[{layer}]": hidden for layer in range(self.model.layers + 1)}
        return found

    def most_tolerance(self, array: str) -> float:
        is_bf16 = self.options["dtype"] == "bf16"
        return of_decoder(array, self.model, self.documents.longest, self.ranks, self.grid["tp"], is_bf16)

    def foms(self, row: dict[str, Any]) -> list[tuple[str, Any, str]]:
        stated = row["measurements"]
        share = None if stated["of_limit"] is None else stated["of_limit"] / 100
        return [("tokens_per_s", stated["rate"], "1/s"), ("tokens_per_s_per_rank", stated["rate"] / self.ranks, "1/s/rank"),
                ("share_of_limit", share, "of the limit")]


WORK: dict[str, type[Work]] = {
    "gyre-attention": Attention,
    "gyre-logprobs": Logprobs,
    "gyre-pack": Pack,
    "gyre-pipeline": Pipeline,
}


