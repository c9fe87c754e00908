"""Sizes as the programs read them (K, M, G = 2^10, 2^20, 2^30), and sweeps over sizes."""

import math
from collections.abc import Sequence

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(value: object) -> int:
    """4096, "4096" or "4K". Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no size")
    if isinstance(value, int):
        return value
    unit = UNITS.get(value[-1:].upper(), 1)
    number = value[:-1] if unit > 1 else value
    if not number.isdecimal():
        raise ValueError(f"{value!r} is no size; a size is 4096 or 4K")
    return int(number) * unit


def size_text(size: int) -> str:
    """The shortest text that parse_size reads as this size."""
    for name in ("G", "M", "K"):
        if size and size % UNITS[name] == 0:
            return f"{size // UNITS[name]}{name}"
    return str(size)


def geometric(first: int, last: int, factor: float) -> list[int]:
    """The sizes of --min FIRST --max LAST --factor FACTOR, by the programs' own arithmetic."""
    sizes: list[int] = []
    size = float(first)
    while size <= last and len(sizes) <= 100:
        whole = math.floor(size + 0.5)
        if not sizes or whole > sizes[-1]:
            sizes.append(whole)
        size *= factor
    return sizes


def progression(sizes: Sequence[int]) -> list[str] | None:
    """Options with which a program runs exactly these ascending sizes, or None."""
    if len(sizes) == 1:
        return ["--tokens", size_text(sizes[0])]
    first, last = sizes[0], sizes[-1]
    ends = ["--min", size_text(first), "--max", size_text(last)]
    factor = sizes[1] / first
    if geometric(first, last, factor) == list(sizes):
        return ends if factor == 2 else [*ends, "--factor", repr(factor)]
    step = sizes[1] - first
    if list(range(first, last + 1, step)) == list(sizes):
        return [*ends, "--step", size_text(step)]
    return None


def sweeps(sizes: Sequence[int]) -> list[tuple[list[int], list[str]]]:
    """Ascending sizes in as few sweeps as a greedy choice finds: those of each sweep, and its options."""
    left, found = list(sizes), []
    while left:
        for count in range(len(left), 0, -1):
            options = progression(left[:count])
            if options is not None:
                found.append((left[:count], options))
                left = left[count:]
                break
    return found


def pairs(tokens: int, mask: str, window: int, queries: int = 0) -> int:
    """Pairs of a query and a key of one sequence under a mask; the last `queries` tokens have one (0: all)."""
    if 0 < queries < tokens:
        if mask != "causal":
            return queries * tokens
        return pairs(tokens, mask, window) - pairs(tokens - queries, mask, window)
    if mask != "causal":
        return tokens * tokens
    inside = min(tokens, window) if window > 0 else tokens
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


def tokens_of_equal_work(base: int, ranks: int, mask: str, window: int, queries: int = 0) -> int:
    """Fewest tokens whose pairs are at least `ranks` times those of `base` tokens."""
    wanted = ranks * pairs(base, mask, window, queries)
    low, high = base, base * ranks
    while low < high:
        middle = (low + high) // 2
        if pairs(middle, mask, window, queries) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def round_to(size: float, multiple: int) -> int:
    """The nearest positive multiple."""
    return max(1, math.floor(size / multiple + 0.5)) * multiple
