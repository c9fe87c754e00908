"""pack(lengths, capacity) -> bins

lengths: tokens of each document. The function returns bins, a list of lists of documents' indices. No
bin holds more than capacity tokens, unless it is one document that is longer; every document is in one
bin; every rank returns the same bins.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import reading
from .contract import Finding, Malformed, Problem, Tolerance, Verdict, keywords
from .rank import Here

KIND, USES_LAYOUT = "documents", False
SPLITS = ("tp",)


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """A file of documents under five capacities: its longest document, twice that, each less one token, all tokens."""
    lengths = np.diff(np.asarray(reading.read(path).inputs["offsets"]).astype(np.int64))
    longest = int(lengths.max(initial=1)) or 1
    for capacity in sorted({max(1, longest - 1), longest, 2 * longest - 1, 2 * longest, max(longest, int(lengths.sum()))}):
        name = f"{path.stem} capacity {capacity}"
        pieces = [{"lengths": lengths, "capacity": capacity}] * (options.cp * options.tp)
        yield Problem(name, pieces, {}, partial(_judge, name, lengths, capacity))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, Any]:
    """Calls the function on one rank."""
    more = keywords(function, {"group": here.group("cp"), "rank": here.rank, "size": here.cp * here.tp}, needs)
    answer = function([int(n) for n in piece["lengths"]], piece["capacity"], **more)
    try:
        return {"bins": [[int(document) for document in one] for one in answer]}
    except (TypeError, ValueError) as error:
        raise Malformed(
            "other-type", f"bins are {type(answer).__name__} ({error}); they must be lists of indices"
        ) from error


def _judge(
    name: str, lengths: np.ndarray, capacity: int, arrays: list[dict[str, Any]], tolerance: Tolerance
) -> Verdict:
    verdict = Verdict(name, values=len(lengths))
    all_bins = [mine["bins"] for mine in arrays]
    for rank, bins in enumerate(all_bins):
        if bins != all_bins[0]:
            return verdict.fail(Finding("ranks-disagree", f"ranks 0 and {rank} return different bins", (), (0, rank)))
    counts = Counter(document for one in all_bins[0] for document in one)
    strange = sorted(set(counts) - set(range(len(lengths))))
    if strange:
        verdict.fail(Finding("unknown-document", f"there is no document {strange[0]}: {len(lengths)} were given"))
    lost = [d for d in range(len(lengths)) if d not in counts and lengths[d]]
    if lost:
        verdict.fail(
            Finding(
                "dropped-document",
                f"{len(lost)} documents are in no bin; the first is {lost[0]} of {lengths[lost[0]]} tokens",
            )
        )
    twice = [d for d, n in sorted(counts.items()) if n > 1]
    if twice:
        verdict.fail(Finding("doubled-document", f"document {twice[0]} is in {counts[twice[0]]} bins"))
    for b, one in enumerate(all_bins[0]):
        held = sum(int(lengths[d]) for d in one if 0 <= d < len(lengths))
        if held > capacity and len(one) > 1:
            verdict.fail(Finding("over-capacity", f"bin {b} has {held} tokens; its capacity is {capacity}"))
            break
    return verdict
