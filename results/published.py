#!/usr/bin/env python3
"""Predicts what was published and measured, and says how far off it is: published.py APPS [--only TEXT] [-o FOLDER]

inputs/published/attention.csv has a row for each published figure; README.md beside it says what its columns mean. Every
row with a machine is predicted by APPS/gyre-predict, as it stands. FOLDER (results/prediction) gets

    published.csv   a row for each figure that was predicted: published and predicted time, what of the latter is copies of
                    the source's code, error, reason of a miss; and the naive time: FLOPs over the kernel's best rate, plus
                    the bytes that a rank sends over a link's
    published.txt   groups of them: how many, median error, how many within 10 and 20 %; what was left out, and why

inputs/published/copies.csv has what the code of a source copies beyond the plan that is predicted; it takes the machine's rate
of copies. An error is predicted time over published time, minus 1. One beyond 20 % (10 % if the source is in results/,
measured by this project) needs a reason, from inputs/published/reasons.csv, and a reason that explains nothing is an error. A
machine "NAME without TOKENS" is inputs/machines/NAME.toml whose surface of the head dimension lacks the length (surface.py).
Braces in options, as "lengths-{1,2}.txt", are as those of a shell: the mean of a prediction with each is held against the figure.
--only: sources that contain TEXT; nothing is written, rows are printed.
"""

import argparse
import collections
import csv
import json
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib

import surface

ROOT = pathlib.Path(__file__).resolve().parent.parent
INPUTS = ROOT / "inputs"
MISS, OWN_MISS = 20.0, 10.0  # %
MARGIN = 1.05  # of a winner
# Phases of a scoring pass, and their shares of the time.
PHASES = {"products, log-probs": ("linear", "head"), "attention": ("attn",), "norms, elementwise": ("elementwise",)}


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def flops(row):
    """Of the figures that are rates: they count S²/2 pairs under a causal mask, 4 d FLOPs each forward, 10 d backward."""
    pairs = int(row["tokens"]) ** 2 / (2 if row["mask"] == "causal" else 1)
    per_pair = {"fwd": 4, "bwd": 10, "both": 14}[row["pass"]] * int(row["head_dim"])
    return pairs * per_pair * int(row["heads"]) * int(row["batch"])


def published_ms(row):
    value = float(row["value"])
    if row["unit"] == "iter/s":
        return 1e3 / value
    if row["unit"] in ("TFLOP/s/GPU", "TFLOP/s"):
        return 1e3 * flops(row) / (value * 1e12 * int(row["gpus"]))
    if row["unit"] == "ms":
        return value
    sys.exit(f"published.py: record {row['record']}: unit '{row['unit']}'; wanted: iter/s, TFLOP/s/GPU, TFLOP/s or ms")


def is_own(row):
    return row["source"].startswith("results/")


def is_miss(row, error):
    return abs(error) > (OWN_MISS if is_own(row) else MISS)


def machine_of(row, folder):
    """The machine file."""
    name, _, without = row["machine"].partition(" without ")
    path = INPUTS / "machines" / f"{name}.toml"
    if not without:
        return path
    results, record = surface.results_of(ROOT / row["source"].split(":")[0], int(without))
    text = surface.with_rates(path.read_text(encoding="utf-8"), results, record, int(row["head_dim"]))
    (folder / path.name).write_text(text, encoding="utf-8")
    return folder / path.name


def predicts_of(row):
    """The options of each prediction: those of the row, with one choice of its braces."""
    before, _, braces = row["predict"].partition("{")
    choices, _, after = braces.partition("}")
    return [before + choice + after for choice in choices.split(",")]


def command_of(apps, row, predict, folder):
    # Each sequence of a batch is split over all ranks: it is as many more heads.
    def heads(name):
        return str(int(row["batch"]) * int(row[name]))

    options = shlex.split(predict)
    if "--model" not in options:
        options += ["--heads", heads("heads"), "--kv-heads", heads("kv_heads"), "--head-dim", row["head_dim"],
                    "--mask", row["mask"]]
    if "--gen" not in options:
        options += ["--tokens", row["tokens"]]
    passes = "fwd" if "--model" in options else "both"
    return [str(apps / "gyre-predict"), "--machine", str(machine_of(row, folder)), "--cp", row["gpus"], "--pass", passes,
            "-d", "bf16", *options, "--json", str(folder / "prediction.json")]


def prediction_of(apps, row, predict, folder):
    """{pass: measurements}."""
    command = command_of(apps, row, predict, folder)
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if ran.returncode != 0:
        sys.exit(f"published.py: record {row['record']}: {shlex.join(command)}:\n{ran.stderr}")
    results = json.loads((folder / "prediction.json").read_text())["results"]
    return {r["key"].get("pass", "fwd"): r["measurements"] for r in results}


def predictions_of(apps, row, folder, known):
    """Predictions whose mean is that of the row. `known`: what was predicted before, by all that it depends on."""
    key = (row["source"].split(":")[0],) + tuple(row[k] for k in ("machine", "predict", "gpus", "batch", "tokens", "heads", "kv_heads", "head_dim", "mask"))
    if key not in known:
        known[key] = [prediction_of(apps, row, predict, folder) for predict in predicts_of(row)]
    return known[key]


def predicted_ms(row, by_pass):
    """Returns the time, and whether its sizes are outside the measured ones."""
    if shares := PHASES.get(row["schedule"].removeprefix("gyre-pipeline: ")):
        scoring = by_pass["fwd"]
        return scoring["time"] * sum(scoring[share] for share in shares) / 100, scoring["extrapolated"] > 1
    measured = [m for name, m in by_pass.items() if row["pass"] in (name, "both")]
    return sum(m["time"] for m in measured), any(m["surface"] == "outside" for m in measured)


def bytes_of(row, copies):
    """Of "2Q + 3K": Q are bytes of a rank's queries, K of its keys, A of all keys, in bf16."""
    if not re.fullmatch(r"[\d.]*[QKA]( \+ [\d.]*[QKA])*", copies):
        sys.exit(f"published.py: record {row['record']}: copies of '{copies}'; wanted: as 2Q + 3K + A")
    keys = int(row["batch"]) * int(row["tokens"]) * int(row["kv_heads"]) * int(row["head_dim"]) * 2
    size = {"A": keys, "K": keys / int(row["gpus"]), "Q": keys / int(row["gpus"]) * int(row["heads"]) / int(row["kv_heads"])}
    return sum(float(part[:-1] or 1) * size[part[-1]] for part in copies.split(" + "))


def copied_ms(row, copies, path):
    model = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    return 1e3 * bytes_of(row, copies) / model["copy_bytes_per_s"]["value"]


def naive_ms(row, by_pass, path):
    """FLOPs over the best rate of the machine's kernel, plus bytes over the rate of its innermost links."""
    model = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    links = model["links"][0]["bytes_per_s"]["value"]
    total = 0
    for name, measured in by_pass.items():
        if row["pass"] not in (name, "both"):
            continue
        kernels = [k for k in model["kernels"] if (k["pass"], k["dtype"]) == (name, "bf16")]
        kernel = min(kernels, key=lambda k: abs(k["head_dim"] - int(row["head_dim"])))
        rates = kernel["flops_per_s"]["value"]
        total += measured["rate"] * 1e12 * measured["time"] / max(rates)
        total += 1e3 * measured["sent"] * 1e6 / (max(links) if isinstance(links, list) else links)
    return total


def predict_all(apps, rows, reasons, copies):
    """Returns a row for each figure, and the reasons that no miss needs."""
    unused = dict(reasons)
    predictions, known = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            published = published_ms(row)
            cases = predictions_of(apps, row, pathlib.Path(folder), known)
            times, outside = zip(*(predicted_ms(row, by_pass) for by_pass in cases))
            machine = machine_of(row, pathlib.Path(folder))
            copied = copied_ms(row, copies[row["record"]], machine) if row["record"] in copies else 0
            predicted = statistics.fmean(times) + copied
            naive = "" if "--model" in row["predict"] else f"{statistics.fmean(naive_ms(row, c, machine) for c in cases):.4g}"
            error = 100 * (predicted / published - 1)
            reason = unused.pop(row["record"], "") if is_miss(row, error) else ""
            predictions.append({**{k: row[k] for k in ("record", "source", "gpu", "gpus", "schedule", "layout", "tokens",
                                                       "heads", "kv_heads", "head_dim", "mask", "pass", "machine")},
                                "published_ms": f"{published:.4g}", "predicted_ms": f"{predicted:.4g}",
                                "copied_ms": f"{copied:.4g}", "naive_ms": naive,
                                "error_percent": f"{error:.1f}", "surface": "outside" if any(outside) else "inside",
                                "reason": reason})
    return predictions, unused


def group_of(row):
    project = row["source"].split("@")[0].removeprefix("https://github.com/").split("/issues")[0]
    return project, row["gpu"].split("-")[0].split(" ")[0], row["gpus"], row["head_dim"], row["pass"]


def winners_line(predictions):
    """Of figures that differ in schedule and layout alone: how often the fastest published is the fastest predicted."""
    shapes = collections.defaultdict(list)
    for row in predictions:
        place = row["source"].split(":")[0] if ", bar" in row["source"] else row["source"]
        shape = [row[k] for k in ("gpu", "gpus", "tokens", "heads", "kv_heads", "head_dim", "mask", "pass", "machine")]
        shapes[(place, *shape)].append((float(row["published_ms"]), float(row["predicted_ms"])))
    decided = [times for times in shapes.values() if len(times) > 1
               and sorted(t for t, _ in times)[1] > MARGIN * min(times)[0]]
    # Among equal predictions any may be the fastest.
    right = sum(min(times)[1] <= min(p for _, p in times) for times in decided)
    return (f"of {len(decided)} comparisons of schedules and layouts that the fastest wins by over"
            f" {100 * MARGIN - 100:.0f} %, {right} are predicted to be won by it")


def summary(predictions, rows):
    groups = collections.defaultdict(list)
    others = [row for row in predictions if not is_own(row)]
    for row in others:
        groups[group_of(row)].append(row)
    for head in sorted({row["head_dim"] for row in others}, key=int, reverse=True):
        groups[("all", "", "", head, "")] = [r for r in others if r["head_dim"] == head]
    lines = [f"{'project':34}{'GPU':5}{'GPUs':>5}{'head':>6}  {'pass':5}{'figures':>8}{'median':>10}{'naive':>10}"
             f"{'within 10 %':>13}{'within 20 %':>13}{'worst':>9}"]
    for (project, gpu, gpus, head, direction), members in groups.items():
        errors = [float(row["error_percent"]) for row in members]
        sizes = [abs(e) for e in errors]
        naive = [abs(100 * (float(row["naive_ms"]) / float(row["published_ms"]) - 1)) for row in members]
        lines.append(f"{project:34}{gpu:5}{gpus:>5}{head:>6}  {direction:5}{len(errors):8}{statistics.median(sizes):8.1f} %"
                     f"{statistics.median(naive):8.1f} %{sum(s <= 10 for s in sizes):13}{sum(s <= 20 for s in sizes):13}"
                     f"{max(errors, key=abs):+7.0f} %")
    lines += ["", winners_line(others), "", "not predicted, and why:"]
    left = collections.Counter(row["left_out"] for row in rows if row["left_out"])
    lines += [f"{count:6}  {why}" for why, count in left.most_common()]
    lines += ["", *own_lines(predictions)]
    return "\n".join(lines) + "\n"


def own_lines(predictions):
    """Each figure of this project, where it is recorded."""
    yield f"{'this project, one H200':46}{'tokens':>8}{'head':>6}  {'pass':5}{'measured':>12}{'predicted':>12}{'error':>9}"
    for row in filter(is_own, predictions):
        case = row["source"].split(":")[1].strip()
        yield (f"{case:46}{row['tokens']:>8}{row['head_dim']:>6}  {row['pass']:5}{float(row['published_ms']):9.2f} ms"
               f"{float(row['predicted_ms']):9.2f} ms{float(row['error_percent']):+7.1f} %")


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=pathlib.Path, help="folder with gyre-predict")
    parser.add_argument("--only", metavar="TEXT", help="sources that contain TEXT; print, write nothing")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "results" / "prediction", metavar="FOLDER")
    options = parser.parse_args()
    rows = rows_of(INPUTS / "published" / "attention.csv")
    reasons = {record: row["reason"] for row in rows_of(INPUTS / "published" / "reasons.csv")
               for record in row["records"].split()}
    copies = {record: row["bytes"] for row in rows_of(INPUTS / "published" / "copies.csv") for record in row["records"].split()}
    chosen = [r for r in rows if r["machine"] and (options.only is None or options.only in r["source"])]
    if not chosen:
        sys.exit(f"published.py: no source contains '{options.only}'")
    for record in copies.keys() - {row["record"] for row in rows if row["machine"]}:
        sys.exit(f"published.py: copies for record {record}, which is not predicted")
    predictions, unused = predict_all(options.apps, chosen, reasons, copies)
    if options.only is not None:
        for row in predictions:
            print(", ".join(row.values()))
        return
    unexplained = [r for r in predictions if is_miss(r, float(r["error_percent"])) and not r["reason"]]
    for row in unexplained:
        print(f"published.py: a miss without a reason: {', '.join(row.values())}", file=sys.stderr)
    for record, reason in unused.items():
        print(f"published.py: a reason, but no miss: record {record}: {reason}", file=sys.stderr)
    write_csv(options.output / "published.csv", predictions)
    (options.output / "published.txt").write_text(summary(predictions, rows), encoding="utf-8")
    sys.exit(1 if unexplained or unused else 0)


if __name__ == "__main__":
    main()
