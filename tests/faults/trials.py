"""One trial: a run, a fault, and what is made of it."""

import os
import re
import signal
import subprocess
import time

import runs

MESSAGE_FAULTS = ("corrupt", "truncate", "drop", "delay", "fail", "memory")
# One rank finds these: it ends all ranks, and waits for nobody. In HDF5's collective calls the others may wait for it.
AT_ONCE = ("corrupt", "truncate", "fail", "memory")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
NOTICED, HARMLESS, MISSED, HANG, IDLE, UNSEEN = "noticed", "harmless", "missed", "hang", "not struck", "unseen"
# Functions of gyre-attention whose messages nobody looks at: warm-up without checks, communication timed alone.
HDF5 = re.compile(r"\bh5::")
IGNORED = re.compile(r"\b(Measurement::warm_up|AttentionCase::run_parts)\b")
# A report must tell where the run was: its step, or one of those that have none.
STEP = re.compile(r"step '|start-?up|MPI_Init|before the run|finali[sz]e|at the end of the program|end of MPI", re.I)
MARGIN = 5  # seconds that a run may take to end, after the timeout


class Verdict:
    """What a trial showed."""

    def __init__(self, kind, why="", left=()):
        self.kind, self.why, self.left, self.said = kind, why, list(left), ""


def judge_message(fault, outcome, clean, unseen, in_hdf5=False):
    """`unseen`: what was struck where nothing may pass unseen, or ''. `in_hdf5`: it was struck there."""
    if outcome.code is None:
        return Verdict(HANG, "did not end")
    if fault == "delay" and outcome.code != 0:
        return Verdict(MISSED, f"false alarm: exit {outcome.code} after a delay shorter than the timeout")
    if outcome.code == 4 and fault in AT_ONCE and not in_hdf5:
        return Verdict(MISSED, "exit 4: a rank waited for another that had failed")
    if outcome.code in (1, 3, 4):
        return Verdict(NOTICED, f"exit {outcome.code}")
    if outcome.code != 0 or fault == "fail":
        return Verdict(MISSED, f"exit {outcome.code}")
    if difference := outcome.difference(clean):
        return Verdict(MISSED, f"exit 0, but {difference}")
    if unseen and fault in ("corrupt", "truncate"):
        return Verdict(UNSEEN, f"exit 0: unseen where times are taken, {unseen}")
    return Verdict(HARMLESS)


def judge_signal(outcome, clean, rank):
    """`rank` was signalled; None: the run was over."""
    if outcome.code is None:
        return Verdict(HANG, "did not end")
    if outcome.code == 0:
        difference = outcome.difference(clean)
        return Verdict(MISSED, f"exit 0, but {difference}") if difference else Verdict(HARMLESS)
    if outcome.code not in (3, 4):
        return Verdict(MISSED, f"exit {outcome.code}")
    lines = [line for line in outcome.text.splitlines() if re.search(rf"\brank {rank}\b", line)]
    if not lines:
        return Verdict(MISSED, f"exit {outcome.code}, but no line names rank {rank}")
    if not STEP.search(outcome.text):
        return Verdict(MISSED, f"exit {outcome.code}, but no line tells the step")
    return Verdict(NOTICED, f"exit {outcome.code}")


def remains(folder, shared_before, spare=None):
    """What a run has left behind a moment after its end; ends it. `spare`: the process that the driver itself stopped."""
    def living():
        return [p for p in runs.processes_of(folder) if p.pid != spare]
    runs.wait_until(lambda: not living(), 3)  # the guard of shared memory looks for 2 s
    left = [f"process {p}" for p in living()]
    runs.end(runs.processes_of(folder))
    left += [f"file {p.name}" for p in sorted((folder / "out").iterdir()) if p.name not in ("out.h5", "out.invalid.h5", "out.json")]
    new = runs.shared_memory() - shared_before
    return left + [f"/dev/shm/{name}" for name in runs.unused(new)] if new else left


def await_end(process, seconds):
    """The exit code, or None."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def stop_run(process, folder):
    """Ends a run that does not end by itself; returns what its processes were doing."""
    state = "; ".join(str(p) for p in runs.processes_of(folder))
    runs.end(runs.processes_of(folder))
    process.kill()
    process.wait()
    return state


def finish(process, folder, seconds, shared, clean=None, spare=None):
    """Waits for the end: (outcome, what is left, state of a run that hangs)."""
    code = await_end(process, seconds)
    state = stop_run(process, folder) if code is None else ""
    left = remains(folder, shared, spare) if code is not None else []
    outcome = runs.Outcome(folder, code)
    if code != 0 and outcome.written and clean is not None and outcome.output != clean.output:
        left.append("an output file unlike that of a clean run")
    return outcome, left, state


class Baseline:
    """Clean runs of a program: how long they take, what they say, which messages they send."""

    def __init__(self, site, program, folder):
        outcomes, seconds = [], []
        for name, fault in (("clean-0", None), ("clean-1", None), ("counted", "count")):
            start = time.monotonic()
            process = site.launch(program, folder / name, fault)
            outcome, left, _ = finish(process, folder / name, 120, runs.shared_memory())
            seconds.append(time.monotonic() - start)
            if outcome.code != 0 or left:
                raise RuntimeError(f"a clean run ended with {outcome.code}, left {left}: {site.in_words(program)}\n"
                                   f"{outcome.text}")
            outcomes.append(outcome)
        self.seconds = min(seconds[:2])
        self.clean = outcomes[0]
        same = [o.figures for o in outcomes]
        self.clean.figures = {k: v for k, v in same[0].items() if all(f.get(k) == v for f in same[1:])}
        for outcome in outcomes[1:]:
            if difference := outcome.difference(self.clean):
                raise RuntimeError(f"clean runs differ: {site.in_words(program)}: {difference}")
        self.messages = {r: self.read_messages(folder / "counted" / "log" / f"rank.{r}") for r in range(runs.RANKS)}

    @staticmethod
    def read_messages(path):
        """[(call, bytes)] of a rank, in order."""
        lines = [line.split() for line in path.read_text().splitlines()]
        return [(call, int(size)) for _, call, size, *_ in lines]

    def draw_message(self, rng):
        """(rank, index): half of the draws favour messages of many bytes."""
        rank = rng.randrange(runs.RANKS)
        sizes = [size for _, size in self.messages[rank]]
        index = rng.choices(range(len(sizes)), weights=sizes if rng.random() < 0.5 else None)[0]
        return rank, index


def callers_of(site, program, offsets):
    """Names of the functions that sent a message, innermost first; none of the standard library's."""
    names = subprocess.run(["addr2line", "-f", "-C", "-e", str(site.program(program.name)), *offsets],
                           capture_output=True, text=True, check=False).stdout.splitlines()[::2]
    return [re.sub(r"\(anonymous namespace\)::", "", name).split("(")[0] for name in names if not name.startswith("std::")]


def what_was_struck(site, program, folder, rank):
    """(words, unseen, in_hdf5) of the message that was struck, or None."""
    path = folder / "log" / f"rank.{rank}"
    line = path.read_text().split() if path.exists() else []
    if len(line) < 4:
        return None
    names = callers_of(site, program, line[4:])
    words = f"{line[1]} of {line[2]} bytes from {' < '.join(names[1:7])}"
    timed = any("Measurement::timed_run" in name for name in names) and not any(map(IGNORED.search, names))
    return words, words if timed and int(line[2]) > 8 else "", any(map(HDF5.search, names))


def scrambled_is_noticed(site, program, baseline, folder, rank, index):
    """Whether the run notices when all bits of a message are flipped. A single one may be of padding, or of keys that its
    receiver's queries do not see: it reaches nothing, and nothing can notice it."""
    shared = runs.shared_memory()
    process = site.launch(program, folder, f"scramble rank={rank} message={index}")
    outcome, left, _ = finish(process, folder, baseline.seconds * 3 + site.timeout + MARGIN, shared)
    return outcome.code in (1, 3, 4) and not left


def message_trial(site, program, baseline, folder, fault, rng):
    """(fault in words, verdict)"""
    rank, index = baseline.draw_message(rng)
    words = f"{fault} rank={rank} message={index}"
    if fault == "corrupt":
        words += f" byte={rng.randrange(1 << 30)} bit={rng.randrange(8)}"
    elif fault == "delay":
        words += f" ms={rng.randrange(1, int(site.timeout * 500))}"
    shared = runs.shared_memory()
    process = site.launch(program, folder, words)
    seconds = baseline.seconds * 3 + site.timeout + MARGIN
    outcome, left, state = finish(process, folder, seconds, shared, baseline.clean)
    struck = what_was_struck(site, program, folder, rank)
    if struck is None and outcome.code == 0:
        return words, Verdict(IDLE)
    verdict = judge_message(fault, outcome, baseline.clean, *(struck[1:] if struck else ("",)))
    if verdict.kind == UNSEEN:
        noticed = scrambled_is_noticed(site, program, baseline, folder / "scrambled", rank, index)
        verdict.kind = HARMLESS if noticed else MISSED
    verdict.why += f" ({struck[0]})" if struck and verdict.kind not in (NOTICED, HARMLESS) and struck[1] == "" else ""
    verdict.why += f": {state}" if state else ""
    verdict.left, verdict.said = left, outcome.text
    return words, verdict


def draw_victim(process, folder, moment, start, rng, supervisors):
    """The process to signal at `moment` seconds after `start`, or at once when there is one; None when the run is over."""
    time.sleep(max(0, start + moment - time.monotonic()))
    while process.poll() is None:
        ranks, parents = runs.ranks_of(folder)
        candidates = sorted(ranks + (parents if supervisors else []), key=lambda p: p.pid)
        if candidates:
            victim = rng.choice(candidates)
            return victim, "parent of" if victim in parents else "rank"
        time.sleep(0.001)
    return None, ""


def signal_trial(site, program, baseline, folder, fault, rng, supervisors):
    """(fault in words, verdict)"""
    shared = runs.shared_memory()
    moment = rng.uniform(0, baseline.seconds)
    start = time.monotonic()
    process = site.launch(program, folder)
    victim, role = draw_victim(process, folder, moment, start, rng, supervisors)
    if victim is None:
        words = f"{fault} after {moment:.3f} s: the run was over"
    else:
        words = f"{fault} {role} {victim.rank} after {moment:.3f} s of {baseline.seconds:.3f}"
        try:
            os.kill(victim.pid, SIGNALS[fault])
        except ProcessLookupError:
            words += ": it was gone"
    spare = victim.pid if victim and fault == "stop" else None
    outcome, left, state = finish(process, folder, site.timeout + MARGIN, shared, baseline.clean, spare)
    verdict = judge_signal(outcome, baseline.clean, victim.rank if victim else None)
    verdict.why += f": {state}" if state else ""
    verdict.left, verdict.said = left, outcome.text
    return words, verdict


def check_judges():
    """The judges must be able to find fault: what each kind of ending is."""
    class Ended:  # pylint: disable=too-few-public-methods
        def __init__(self, code, text="", output="a", figures=None):
            self.code, self.text, self.output, self.figures = code, text, output, figures or {"fom/bits": 1}
        difference = runs.Outcome.difference
    clean, named = Ended(0), "rank 2 was killed\nrank 1: step 'forward'"
    assert judge_message("corrupt", Ended(0), clean, "").kind == HARMLESS
    assert judge_message("corrupt", Ended(0, output="b"), clean, "").kind == MISSED
    assert judge_message("corrupt", Ended(0, figures={"fom/bits": 2}), clean, "").kind == MISSED
    assert judge_message("corrupt", Ended(0), clean, "a tensor").kind == UNSEEN
    assert judge_message("drop", Ended(4), clean, "").kind == NOTICED
    assert judge_message("memory", Ended(3), clean, "").kind == NOTICED
    assert judge_message("memory", Ended(4), clean, "").kind == MISSED
    assert judge_message("corrupt", Ended(4), clean, "").kind == MISSED
    assert judge_message("corrupt", Ended(4), clean, "", True).kind == NOTICED
    assert judge_message("fail", Ended(0), clean, "").kind == MISSED
    assert judge_message("drop", Ended(139), clean, "").kind == MISSED
    assert judge_message("drop", Ended(None), clean, "").kind == HANG
    assert judge_message("delay", Ended(4), clean, "").kind == MISSED
    assert judge_signal(Ended(3, named), clean, 2).kind == NOTICED
    assert judge_signal(Ended(3, named), clean, 3).kind == MISSED
    assert judge_signal(Ended(3, "rank 2"), clean, 2).kind == MISSED
    assert judge_signal(Ended(9, named), clean, 2).kind == MISSED
    assert judge_signal(Ended(0, output="b"), clean, 2).kind == MISSED
    assert judge_signal(Ended(0), clean, 2).kind == HARMLESS
    assert judge_signal(Ended(None), clean, 2).kind == HANG
