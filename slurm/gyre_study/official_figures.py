"""The figures of official problems, from rows whose rates are computed again."""

import math
import re
import statistics
from collections.abc import Callable

from .results import Row, Run
from .status import CaseStatus


def number(row: Row, name: str) -> float:
    value = row.data.get("measurements", {}).get(name)
    return float(value) if isinstance(value, (int, float)) else float("nan")


def median(row: Row) -> float:
    """Of the slowest rank's times, in ms."""
    return statistics.median(row.slowest())


def has_its_median(row: Row) -> bool:
    """Whether the row states the median that its samples have."""
    stated = row.data.get("statistics_ms", {}).get("median")
    return isinstance(stated, (int, float)) and math.isclose(stated, median(row), rel_tol=1e-6)


def attention_flops(run: Run, row: Row) -> list[str]:
    """Whether the FLOPs are those of whole pairs of visible tokens, no more than there are: two for each element of
    each product. Forward has a product of keys and one of values, backward three and two."""
    said = run.head.get("configuration", {})
    flops, tokens = row.data.get("model", {}).get("flops"), row.key.get("tokens")
    size = [said.get(name) for name in ("heads", "head_dim")]
    size.append(said.get("v_head_dim", size[1]))
    if not all(isinstance(one, (int, float)) and one > 0 for one in (flops, tokens, *size)):
        return ["no FLOPs, tokens, heads, head_dim or v_head_dim"]
    of_keys, of_values = (1, 1) if row.key.get("pass") == "fwd" else (3, 2)
    pairs = flops / (2 * size[0] * (of_keys * size[1] + of_values * size[2]))
    most = tokens * (tokens + 1) / 2 if said.get("mask") == "causal" else tokens**2
    if pairs != int(pairs) or pairs > most:
        return [f"{flops:.12g} FLOPs are {pairs:.12g} pairs; wanted: a whole number up to {most:.12g}"]
    return []


def pack_items(run: Run, row: Row) -> list[str]:
    count = re.search(r"\bcount=(\d+)", str(run.head.get("configuration", {}).get("source")))
    if count and number(row, "items") != int(count[1]):
        return [f"{number(row, 'items'):.9g} items; the source has {count[1]}"]
    return []


def pipeline_tokens(run: Run, row: Row) -> list[str]:
    tokens = run.head.get("configuration", {}).get("tokens")
    return [] if number(row, "tokens") == tokens else [f"{number(row, 'tokens'):.9g} tokens; the run has {tokens}"]


# Of each program: its rate, by row, ranks and seconds; and what more its file lets one compute.
Rate = Callable[[Row, int, float], float]
RATES: dict[str, tuple[Rate, Callable[[Run, Row], list[str]]]] = {
    "gyre-attention": (lambda row, ranks, time: row.data["model"]["flops"] / time / ranks / 1e12, attention_flops),
    "gyre-logprobs": (lambda row, ranks, time: number(row, "ideal_bytes") / time / 1e9, lambda run, row: []),
    "gyre-pipeline": (lambda row, ranks, time: number(row, "tokens") / time, pipeline_tokens),
    "gyre-pack": (lambda row, ranks, time: float("nan"), pack_items),
}


def misstated(ranks: int, app: str, run: Run, row: Row) -> list[str]:
    """What a row states otherwise than its file has it. Its rate is work over time; gyre-pack states none."""
    rate, more = RATES[app]
    found = more(run, row)
    if found or app == "gyre-pack":
        return found
    computed, stated = rate(row, ranks, median(row) / 1e3), number(row, "rate")
    if math.isclose(computed, stated, rel_tol=1e-6):
        return []
    return [f"its rate is {stated:.6g}; work over time is {computed:.6g}"]


def over_time(status: CaseStatus, name: str) -> float:
    """A rate of all passes together: that of each, weighted by its time."""
    rows = [row for _, row in status.rows]
    return sum(number(row, name) * median(row) for row in rows) / sum(median(row) for row in rows)


def percent(share: float, of: str) -> str:
    return f"{share:.1f} % of {of}" if share == share else f"n/a: share of {of}"


def attention_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "rate"))
    rate = over_time(best, "rate")
    alone = [over_time(one, "rate") for one in cases_of(cases, 1)]
    efficiency = percent(100 * rate / max(alone), "one rank") if alone else "n/a: no run of one rank"
    return best, f"{rate:.4g} TFLOP/s/rank", efficiency


def logprobs_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "share_of_limit"))
    share, rate = over_time(best, "share_of_limit"), over_time(best, "rate")
    return best, percent(100 * share, "measured bandwidth"), f"{rate:.4g} GB/s/rank"


def pack_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = min(cases, key=lambda one: number(one.rows[0][1], "cost"))
    row = best.rows[0][1]
    rate = 1e3 * number(row, "items") / median(row)
    return best, f"{rate:.4g} documents/s", f"cost {number(row, 'cost'):.4f} max/mean"


def pipeline_figure(cases: list[CaseStatus]) -> tuple[CaseStatus, str, str]:
    best = max(cases_of(cases, most_ranks(cases)), key=lambda one: over_time(one, "rate"))
    rate = over_time(best, "rate") / best.placement.ranks
    return best, f"{rate:.4g} tokens/s/rank", percent(over_time(best, "of_limit"), "the limit")


FIGURES = {
    "gyre-attention": attention_figure,
    "gyre-logprobs": logprobs_figure,
    "gyre-pack": pack_figure,
    "gyre-pipeline": pipeline_figure,
}


def most_ranks(cases: list[CaseStatus]) -> int:
    return max(one.placement.ranks for one in cases)


def cases_of(cases: list[CaseStatus], ranks: int) -> list[CaseStatus]:
    return [one for one in cases if one.placement.ranks == ranks]
