#!/usr/bin/env python3
"""Compares records that were made again with those in results/: check_records.py RESULTS AGAIN

Every file below the folder AGAIN must be in RESULTS and say the same: documents of gyre-result/1 in their configuration, and in key,
measurements and figures of every row, but for times and what follows from them; other files in every byte. Numbers may differ
by 1e-9 of their size.
"""

import json
import math
import pathlib
import sys

# Columns of what is measured: they differ from run to run. Of predictions none is left out.
MEASURED = {"time", "min", "p95", "cv", "reps", "rate", "of_bw", "planning", "finished", "flop_rate", "share_of_limit"}


def differences(place, old, new, left_out=()):
    """Places where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in left_out:
                yield from differences(f"{place}.{key}", old.get(key), new.get(key), left_out)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new)):
            yield from differences(f"{place}[{i}]", *pair, left_out)
    elif isinstance(old, float) and isinstance(new, (int, float)) and math.isclose(old, new, rel_tol=1e-9):
        pass
    elif old != new:
        yield f"{place}: recorded {json.dumps(old)}, now {json.dumps(new)}"


def what_it_says(path):
    """Of a document of gyre-result/1, what must be the same again."""
    document = json.loads(path.read_text(encoding="utf-8"))
    predicted = all(not row["status"]["reasons"] or "predicted, not measured" in row["status"]["reasons"]
                    for row in document["results"])
    rows = [{"key": row["key"], **{"measurements": row["measurements"], "model": row["model"]}} for row in document["results"]]
    return {"configuration": document["configuration"], "rows": rows}, () if predicted else MEASURED


def faults(results, again):
    found = [path.relative_to(again) for path in sorted(again.rglob("*")) if path.is_file()]
    if not found:
        yield f"{again}: no record was made"
    for name in found:
        old = results / name
        if not old.exists():
            yield f"{name}: is not recorded"
        elif name.suffix == ".json":
            (was, left_out), (now, _) = what_it_says(old), what_it_says(again / name)
            yield from differences(str(name), was, now, left_out)
        elif old.read_bytes() != (again / name).read_bytes():
            lines = zip(old.read_text().splitlines(), (again / name).read_text().splitlines())
            number, (was, now) = next(((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1]), (0, ("", "")))
            yield f"{name}:{number}: recorded '{was[:160]}', now '{now[:160]}'"


def main():
    results, again = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
    found = list(faults(results, again))
    print("\n".join(found[:20]))
    if len(found) > 20:
        print(f"... and {len(found) - 20} more")
    if found:
        print("records: the program says something else than results/ (results/record.sh makes them again)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
