#!/usr/bin/env python3
"""Writes how far predictions are from published figures into machine files: errors.py MACHINE.toml... [--check]

From results/prediction/published.csv, which published.py makes, each MACHINE.toml (inputs/machines) gets

    model.order_margin   the least share by which one of two predictions must be longer so that, of all published pairs of
                         one problem and machine that are predicted to be so far apart, 9 in 10 are in the predicted order
    [[model.errors]]     for a pass, and one rank or several: the share of a predicted time that bounds the error of a further
                         figure 9 times in 10: of n errors, the ceil(0.9 (n + 1))-th in size (split conformal prediction)

Both are of what gyre-predict says, without the copies that published.py adds for the code of a source.

9 errors are the fewest that have such a bound. A group with fewer takes more figures: of both numbers of ranks, then of both
passes; where nothing was published of several ranks, those of the machine in KIN. Figures of both passes together
count as backward. Figures of head dimensions that a file has no kernel of are left out.

--check writes nothing; exit code 1 if a file would change.
"""

import argparse
import collections
import csv
import itertools
import math
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = "results/prediction/published.csv"
FEWEST, COVERED = 9, 0.9
KIN = {"h200": ("h100", "links of one kind")}


def gpu_of(row):
    return re.split("[- ]", row["gpu"])[0].lower()


def figures():
    with open(ROOT / RECORD, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def group_of(row):
    """Pass and ranks, as machine files name them."""
    return "fwd" if row["pass"] == "fwd" else "bwd", "one" if row["gpus"] == "1" else "several"


def without_copies_ms(row):
    """What gyre-predict says: without the copies that only the source's code makes."""
    return float(row["predicted_ms"]) - float(row["copied_ms"])


def error_size(row):
    """What the published time differs from gyre-predict's, as a share of the latter, rounded to tenths of a per cent."""
    return round(abs(float(row["published_ms"]) / without_copies_ms(row) - 1), 3)


def bound(rows):
    """The share, or nothing if there are too few rows."""
    sizes = sorted(map(error_size, rows))
    place = math.ceil(COVERED * (len(sizes) + 1))
    return sizes[place - 1] if len(sizes) >= FEWEST and place <= len(sizes) else None


def error_of(rows, gpu, direction, ranks):
    """(share, of which figures), or nothing."""
    own = [row for row in rows if gpu_of(row) == gpu]
    if ranks == "several" and gpu in KIN and not any(group_of(row)[1] == ranks for row in own):
        kin, reason = KIN[gpu]
        found = error_of(rows, kin, direction, ranks)
        return found and (found[0], f"{found[1]}: {reason}")
    groups = [([row for row in own if group_of(row) == (direction, ranks)], f"{direction}, {ranks} rank{'s' * (ranks != 'one')}"),
              ([row for row in own if group_of(row)[0] == direction], f"{direction}, any ranks"), (own, "all")]
    for chosen, name in groups:
        if (share := bound(chosen)) is not None:
            return share, f"{len(chosen)} figures of {gpu.upper()}, {name}"
    return None


def pairs_of(rows):
    """(GPU, predicted margin, whether the order is right) of each two figures of one problem."""
    problems = collections.defaultdict(list)
    for row in rows:
        place = row["source"].split(":")[0] if ", bar" in row["source"] else row["source"]
        problem = [row[k] for k in ("gpus", "tokens", "heads", "kv_heads", "head_dim", "mask", "pass", "machine")]
        problems[(gpu_of(row), place, *problem)].append((without_copies_ms(row), float(row["published_ms"])))
    for (gpu, *_), times in problems.items():
        for (a, c), (b, d) in itertools.combinations(times, 2):
            if a != b:
                yield gpu, max(a, b) / min(a, b) - 1, (a < b) == (c < d)


def order_margin(rows, gpu):
    """(share, of which pairs): of this GPU, or of all if it has too few."""
    pairs = list(pairs_of(rows))
    own = [(margin, right) for of, margin, right in pairs if of == gpu]
    chosen, name = (own, gpu.upper()) if len(own) >= FEWEST else ([pair[1:] for pair in pairs], "all GPUs")
    margins = sorted(margin for margin, _ in chosen)
    margins.append(margins[-1] + 0.001)  # no pair is so far apart, and none is wrong
    beyond = {margin: [right for other, right in chosen if other >= margin] for margin in margins}
    least = next(margin for margin in margins if sum(beyond[margin]) >= COVERED * len(beyond[margin]))
    return math.ceil(1000 * least) / 1000, f"{len(chosen)} pairs of {name}, {len(beyond[least])} so far apart"


def with_errors(text, gpu, rows):
    """The machine file's text with the figures of its GPU."""
    heads = {str(kernel["head_dim"]) for kernel in tomllib.loads(text)["model"]["kernels"]}
    rows = [row for row in rows if row["head_dim"] in heads]
    text = re.sub(r'(?m)^(order_margin|error) = .*\n', "", text)
    text = re.sub(r'(?m)^\[\[model\.errors\]\]\n(?:.+\n)*\n?', "", text)
    known = {group: error_of(rows, gpu, *group) for group in itertools.product(("fwd", "bwd"), ("one", "several"))}
    if not any(known.values()):
        return text
    margin, of = order_margin(rows, gpu)
    line = f'order_margin = {{ value = {margin:g}, source = "{RECORD}: {of}" }}\n'
    head, links = re.sub("(?m)^copy_bytes_per_s = .*\n", lambda found: found[0] + line, text).split("[[model.links]]\n", 1)
    for (direction, ranks), (share, of) in ((group, found) for group, found in known.items() if found):
        head += (f'[[model.errors]]\npass = "{direction}"\nranks = "{ranks}"\n'
                 f'share = {{ value = {share:g}, source = "{RECORD}: {of}" }}\n\n')
    return f"{head}[[model.links]]\n{links}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="+", type=pathlib.Path, metavar="MACHINE.toml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    options = parser.parse_args()
    rows, changed = figures(), []
    for path in options.machines:
        text = path.read_text(encoding="utf-8")
        new = with_errors(text, path.stem.split("-")[0], rows)
        if new != text:
            changed.append(path)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    for path in changed:
        print(f"{path}: {'would change' if options.check else 'written'}")
    sys.exit(1 if options.check and changed else 0)


if __name__ == "__main__":
    main()
