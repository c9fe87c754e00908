"""What the cases of log-probabilities of inputs/golden/ are made with: random logits and ids, and
the list of cases.

A problem is a mapping as in golden_answers.py. Logits are multiples of 1/8: bfloat16, float16 and
float32 hold them exactly. Shapes: T = tokens, V = vocabulary, K = ids of a token.
"""

import functools

import numpy as np

import golden_answers
import golden_files

CASES = []


def case(edge, guards, tags, **options):
    """Adds the problem that a function returns, given a random generator; its name is the file's.

    Options: `stores` maps names of arrays to types that they are stored in; `leave_out` names
    answers that are not there; `answers_as` is the type of reals in the answers.
    """

    def add(make):
        name = "logprobs_" + make.__name__
        write = functools.partial(write_problem, name=name, make=make, **options)
        command = f"gyre-logprobs --input inputs/golden/{name}.h5 -n 1"
        CASES.append(golden_files.Case(name, "logprobs", edge, guards, write, (command,), tags))
        return make

    return add


def write_problem(path, name, make, stores=None, leave_out=(), answers_as=None, answers=None):
    """Writes a gyre/logprobs file with its answers: all, or those of answers(problem)."""
    problem = make(golden_files.generator(name))
    found = answers(problem) if answers else golden_answers.answer(problem, leave_out)

    def fill(file):
        group = file.create_group("logprobs")
        arrays = {}
        for key, value in problem.items():
            if isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                group.attrs[key] = np.int64(value) if isinstance(value, int) else np.float64(value)
        golden_files.put_all(group, arrays, stores)
        group = golden_files.reference_group(file)
        for key, value in found.items():
            real = value.dtype.kind == "f" and answers_as
            golden_files.put(group, key, value.astype(answers_as) if real else value)

    golden_files.write_case(path, "logprobs", fill)


def eighths(rng, *shape, size=2.0):
    """float32: about normal numbers of this size, rounded to multiples of 1/8."""
    return (np.clip(np.round(8 * size * rng.standard_normal(shape)), -256, 256) / 8).astype("f4")


def distinct(rng, tokens, vocab):
    """[T, V] float32: the same different multiples of 1/8 in every row, in another order."""
    row = (np.arange(vocab) - vocab // 2) / 8
    return np.array([rng.permutation(row) for _ in range(tokens)], "f4").reshape(tokens, vocab)


def ids_below(rng, vocab, *shape):
    """int32 ids of the vocabulary."""
    return rng.integers(0, vocab, shape).astype(np.int32)


def different_ids(rng, tokens, vocab, picks):
    """[T, K] int32 ids of the vocabulary, different ones in a row as far as there are."""
    rows = [np.resize(rng.permutation(vocab), picks) for _ in range(tokens)]
    return np.array(rows, np.int32).reshape(tokens, picks)


def full(rng, tokens, vocab, picks, **more):
    """A problem with every input but hidden states; `more` adds to it and replaces parts of it."""
    return {
        "vocab_size": vocab,
        "logits": distinct(rng, tokens, vocab),
        "targets": ids_below(rng, vocab, tokens),
        "d_value": eighths(rng, tokens, size=1.0),
        "ids": different_ids(rng, tokens, vocab, picks),
        "teacher": eighths(rng, tokens, vocab),
    } | more


def offsets(*lengths):
    """int64 [n + 1] of sequences of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
