#!/usr/bin/env python3
"""Compares records that were made again with those in results/: check_records.py RESULTS AGAIN

Every file below the folder AGAIN must be in RESULTS and say the same. Documents of gyre-result/1 have the recorded rows, of
predictions no others, with the recorded columns, but for what a clock or another processor changes: times, and rounding
errors. Other files are the same in every byte. Numbers may differ by 1e-9 of their size.
"""

import json
import math
import pathlib
import sys

# Columns that differ from run to run. Of predictions none does.
MEASURED = set("time min p95 cv reps rate of_bw of_peak planning finished flop_rate share_of_limit exposed overlap imbal imb_time "
               "compute_only communication_only exposed_time exposed_noise err_over_tol".split())


def same(old, new):
    if isinstance(old, float) and isinstance(new, (int, float)):
        return math.isclose(old, new, rel_tol=1e-9)
    return old == new


def differences(name, old, new):
    """Where two documents say different things."""
    was, now = ({json.dumps(row["key"]): row for row in document["results"]} for document in (old, new))
    for key in was.keys() - now.keys():
        yield f"{name}: the row {key} is recorded, and is made no more"
    for key in now.keys() - was.keys():  # of predictions, what is the fastest depends on all
        if "predicted, not measured" in now[key]["status"]["reasons"]:
            yield f"{name}: the row {key} is not recorded"
    for key in [key for key in was if key in now]:
        predicted = "predicted, not measured" in was[key]["status"]["reasons"]
        left_out = set() if predicted else MEASURED
        for column, value in was[key]["measurements"].items():
            again = now[key]["measurements"].get(column)
            if column not in left_out and not same(value, again):
                yield f"{name} {key} {column}: recorded {value}, now {again}"


def faults(results, again):
    found = [path.relative_to(again) for path in sorted(again.rglob("*")) if path.is_file()]
    if not found:
        yield f"{again}: no record was made"
    for name in found:
        old = results / name
        if not old.exists():
            yield f"{name}: is not recorded"
        elif name.suffix == ".json":
            yield from differences(name, *(json.loads(path.read_text(encoding="utf-8")) for path in (old, again / name)))
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
