"""gyre-ratios: reports the importance ratios of two files of log-probabilities."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .comparison import is_npz
from .console import complain, ended, refuse_input
from .importance import Ratios, importance_ratios
from .reading import Damaged, read_arrays, read_npz, split_place

DESCRIPTION = """\
Reports the importance ratios exp(trainer - rollout) of two files of log-probabilities: their mean,
extremes and histogram, and how many a clipped objective would clip; of all tokens, and of each document."""
EPILOG = """\
exit code: 0 done, and all within --most; 1 a ratio is outside --most; 2 bad usage, or files that
cannot be compared; 3 a damaged file, or an output that cannot be written

examples: gyre-ratios mine.npz rollout.npz --array logprob
          gyre-ratios results.h5:/results rollout.h5:/reference --array logprob --documents problem.h5
          gyre-ratios a.npz b.npz --clip 0.2 0.28 --most 1.05 --json ratios.json"""
PLACE = "FILE.npz, FILE.h5 or FILE.h5:/group"


def _named(place: str, name: str) -> np.ndarray:
    """The array of this name, or of a path that ends in it."""
    path, group = split_place(place)
    arrays = read_npz(place) if is_npz(place) else read_arrays(path, group or "/")
    found = [key for key in arrays if key == name or key.endswith(f"/{name}")]
    if len(found) != 1:
        raise ValueError(f"{place} has {len(found)} arrays {name}; it has {', '.join(sorted(arrays))}")
    return arrays[found[0]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre-ratios",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trainer", help=PLACE)
    add("rollout", help="the log-probabilities that the sampler returned, given likewise")
    add("--array", default="logprob", help="name of the array in both (default: logprob)")
    add("--documents", metavar="PLACE", help="where `offsets` are: figures of each document")
    add("--mask", metavar="PLACE", help="where `mask` is: tokens with 0 do not count")
    clip_help = "how far below and above 1 an objective clips (default: 0.2 0.2)"
    add("--clip", nargs=2, type=float, default=(0.2, 0.2), metavar=("LOW", "HIGH"), help=clip_help)
    most_help = "end with exit code 1 if a ratio is above this, or below its inverse"
    add("--most", type=float, metavar="RATIO", help=most_help)
    add("--json", metavar="FILE", help="write the report there, too")
    return parser


def _ratios_of(options: argparse.Namespace) -> Ratios:
    """The ratios of the files. ValueError, TypeError, OSError: they have none."""
    if options.most is not None and not options.most >= 1:
        raise ValueError(f"--most {options.most} must be 1 or more")
    if options.json:
        places = (options.trainer, options.rollout, options.documents, options.mask)
        refuse_input("--json", options.json, (split_place(place)[0] for place in places if place))
    trainer, rollout = (_named(place, options.array) for place in (options.trainer, options.rollout))
    offsets = _named(options.documents, "offsets") if options.documents else None
    mask = _named(options.mask, "mask") if options.mask else None
    try:
        return importance_ratios(trainer, rollout, offsets=offsets, mask=mask, clip=tuple(options.clip))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.trainer}, {options.rollout}: {error}") from error


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        ratios = _ratios_of(options)
    except Damaged as error:
        return complain("gyre-ratios", error, 3)
    except (OSError, TypeError, ValueError) as error:
        return complain("gyre-ratios", error, 2)
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(_plain(asdict(ratios)), file, indent=1, allow_nan=False)
                file.write("\n")
        except OSError as error:
            return complain("gyre-ratios", f"cannot write {options.json}: {error.strerror}", 3)
    print(ratios)
    limit = options.most
    if limit is None:
        return 0
    if ratios.all.impossible:
        print(f"{ratios.all.impossible} tokens have an infinite ratio, which is not within {limit:g}")
        return 1
    if 1 / limit <= ratios.all.least <= ratios.all.most <= limit:
        return 0
    print(f"ratios from {ratios.all.least:g} to {ratios.all.most:g} are not within {limit:g}")
    return 1


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: null instead of NaN and infinities."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return ended("gyre-ratios", lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
