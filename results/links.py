#!/usr/bin/env python3
"""Makes a link of machine files from what nccl-tests prints: links.py PAIR.txt [--together ALL.txt] --tier NAME
--source TEXT MACHINE.toml...

PAIR.txt is the output of all_gather_perf on two GPUs that the tier joins (one on each of two nodes for the tier between
nodes), ALL.txt on all GPUs of the tier at once. Other collectives send other bytes and are refused. In each MACHINE.toml
(inputs/machines), of the tier NAME:

    message_bytes, bytes_per_s   half of the size, which each of two GPUs sends, over the time without latency_s, which is
                                 the file's. Times are those in place. Sizes whose time is below twice the latency say
                                 nothing of the rate and are left out
    all_at_once                  with --together: bus bandwidth of all over that of the pair, at the largest size of both,
                                 at most 1

TEXT says whose figures they are: an address, or owner/name@commit:file. --check writes nothing; exit code 1 if a file would
change.
"""

import argparse
import pathlib
import re
import sys

ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+((?:\s+\S+){8})\s*$")
COLUMNS = ("time", "algbw", "busbw", "wrong")  # out of place, then in place; the time in us, GB/s


class Refused(Exception):
    pass


def read(path):
    """(number of GPUs, {size: (seconds, bus bandwidth)} in place) of an output of all_gather_perf."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    if "all_gather_perf" not in text:
        raise Refused(f"{path}: not the output of all_gather_perf, which its first lines name")
    gpus = len(re.findall(r"^#\s+Rank\s+\d+ ", text, re.MULTILINE))
    rows = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = ROW.match(line)
        if not found:
            continue
        row = dict(zip(COLUMNS, found[2].split()[4:]))
        if row["wrong"] not in ("0", "N/A"):
            raise Refused(f"{path}:{number}: {row['wrong']} wrong values; wanted: 0")
        rows[int(found[1])] = (1e-6 * float(row["time"]), 1e9 * float(row["busbw"]))
    if not rows:
        raise Refused(f"{path}: no line of a size and its times")
    return gpus, rows


def quantity(value, source):
    shown = f"[{', '.join(f'{v / 1e9:.3g}e9' for v in value)}]" if isinstance(value, list) else f"{value:.3g}"
    return f'{{ value = {shown}, source = "{source}" }}'


def with_link(text, machine, options):
    """The text of a machine file with the measured rates in its tier."""
    if re.search(r'["\\\n]', options.source):
        raise Refused(f"--source {options.source}: no quote, no backslash and no line's end")
    tables = re.split(r"(?=^\[\[)", text, flags=re.MULTILINE)
    places = {found[1]: i for i, t in enumerate(tables) if (found := re.match(r'\[\[model\.links\]\]\ntier = "(\w+)"\n', t))}
    if options.tier not in places:
        raise Refused(f"--tier {options.tier}: {machine} has {', '.join(places)}")
    link = tables[places[options.tier]]
    latency = float(re.search(r"^latency_s = \{ value = ([-+.e\d]+)", link, re.MULTILINE)[1])
    gpus, pair = read(options.pair)
    if gpus != 2:
        raise Refused(f"{options.pair}: {gpus} GPUs; wanted: two, of which each sends half of the size")
    kept = {size: seconds for size, (seconds, _) in sorted(pair.items()) if seconds >= 2 * latency}
    if not kept:
        raise Refused(f"{options.pair}: no time of at least {2e6 * latency:.3g} us, twice the latency; wanted: larger sizes")
    of = f"{options.source}, 2 GPUs, all_gather_perf in place: half of the size / (time - {1e6 * latency:.3g} us)"
    rates = [size / 2 / (seconds - latency) for size, seconds in kept.items()]
    made = {"message_bytes": str([size // 2 for size in kept]), "bytes_per_s": quantity(rates, of)}
    if options.together:
        number, together = read(options.together)
        both = sorted(together.keys() & pair.keys())
        if not both:
            raise Refused(f"{options.together}: no size of {options.pair}")
        share = min(1.0, together[both[-1]][1] / pair[both[-1]][1])
        made["all_at_once"] = quantity(share, f"{options.source}, bus bandwidth of {number} GPUs over that of 2, {both[-1]} bytes")
    for key in made:
        link = re.sub(rf"^{key} = .*\n", "", link, flags=re.MULTILINE)
    lines = "".join(f"{key} = {value}\n" for key, value in made.items())
    tables[places[options.tier]] = re.sub(r"^(latency_s = .*\n)", lambda found: found[1] + lines, link, flags=re.MULTILINE)
    return "".join(tables)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", metavar="PAIR.txt")
    parser.add_argument("machines", nargs="+", type=pathlib.Path, metavar="MACHINE.toml")
    parser.add_argument("--together", metavar="ALL.txt")
    parser.add_argument("--tier", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        for machine in options.machines:
            text = machine.read_text(encoding="utf-8")
            new = with_link(text, machine, options)
            if options.check and new != text:
                sys.exit(f"links.py: {machine} differs from {options.pair}; without --check it is written")
            if new != text:
                machine.write_text(new, encoding="utf-8")
    except (Refused, OSError) as error:
        sys.exit(f"links.py: {error}")


if __name__ == "__main__":
    main()
