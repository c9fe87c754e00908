#!/usr/bin/env python3
"""Planted errors x golden cases, which of them find each error: planted_table.py [--all] [NAME ...]

Errors are functions for the contracts of gyre conform; planted_*.py have them. The ranks of a run are threads of this
process, and the verdict is that of gyre conform. NAME: a pattern of the names of errors. --all names all cases that find an
error, not three. Exit code 1: no case finds some error, or one finds fault with a right function.
"""

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import pathlib
import queue
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "inputs" / "golden"
sys.path[:0] = [str(ROOT / place) for place in ("python", "python/examples", "tests/support")]

import numpy as np  # noqa: E402

from gyre import reading  # noqa: E402
from gyre.distributed import contract, contracts, rank, rounding  # noqa: E402
from gyre.distributed.conform import WIDE, Options, files_of, one, tolerance_of  # noqa: E402
from gyre.distributed.group import Group, PeerGone  # noqa: E402

MODULES = ("planted_errors", "planted_attention", "planted_rows", "planted_streams", "planted_ranks", "planted_steps", "planted_norms", "planted_losses",
           "planted_places", "planted_kl", "planted_recurrence")
# Contracts of ranks that have other tokens.
CP = ("attention", "recurrence", "model", "shard", "labels", "unshard", "relayout", "bshd_shard", "head_exchange", "slice")
LARGE = 1 << 16  # bytes of a file: asked where no smaller one finds the error
WAIT_S = 0.1
UNEXPLAINED = contract.Finding("values", "")
EXPLAIN = contract.explain
reading.read, reading.kind_of = functools.cache(reading.read), functools.cache(reading.kind_of)
contract.checked_file = functools.cache(contract.checked_file)  # before modules of contracts import it


class Boxes:
    """What ranks have sent one another, by group, sender and receiver."""

    def __init__(self):
        self.boxes, self.is_over, self.lock = collections.defaultdict(queue.SimpleQueue), False, threading.Lock()

    def box(self, *key):
        with self.lock:
            return self.boxes[key]


class Wires:
    """One rank's view of them, in the place of connections with other processes."""

    def __init__(self, boxes, me):
        self.boxes, self.me = boxes, me

    def send(self, tag, peer, array):
        self.boxes.box(tag, self.me, peer).put(np.array(array))

    def receive(self, tag, peer):
        box = self.boxes.box(tag, peer, self.me)
        while True:
            try:
                return box.get(timeout=WAIT_S)
            except queue.Empty:
                if self.boxes.is_over:
                    raise PeerGone(f"rank {peer} has ended") from None


class NarrowHere(rank.Here):
    """A rank whose arrays are numbers of bfloat16, in float32."""

    def array(self, values):
        return rounding.in_type(np.array(values, np.float32), "bfloat16")

    leaf = array


def options_of(bug):
    """How an error is run: by default on two ranks that share what the contract is about."""
    chosen = {name: value for name, value in bug.options.items() if name not in ("case", "timeout")}
    ranks = chosen.pop("ranks", 2)
    if not {"cp", "tp", "dp"} & set(chosen):
        chosen["cp" if bug.contract in CP else "tp"] = ranks
    chosen = {"dp": 1, "cp": 1, "tp": 1, "convention": getattr(contracts.named(bug.contract), "CONVENTIONS", ("",))[0]} | chosen
    return Options("planted:errors", bug.contract, chosen["dp"] * chosen["cp"] * chosen["tp"], backend="numpy", **chosen)


@functools.lru_cache(maxsize=None)
def problems_of(options, large):
    """(file, its problems) of the golden files of a contract's kind that are large, or that are not."""
    found, of = [], contracts.named(options.contract)
    if hasattr(of, "CASES"):
        return [] if large else [(case, list(of.problems(case, options))) for case in of.CASES]
    for path in files_of([str(GOLDEN)], of.KIND, "*"):
        with contextlib.suppress(contract.LeftOut):
            if (path.stat().st_size > LARGE) == large:
                found.append((path.stem, list(of.problems(path, options))))
    return found


def all_problems(options, large):
    """(options, case, problems), of a contract that compares runs those of one rank before."""
    if not hasattr(contracts.named(options.contract), "FROM_ONE_RANK"):
        return [(options, *case) for case in problems_of(options, large)]
    grids = [dataclasses.replace(options, ranks=1, dp=1, cp=1, tp=1), options]
    # The problems are made anew: they remember what runs before them returned.
    return [(on, f"{name} on {on.ranks}", problems) for on in grids for name, problems in problems_of.__wrapped__(on, large)]


def answers(function, options, problem):
    """The outcome of a problem on each rank."""
    grid, boxes, found = rank.Grid(options.dp, options.cp, options.tp), Boxes(), [None] * options.ranks
    kind = NarrowHere if options.dtype == "bfloat16" else rank.Here

    def work(me):
        groups = {name: Group(Wires(boxes, me), f"{name} {members[0]}", members, me) for name, members in grid.groups(me).items()}
        here = kind(me, grid, options.dtype, groups)
        with np.errstate(all="ignore"):
            found[me] = rank.answer(contracts.named(options.contract), function, problem.pieces[me], problem.needs, here)
        boxes.is_over |= found[me][0] != "done"

    threads = [threading.Thread(target=work, args=(me,)) for me in range(options.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def outcomes_of(bug, options, problem):
    """The outcome on each rank. AssertionError: the function raised, and that is not its error."""
    found = answers(bug.function, options, problem)
    for outcome in found:
        if outcome[0] in ("raised", "malformed") and not bug.raises:
            raise AssertionError(f"{bug.name}: {problem.name}: {outcome[1:]}")
    return found


def verdicts(bug, first=False, large=False):
    """case -> kinds of what is found, of the cases that the function takes; first: up to one that finds the error.

    Without a kind that is asked for, that something differs is enough.
    """
    options, found = options_of(bug), {}
    contract.explain = EXPLAIN if bug.kind else lambda *_: [UNEXPLAINED]
    usual = tolerance_of(contracts.named(bug.contract), options.dtype)
    tolerance = contract.Tolerance(usual, usual, WIDE if options.dtype == "bfloat16" else np.inf)
    for on, name, problems in all_problems(options, large):
        mine = [one(problem, outcomes_of(bug, on, problem), tolerance) for problem in problems]
        compared = [v for v in mine if v.status == "failed" or v.status == "passed" and v.values]
        if compared:
            found[name] = [f.kind for v in compared for f in v.findings]
            if first and found[name]:
                break
    return found if large or any(found.values()) and bug.origin else found | verdicts(bug, first, True)


def bugs_and_right():
    """The errors, and the right functions that they are variants of."""
    modules = [importlib.import_module(name) for name in MODULES]
    return [bug for m in modules for bug in m.BUGS], [bug for m in modules for bug in m.RIGHT]


def is_named(bug, found):
    """Whether the cases that find an error call it by its name, more often than by any other."""
    kinds = collections.Counter(case[0] for case in found.values() if case and case[0] != "values")
    return bug.kind != "values" and bool(kinds) and kinds.most_common(1)[0][0] == bug.kind


def row(bug, found, most):
    """A line of the table."""
    names = [name for name, is_found in found.items() if is_found]
    if bug.kind and not is_named(bug, found):
        kinds = {name: ", ".join(dict.fromkeys(kind for kind in found[name] if kind != "values")) for name in names}
        names = [f"{name} ({kinds[name]})" if kinds[name] else name for name in names]
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    said = "" if not bug.kind else f"named {bug.kind}; " if is_named(bug, found) else "not named; "
    return f"{bug.contract:<14}  {len(names):>3} of {len(found):>3}  {bug.name}: {bug.origin}\n{'':<28}{said}{shown or 'NONE'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=["*"])
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    bugs, right = bugs_and_right()
    bugs = [bug for bug in bugs if any(fnmatch.fnmatch(bug.name, name) for name in options.names)]
    table = {}
    for bug in bugs:
        table[bug] = verdicts(bug)
        print(row(bug, table[bug], sys.maxsize if options.all else 3), flush=True)
    missed = [f"{bug.contract} {bug.name}" for bug, found in table.items() if not any(found.values())]
    wrong = [f"{bug.contract} {bug.name}: {name}" for bug in right for name, is_found in verdicts(bug).items() if is_found]
    cases = {name for found in table.values() for name, is_found in found.items() if is_found}
    print(f"{len(bugs)} errors, {len(missed)} found by no case: {', '.join(missed) or '-'}; {len(cases)} cases find one or more")
    asked = [bug for bug in bugs if bug.kind]
    named = [bug for bug in asked if is_named(bug, table[bug])]
    others = [b.name for b in asked if b not in named and any(k != "values" for c in table[b].values() for k in c)]
    print(f"{len(named)} of {len(asked)} errors that have a name are named; called otherwise in some case: {', '.join(others) or '-'}")
    for name in contracts.NAMES:
        mine = [b for b in bugs if b.contract == name]
        counts = [sum(b in some for b in mine) for some in (asked, named)]
        if mine:
            found = sum(any(table[b].values()) for b in mine)
            print(f"{name:<16}  {len(mine):>3} errors, {found:>3} found; {counts[0]:>3} asked for a name, {counts[1]:>3} named")
    print(f"{len(right)} right functions, fault found with: {', '.join(wrong) or '-'}")
    sys.exit(1 if missed or wrong or not bugs else 0)


if __name__ == "__main__":
    main()
