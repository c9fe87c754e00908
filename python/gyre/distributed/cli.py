"""python -m gyre conform: runs a function on ranks over the golden suite."""

import argparse
import inspect
import os
from collections.abc import Sequence

from ..console import complain, ended
from . import certificate, contracts, layouts
from .conform import BACKENDS, TOLERANCE, conform
from .joined import is_joined
from .rank import TYPES, Unable, Usage

EPILOG = """\
The contract is the one that the function is named after, unless --contract names it; --contract NAME
--explain prints it. Started by torchrun, the command takes the ranks that there are.

exit code: 0 all that was compared agrees; 1 the function breaks its contract, or nothing could be
compared; 2 bad usage; 3 what this machine lacks (torch, GPUs), a damaged file or one whose answers do
not fit, or a report that cannot be written; 130 interrupted

examples: gyre conform inputs/golden --function my_file.py:attention --ranks 2
          gyre conform inputs/golden --function my_package.losses:logprob --tp 4 --case 'logprobs_padding_*'
          torchrun --nproc-per-node 2 -m gyre conform inputs/golden --function my_file.py:attention
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre conform",
        description="Runs a function on ranks over the golden suite.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("suite", nargs="*", help="files with answers, or folders of them: inputs/golden; none for a contract that has "
        "cases of its own")
    add("--function", help="FILE.py:NAME or MODULE:NAME")
    add("--contract", default="", help=", ".join(contracts.NAMES))
    add("--explain", action="store_true", help="print the contract and end")
    add(
        "--ranks",
        type=int,
        help="number of processes (default: dp x cp x tp, else 2); without --cp and --tp they are all grids of "
        "what the contract splits",
    )
    add("--cp", type=int, help="ranks that share tokens (default: the ranks over dp x tp)")
    add("--tp", type=int, help="ranks that share heads or the vocabulary")
    replicated = ", ".join(n for n in contracts.NAMES if getattr(contracts.named(n), "USES_DP", False))
    add("--dp", type=int, help=f"replicas, which have other rows; of {replicated}")
    add("--layout", default="dual-chunk-swap", help=", ".join(layouts.NAMES) + " (default: %(default)s)")
    add(
        "--backend",
        default="gloo",
        help=", ".join(BACKENDS) + ": tensors on CPUs, on GPUs, or arrays of NumPy "
        "without torch (default: %(default)s)",
    )
    add("--dtype", default="float32", help=", ".join(TYPES) + " (default: %(default)s)")
    add("--case", default="*", help="files or cases to run, by pattern: 'attention_window_*'")
    defaults = ", ".join(f"{t} {v:g}" for t, v in TOLERANCE.items())
    add("--rtol", type=float, help="|got - answer| <= atol scale + rtol |answer|")
    add("--atol", type=float, help=f"(default of both: {defaults})")
    conventions = {n: getattr(contracts.named(n), "CONVENTIONS", ()) for n in contracts.NAMES}
    text = "; ".join(f"{name}: {', '.join(known)}" for name, known in conventions.items() if known)
    add("--convention", default="", help=f"convention of the returned value or gradient; {text} (default: the first)")
    add("--forward-only", action="store_true", help="the function has no gradients: they are not asked for")
    add("--uneven", action="store_true", help="contract loss: some ranks have one row more than others, or none")
    add("--report", default="", metavar="FILE.json",
        help="add the run to a report, in place of one of the same function and options; FILE.html is its page")
    add("--timeout", type=float, default=60.0, help="seconds for a case (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    code = ended("gyre conform", lambda: _run(arguments))
    if is_joined():
        os._exit(code)  # a thread may hang in the function
    return code


def _run(arguments: Sequence[str] | None) -> int:
    options = vars(_parser().parse_args(arguments))
    suite, function, explain, file = (options.pop(name) for name in ("suite", "function", "explain", "report"))
    try:
        for name in ("ranks", "cp", "tp", "dp"):
            if options[name] is not None and options[name] < 1:
                raise Usage(f"--{name} is {options[name]}; it must be 1 or more")
            options[name] = options[name] or 0
        if explain:
            name = options["contract"]
            if name not in contracts.NAMES:
                raise Usage(f"--contract is {name!r}; it must be one of {', '.join(contracts.NAMES)}")
            print(inspect.getdoc(contracts.named(name)))
            return 0
        if not function:
            raise Usage("--function is needed, and a SUITE for contracts that have no cases of their own")
        report = conform(suite, function, **options)
        if file:
            certificate.add(file, report)
    except Usage as error:
        return _complain(error, 2)
    except (Unable, OSError, ValueError) as error:
        return _complain(error, 3)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    print(report, flush=True)
    return 0 if report.passed else 1


def _complain(error: Exception | str, code: int) -> int:
    return complain("gyre conform", error, code) if os.environ.get("RANK", "0") == "0" else code
