"""Files that bring their answers, one of which is wrong: a run that verifies against it must notice, for fuzz.py.

Among them are close calls: rows whose kept mass comes to within rounding of top_p, equal values, answers of -inf.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import h5py
import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "inputs"))
import gyre_files  # noqa: E402
import make_logprobs  # noqa: E402

SECONDS = 60
ENDS = {0: "accepted", 1: "refused", 2: "refused", 3: "refused", 4: "timeout"}
LOGPROBS = ("logprobs", "--op", "all", "-n", "1", "-w", "0", "--pass", "both")
RECURRENCE = ("recurrence", "--schedule", "state-gather", "-n", "1", "-w", "0")
ATTENTION = ("attention", "--schedule", "ring", "-n", "1", "-w", "0", "--pass", "both")


def write_close_calls(path, ties):
    """Rows of the same logits in other orders, and a top_p that a sum of their probabilities misses by less than 5e-6.

    With `ties`, logits are halves, and the sum ends in the midst of equal ones.
    """
    problem, rng = make_logprobs.golden_problem(), numpy.random.default_rng(7)
    vocab, logits = problem["vocab_size"], problem["logits"]
    row = rng.standard_normal(vocab) * 2
    if ties:
        row = numpy.round(row) / 2
    for t in range(len(logits)):
        logits[t, :vocab] = rng.permutation(row)
    sums = numpy.cumsum(-numpy.sort(-numpy.exp(make_logprobs.log_softmax(row.astype(numpy.float32).astype(float)))))
    last = numpy.searchsorted(sums, 0.9)
    while ties and numpy.sort(-row)[last] != numpy.sort(-row)[last + 1]:
        last += 1
    problem.update(top_k=0, top_p=float(sums[last] + 2e-6), temperature=1.0)
    make_logprobs.NEGLIGIBLE = 0
    with numpy.errstate(divide="ignore"):
        make_logprobs.write_logprobs(str(path), problem, make_logprobs.answer(problem))


def files(source, seeds):
    """[(file, program and options, how the file is given)]"""
    inputs = source / "inputs"
    model = ("pipeline", "--model", str(inputs / "model_tiny.h5"), "-n", "1")
    return [(seeds / "close_calls.h5", LOGPROBS), (seeds / "close_ties.h5", LOGPROBS),
            (inputs / "logprobs_ties.h5", LOGPROBS), (inputs / "logprobs_golden.h5", LOGPROBS),
            (inputs / "golden/attention_sinks_extreme.h5", ATTENTION), (inputs / "attention_window.h5", ATTENTION),
            (inputs / "golden/recurrence_documents.h5", RECURRENCE), (inputs / "docs_tiny.h5", model)]


def padding(file, name, at):
    """Whether nobody reads this place: behind the last prediction of a sequence."""
    if not re.fullmatch(r"next_token_.*", name):
        return False
    lengths = numpy.diff(file["/logprobs/offsets"][()])
    return at[1] >= lengths[at[0]] - 1


def spoil(file, rng):
    """Changes one answer by more than any tolerance; what was done."""
    group = file["reference"]
    names = [n for n in group if isinstance(group[n], h5py.Dataset) and group[n].size and n != "offsets"]
    while True:
        name = rng.choice(names)
        data = group[name]
        at = tuple(rng.randrange(n) for n in data.shape)
        old = data[at]
        if data.dtype.kind == "f":
            new = rng.choice([old + 1, old - 1, 2 * old + 1, numpy.nan, numpy.inf, -numpy.inf, 0.0, old + 0.01])
            same = new == old or numpy.isfinite(new) and numpy.isfinite(old) and abs(new - old) < 0.01
        else:
            new = rng.randrange(file["/logprobs"].attrs["vocab_size"])
            logits = file["/logprobs/logits"][at[0]]
            same = logits[new] == logits[old]  # another of equal values is right, too
        if not same and not padding(file, name, at):
            data[at] = new
            return f"/reference/{name}{list(at)} is {new}, not {old}"


def run_case(site, folder, rng):
    """(end, what was run)"""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    seed, words = rng.choice(site["answered"])
    path = folder / seed.name
    shutil.copy(seed, path)
    right = rng.random() < 0.05
    with h5py.File(path, "r+") as file:
        done = "as it is" if right else spoil(file, rng)
    gyre_files.record_content(path)
    command = [str(site["apps"] / f"gyre-{words[0]}"), *words[1:], "--input", str(path)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)
        end = ENDS.get(ended.returncode, "signal")
        if end in ("accepted", "refused") and right != (end == "accepted"):
            end = "wrong"
        words = f"exit {ended.returncode}"
    except subprocess.TimeoutExpired:
        end, words = "hang", "it did not end"
    shutil.rmtree(folder)
    return end, f"{seed.name}, {done}: {shlex.join(command)}: {words}"
