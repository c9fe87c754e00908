"""gyre-check: compares arrays with a reference from the command line."""

import argparse
import sys
from collections.abc import Sequence

from .comparison import compare, is_npz, place_of
from .console import complain, ended
from .reading import Damaged

DESCRIPTION = "Compares arrays by name: those that you computed with those of a reference."
EPILOG = """\
exit code: 0 all agree; 1 something differs; 2 bad usage, or a file that cannot be read; 3 a file
whose contents are not what was written, or an output that cannot be written

examples: gyre-check mine.npz inputs/logprobs_golden.h5 --common
          gyre-check mine.h5:/results inputs/logprobs_golden.h5:/reference --rtol 1e-4
"""
PLACE = "FILE.npz, FILE.h5 or FILE.h5:/group; beside a FILE.npz, FILE.h5 is its /reference"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre-check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", help=PLACE)
    parser.add_argument("b", help="the reference, given likewise")
    add = parser.add_argument
    add("--rtol", type=float, default=1e-5, help="reals agree when |a - b| <= atol + rtol |b|")
    add("--atol", type=float, default=1e-5, help="(default of both: 1e-5)")
    add("--equal-nan", action="store_true", help="NaN agrees with NaN; without this option, it agrees with nothing")
    add("--common", action="store_true", help="leave out what one side alone has")
    ties = "any: ids beside values (top_ids, top_values) may stand in any order where values tie"
    add("--ties", choices=["exact", "any"], default="exact", help=ties)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return ended("gyre-check", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = vars(_parser().parse_args(arguments))
    a, b = options.pop("a"), options.pop("b")
    try:
        comparison = compare(a, b, **options)
    except Damaged as error:
        return complain("gyre-check", error, 3)
    except (OSError, ValueError) as error:
        return complain("gyre-check", error, 2)
    for letter, place, other in (("A", a, b), ("B", b, a)):
        print(f"# {letter}  {place if is_npz(place) else place_of(place, other)}")
    print(comparison)
    return 0 if comparison.passed else 1


if __name__ == "__main__":
    sys.exit(main())
