"""Runs a function on ranks over the cases of a suite, and says which contract it breaks, and where."""

import difflib
import fnmatch
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import reading
from . import contracts, layouts
from .contract import Finding, LeftOut, Problem, Tolerance, Verdict
from .joined import Joined, is_joined
from .launch import Setting, Team, ending
from .rank import TYPES, Grid, Unable, Usage, check_gpus, split_function, torch_or_refusal

BACKENDS = ("gloo", "nccl", "numpy")
WIDE = 2e-4  # of what a function returns in float32 for inputs of bfloat16: logprob, loss, kl, lse
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-2}
LONGEST_S = 1e6  # that can be waited for
WITHOUT = "for a function that has none in any case there is --forward-only, which compares no gradient at all"


@dataclass(frozen=True)
class Options:
    """How a function is run. dp, cp or tp of 0: what is left of the ranks; of all: all grids that the contract splits."""

    function: str
    contract: str = ""
    ranks: int = 0
    cp: int = 0
    tp: int = 0
    dp: int = 0
    layout: str = "dual-chunk-swap"
    backend: str = "gloo"
    dtype: str = "float32"
    case: str = "*"
    rtol: float | None = None
    atol: float | None = None
    timeout: float = 60.0
    convention: str = ""
    forward_only: bool = False
    uneven: bool = False
    memory: dict[str, Any] = field(default_factory=dict, compare=False)  # what a contract keeps from case to case


@dataclass
class Report:
    """The verdicts of all cases on all grids.

    unasked: parameters of the function that no case needed of those that were compared.
    """

    options: Options
    grids: tuple[Grid, ...]
    verdicts: list[Verdict] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    @property
    def compared(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.status != "left out"]

    @property
    def passed(self) -> bool:
        """Whether something was compared, and all of it agrees."""
        return all(v.status == "passed" for v in self.compared) and sum(v.values for v in self.verdicts) > 0

    @property
    def kinds(self) -> dict[str, int]:
        """How many cases each kind of error was found in, the most frequent first."""
        found: dict[str, int] = {}
        for verdict in self.verdicts:
            for kind in dict.fromkeys(f.kind for f in verdict.findings):
                found[kind] = found.get(kind, 0) + 1
        return dict(sorted(found.items(), key=lambda item: (item[0] == "values", -item[1])))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    o = report.options
    names = [v.case for v in report.verdicts]
    width = max(map(len, [*names, "case"]))
    layout = f", layout {o.layout}" if contracts.named(o.contract).USES_LAYOUT else ""
    grids = ", ".join(map(str, report.grids))
    yield f"# contract {o.contract} of {o.function} on {o.ranks} ranks: {grids}{layout}, {o.backend}, {o.dtype}"
    yield f"{'case'.ljust(width)}  verdict   err_over_tol  broken"
    grid = ""
    for v in report.verdicts:
        if len(report.grids) > 1 and v.grid != grid:
            grid = v.grid
            yield f"# {grid}"
        text = "; ".join(_said(f) for f in v.findings) or v.note
        error = f"{v.err_over_tol:.3g}" if v.status != "left out" and not math.isnan(v.err_over_tol) else ""
        yield f"{v.case.ljust(width)}  {v.status.ljust(8)}  {error.rjust(12)}  {text}".rstrip()
        yield from (f"{' ' * width}            {place}" for place in v.places)
    compared = report.compared
    good = sum(v.status == "passed" for v in compared)
    values = sum(v.values for v in report.verdicts)
    if report.kinds:
        yield "broken: " + ", ".join(f"{kind} in {n} case{'s' if n > 1 else ''}" for kind, n in report.kinds.items())
    partial = sum(v.status == "passed" and v.note.startswith("not returned") for v in compared)
    if partial:
        yield f"compared in part: {partial} cases lack what their lines call not returned"
    if report.unasked:
        yield f"not tested: {', '.join(report.unasked)}, which the function takes and no case needed that was compared"
    if not values and not report.kinds:
        yield "nothing was compared"
    left = len(report.verdicts) - len(compared)
    verdict = "PASSED" if report.passed else "FAILED"
    of_grids = {str(grid): sum(v.values for v in report.verdicts if v.grid == str(grid)) for grid in report.grids}
    idle = "" if len(of_grids) == 1 else " (nothing compared)"
    run = ", ".join(grid + (idle if not some else "") for grid, some in of_grids.items())
    yield f"CONFORM {verdict} {good}/{len(compared)} cases, {values} values, {left} left out; {run}"


def _said(finding: Finding) -> str:
    return finding.text + (f" ({', '.join(finding.arrays)})" if finding.arrays and finding.kind != "nan" else "")


def files_of(suite: Sequence[str], kind: str, pattern: str) -> list[Path]:
    """Files of a kind and name of the suite: files, or folders of them. Usage: there is none."""
    found = []
    for place in map(Path, suite):
        if not place.exists():
            raise Usage(f"{place} does not exist")
        found += sorted(place.glob("*.h5")) if place.is_dir() else [place]
    mine = [path for path in found if fnmatch.fnmatch(path.stem, pattern.removesuffix(".h5"))]
    mine = [path for path in mine if reading.kind_of(path) == kind]
    if not mine:
        named = "" if pattern == "*" else f" with a name like {pattern!r}"
        raise Usage(f"the contract needs a file of the kind {kind}; {', '.join(suite)} has none{named}")
    return mine


def cases_of(suite: Sequence[str], options: Options) -> list[Path]:
    """The files of a contract, or the names of the cases that it brings. Usage: there is none."""
    contract = contracts.named(options.contract)
    if not hasattr(contract, "CASES"):
        if not suite:
            raise Usage(f"the contract {options.contract} needs a SUITE, such as inputs/golden")
        return files_of(suite, contract.KIND, options.case)
    known = ", ".join(contract.CASES)
    if suite:
        raise Usage(f"SUITE is {suite[0]}, but the contract {options.contract} has cases of its own: {known}")
    found = [Path(name) for name in contract.CASES if fnmatch.fnmatch(name, options.case)]
    if not found:
        raise Usage(f"--case is {options.case!r}; the contract {options.contract} has {known}")
    return found


def tolerance_of(contract: Any, kind: str) -> float:
    """Of results in a type, if nothing else was asked for."""
    return float({**TOLERANCE, **getattr(contract, "TOLERANCE", {})}[kind])


def grids_of(ranks: int, dp: int, cp: int, tp: int, splits: Sequence[str]) -> tuple[Grid, ...]:
    """The grid of a number of ranks; dp, cp or tp of 0 is what is left, of all all grids of what a contract splits.

    Usage: they do not go together.
    """
    if ranks < 1 or min(dp, cp, tp) < 0:
        raise Usage(f"ranks {ranks}, dp {dp}, cp {cp}, tp {tp}: they must be at least 1")
    given = {"dp": dp or int("dp" not in splits), "cp": cp, "tp": tp}
    if not cp and not tp:
        given |= {axis: 1 for axis in ("cp", "tp") if axis not in splits}
    sizes = [[n] if n else [n for n in range(ranks, 0, -1) if ranks % n == 0] for n in given.values()]
    found = tuple(grid for grid in itertools.starmap(Grid, itertools.product(*sizes)) if grid.ranks == ranks)
    if not found:
        wanted = Grid(*(n or 1 for n in given.values()))
        raise Usage(f"{ranks} ranks are no multiple of {wanted} = {wanted.ranks}: a group of the wrong size"
                    if 0 in given.values() else f"{ranks} ranks are not {wanted} = {wanted.ranks}: a group of the wrong size")
    return found


def settled(options: Options) -> tuple[Options, tuple[Grid, ...]]:
    """Options with nothing left open, but cp and tp of several grids. Usage: they contradict each other."""
    split_function(options.function)
    name = options.contract or options.function.rpartition(":")[2]
    if name not in contracts.NAMES:
        nearest = difflib.get_close_matches(name, contracts.NAMES, 1, 0)[0]
        raise Usage(f"the contract is {name!r}; it must be one of {', '.join(contracts.NAMES)} (nearest: {nearest})")
    for option, value, known in (
        ("layout", options.layout, layouts.NAMES),
        ("backend", options.backend, BACKENDS),
        ("dtype", options.dtype, TYPES),
    ):
        if value not in known:
            raise Usage(f"--{option} is {value!r}; it must be one of {', '.join(known)}")
    conventions = getattr(contracts.named(name), "CONVENTIONS", ("",))
    if options.convention and options.convention not in conventions:
        wanted = f"it must be one of {', '.join(conventions)}" if any(conventions) else f"{name} has none"
        raise Usage(f"--convention is {options.convention!r}; {wanted}")
    if options.backend == "numpy" and options.dtype == "bfloat16":
        raise Usage("NumPy has no bfloat16: --backend gloo, or --dtype float32")
    if not 0 < options.timeout <= LONGEST_S:
        raise Usage(f"--timeout is {options.timeout}; it must be positive seconds, at most {LONGEST_S:g}")
    for option, bound in (("rtol", options.rtol), ("atol", options.atol)):
        if bound is not None and not 0 <= bound < math.inf:
            raise Usage(f"--{option} is {bound}; it must be 0 or more, and finite")
    if options.uneven and not getattr(contracts.named(name), "USES_UNEVEN", False):
        raise Usage(f"--uneven was given, but rows of the contract {name} are dealt in one way; it is for loss")
    started = int(os.environ["WORLD_SIZE"]) if is_joined() else 0
    if options.dp > 1 and not getattr(contracts.named(name), "USES_DP", False):
        raise Usage(f"--dp is {options.dp}, but the contract {name} has no data-parallel ranks; it must be 1")
    ranks = options.ranks or started or max(1, options.dp) * max(1, options.cp) * max(1, options.tp)
    if ranks == 1 and not (options.ranks or started or options.dp or options.cp or options.tp):
        ranks = 2
    if started and ranks != started:
        raise Usage(f"--ranks is {ranks}, but {started} ranks were started: a group of the wrong size")
    grids = grids_of(ranks, options.dp, options.cp, options.tp, contracts.named(name).SPLITS)
    convention = options.convention or conventions[0]
    dp, cp, tp = (grids[0].dp, grids[0].cp, grids[0].tp) if len(grids) == 1 else (max(1, options.dp), 0, 0)
    return replace(options, contract=name, ranks=ranks, dp=dp, cp=cp, tp=tp, convention=convention), grids


def conform(suite: str | Sequence[str], function: str, **options: Any) -> Report:
    """Runs FILE.py:NAME or MODULE:NAME over the cases of a suite; the options are those of Options.

    A contract that has cases of its own takes an empty suite.

    ValueError (Usage): what was asked for cannot be. RuntimeError (Unable): this machine lacks torch,
    or GPUs.
    """
    chosen, grids = settled(Options(function, **options))
    contract = contracts.named(chosen.contract)
    places = [suite] if isinstance(suite, (str, os.PathLike)) else list(suite)
    paths = cases_of([os.fspath(p) for p in places], chosen)
    if chosen.backend != "numpy":
        torch_or_refusal()
    check_gpus(chosen.backend, chosen.ranks)
    usual = tolerance_of(contract, chosen.dtype)
    tolerance = Tolerance(usual if chosen.rtol is None else chosen.rtol, usual if chosen.atol is None else chosen.atol)
    if chosen.dtype == "bfloat16" and tolerance == Tolerance(usual, usual):
        tolerance = Tolerance(usual, usual, WIDE)
    alone = (Grid(1, 1, 1),) if getattr(contract, "FROM_ONE_RANK", False) and chosen.ranks > 1 and not is_joined() else ()
    report = Report(chosen, (*alone, *grids))
    for of_team in filter(None, (alone, grids)):
        setting = Setting(chosen.contract, function, chosen.backend, of_team, chosen.dtype, chosen.forward_only)
        team = Joined(setting, chosen.timeout) if is_joined() else Team(setting, chosen.timeout)
        try:
            team.start()
            _run_all(report, contract, paths, team, tolerance)
            report.unasked = _unasked(report, getattr(contract, "NEEDS", ()), team.parameters)
            team.code = 0 if report.passed else 1
        finally:
            team.stop()
    return report


def _problems(contract: Any, path: Path, options: Options) -> list[Problem]:
    """The cases of a file. Damaged: it has no answers, or they do not fit it."""
    try:
        return list(contract.problems(path.name if hasattr(contract, "CASES") else path, options))
    except (LeftOut, OSError):
        raise
    except Exception as error:  # a file may hold anything
        text = str(error.args[0] if isinstance(error, KeyError) else error)
        if str(path) not in text:
            text = f"{path}: {'it lacks ' if isinstance(error, KeyError) else ''}{text}"
        raise reading.Damaged(text) from error


def _run_all(report: Report, contract: Any, paths: list[Path], team: Any, tolerance: Tolerance) -> None:
    """Adds the verdicts of all cases on all grids; a rank that hangs ends it."""
    ended = ""
    for grid, path in itertools.product(team.setting.grids, paths):
        if ended:
            report.verdicts.append(Verdict(path.stem, "left out", note=f"not run after {ended}", grid=str(grid)))
            continue
        try:
            problems = _problems(contract, path, replace(report.options, dp=grid.dp, cp=grid.cp, tp=grid.tp))
        except LeftOut as error:
            report.verdicts.append(Verdict(path.stem, "left out", note=str(error), grid=str(grid)))
            continue
        for problem in problems:
            verdict = one(problem, team.run(problem.pieces, problem.needs, grid), tolerance)
            verdict.grid, verdict.needs = str(grid), tuple(problem.needs)
            report.verdicts.append(verdict)
            if team.is_over or any(f.kind == "hang" for f in verdict.findings):
                ended = problem.name
                break


def _unasked(report: Report, needs: Sequence[str], parameters: set[str] | None) -> list[str]:
    """Parameters that a function takes (None: any) and that cases may need, but none did that was compared."""
    asked = {name for verdict in report.compared for name in verdict.needs}
    return [name for name in needs if name not in asked and (parameters is None or name in parameters)]


def one(problem: Problem, outcomes: list[tuple[Any, ...]], tolerance: Tolerance) -> Verdict:
    """The verdict of what the ranks answered."""
    by_status: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        by_status.setdefault(outcome[0], []).append(rank)
    verdict = Verdict(problem.name, err_over_tol=math.nan)
    if "died" in by_status:
        mine = by_status["died"]
        return verdict.fail(*(Finding("dead-rank", f"rank {r} died: {ending(outcomes[r][1])}", (), (r,)) for r in mine))
    for status in ("raised", "malformed"):
        texts: dict[tuple[str, str], list[int]] = {}
        for rank in by_status.get(status, ()):
            kind, text = ("raised", outcomes[rank][1]) if status == "raised" else outcomes[rank][1:]
            texts.setdefault((kind, text), []).append(rank)
        if texts:
            return verdict.fail(*(Finding(k, f"{_ranks(r)}: {text}", (), tuple(r)) for (k, text), r in texts.items()))
    if "hangs" in by_status:
        mine = by_status["hangs"]
        who = (
            "no rank answers"
            if len(mine) == len(outcomes) and len(mine) > 1
            else f"{_ranks(mine)} hang{'s' * (len(mine) == 1)}"
        )
        return verdict.fail(Finding("hang", f"{who}: no answer within {outcomes[mine[0]][1]:g} s", (), tuple(mine)))
    for status in ("left out", "refused"):
        mine = by_status.get(status, [])
        if len(mine) == len(outcomes):
            front = "refused: " if status == "refused" else ""
            return Verdict(problem.name, "left out", note=front + outcomes[0][1])
        if mine:
            return verdict.fail(
                Finding("raised", f"{_ranks(mine)} alone refused: {outcomes[mine[0]][1]}", (), tuple(mine))
            )
    arrays = [outcome[1] for outcome in outcomes]
    every = set().union(*arrays)
    for rank, mine in enumerate(arrays):
        if missing := ", ".join(sorted(every - mine.keys())):
            text = f"rank {rank} returned no {missing}; another rank did"
            return verdict.fail(Finding("ranks-disagree", text, (), (rank,)))
    try:
        verdict = problem.judge(arrays, tolerance)
    except Exception as error:  # what was returned may be anything: the other cases go on
        return verdict.fail(Finding("values", f"it cannot be compared: {type(error).__name__}: {error}"))
    lacking = [rank for rank, outcome in enumerate(outcomes) if outcome[2]]
    if verdict.status == "passed" and lacking:
        verdict.fail(Finding("no-gradient", f"{_ranks(lacking)} returned nothing that has a gradient; {WITHOUT}"))
    return verdict


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


__all__ = ["Options", "Report", "Unable", "Usage", "conform"]
