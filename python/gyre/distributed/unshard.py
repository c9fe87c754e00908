"""unshard(shard, rank, size, group) -> batch

shard: what the rank has under the layout, ids, labels, positions [slots / size], or positions of several
axes [axes, slots / size]. The function returns them whole, in the order of the stream, the same on every
rank, in a mapping. Further parameters, given where they are taken: layout (its name), cu_seqlens_padded
(boundaries of the stream), mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Arrays, Finding, Hypothesis, Problem, Tolerance, Verdict, judged, keywords
from .layouts import halves_exchanged
from .rank import Here
from .shard import STREAMS, bins_of, checked

KIND, USES_LAYOUT = "packed", True
SPLITS = ("cp",)


def problems(path: Path, options: Any) -> Iterator[Problem]:
    """Each bin of a packed file that has answers for this layout and cp."""
    for name, stream, answers in bins_of(path, options):
        if answers["index"].size != len(stream["ids"]):
            continue  # the layout has padding of its own
        bounds, whole = stream["cu_seqlens_padded"], {n: stream[n].astype(np.int64) for n in STREAMS}
        pieces = [
            {
                "shard": {n: answers[n][rank // options.tp] for n in STREAMS},
                "layout": options.layout,
                "bounds": bounds,
                "shapes": {n: a.shape for n, a in whole.items()},
            }
            for rank in range(options.cp * options.tp)
        ]
        shards = {n: answers[n] for n in (*STREAMS, "index")}
        shards["exchanged"] = halves_exchanged(answers["index"], bounds)
        yield Problem(name, pieces, {}, partial(_judge, name, whole, shards))


def call(
    function: Callable[..., Any], piece: Mapping[str, Any], needs: Mapping[str, str], here: Here
) -> dict[str, np.ndarray]:
    """Calls the function on one rank."""
    offers = {"layout": piece["layout"], "mesh": here.mesh, "cu_seqlens_padded": here.ids(piece["bounds"])}
    shard = {name: here.ids(array) for name, array in piece["shard"].items()}
    found = function(shard, here.rank // here.tp, here.cp, here.group("cp"), **keywords(function, offers, needs))
    return checked(found, piece["shapes"])


def _judge(
    name: str, whole: Arrays, shards: Arrays, arrays: list[dict[str, np.ndarray]], tolerance: Tolerance
) -> Verdict:
    for rank, mine in enumerate(arrays):
        if set(mine) != set(arrays[0]) or any((mine[n] != arrays[0][n]).any() for n in mine):
            return Verdict(name).fail(
                Finding("ranks-disagree", f"ranks 0 and {rank} return different streams", (), (0, rank))
            )
    got = arrays[0]
    expected = {n: whole[n] for n in got}

    def places(array: str, bad: np.ndarray) -> str:
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        axis = "".join(f"axis {i}, " for i in place[:-1])
        values = f"{got[array][place]}, should be {expected[array][place]}"
        return f"{int(bad.sum())} of {bad.size} differ; first {axis}slot {place[-1]}: {values}"

    def behind(array: str, step: int = 0) -> np.ndarray:
        """Shards one behind the other, those of rank r + step (mod cp) in place of rank r's."""
        return np.moveaxis(np.roll(shards[array], step, axis=0), 0, -2).reshape(whole[array].shape)

    def errors(failing: set[str]) -> Iterator[Hypothesis]:
        size = len(next(iter(shards.values())))
        yield Hypothesis(
            "layout",
            "shards stand one behind the other, as if the layout were contiguous",
            lambda: {n: behind(n) for n in failing},
        )
        for step in range(1, size):
            yield Hypothesis(
                "wrong-rows",
                "shards of the ranks are mixed up",
                lambda step=step: {n: behind(n, step) for n in failing},
            )

        yield from _of_one_rank(expected, shards, failing)

    return judged(name, got, expected, tolerance, errors, places)


def _of_one_rank(expected: Arrays, shards: Arrays, failing: set[str]) -> Iterator[Hypothesis]:
    """One rank's rows have another rank's shard, or stand in another order. shards: with index, the slots of ranks."""
    index = shards["index"]
    for rank, rows in enumerate(index):
        others = [o for o in range(len(index)) if o != rank]
        for kind, text, source in (
            *(("dropped-shard", f"the slots of rank {rank} have the shard of rank {o}", index[o]) for o in others),
            ("chunk-order", f"the earlier and the later chunks of rank {rank} are exchanged", shards["exchanged"][rank]),
            ("dropped-shard", f"the shard of rank {rank} is missing", None),
        ):
            def put(rows: np.ndarray = rows, source: np.ndarray | None = source) -> Arrays:
                found = {n: expected[n].copy() for n in failing}
                for n, array in found.items():
                    array[..., rows] = 0 if source is None else expected[n][..., source]
                return found

            yield Hypothesis(kind, text, put)
