"""Errors as a user reads them: file, key, value, and the nearest valid one."""

import difflib
from collections.abc import Iterable

USAGE, RUNTIME = 2, 3  # exit codes, as the programs have them


class StudyError(Exception):
    """What is wrong, one message a line. `code`: the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def nearest(word: str, words: Iterable[str]) -> str:
    """The most similar of the words; there is one at least."""
    return difflib.get_close_matches(word, sorted(words), 1, 0)[0]


def refuse_unknown(file: str, table: str, keys: Iterable[str], known: Iterable[str]) -> list[str]:
    """A message for each key that is not known. `table`: where the keys stand, or ""."""
    place = f"{table}." if table else ""
    known = list(known)
    return [
        f"{file}: {place}{key}: unknown key; nearest: {place}{nearest(key, known)}"
        for key in keys
        if key not in known
    ]


def raise_all(messages: list[str]) -> None:
    if messages:
        raise StudyError("\n".join(messages))
