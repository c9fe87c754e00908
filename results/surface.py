#!/usr/bin/env python3
"""Makes rates of a machine file from a recorded run of bench-gpu: surface.py RECORD --head-dim N MACHINE.toml...

RECORD is results/gpu/DEVICE-DATE-kernels.json. It replaces, in each MACHINE.toml (inputs/machines):

    kernels                the surfaces of head dimension N in bf16, both passes: a point for each length of
                           attention by cuDNN alone. launch_s and merge_s are those of the file's other surface
    logprob_bytes_per_s,   two calls that end with scores on the host, with different numbers of columns, give the
    logprob_row_s          rate and the time of a row

The recorded sequences are causal. diagonal_s, the time of a mask's edge for a token, assumes that the two shortest
lengths have one rate. A rate is FLOPs / (time - launch_s - edge).

--without TOKENS leaves a length out, to predict it. --check writes nothing; exit code 1 if a file would change.
"""

import argparse
import pathlib
import re
import sys

from gyre_result import LIST, OBJECT, TEXT, TIME, Malformed, get, load_json

ROOT = pathlib.Path(__file__).resolve().parent.parent
PASSES = {"fwd": ("attention forward", 4), "bwd": ("attention backward", 10)}  # group; FLOPs of a pair / head dimension
KERNELS = "[[model.kernels]]\n"


def recorded(file, document):
    """(group, name, shape, seconds) of each result."""
    for i in range(len(get(file, document, "results", kind=LIST))):
        yield (get(file, document, "results", i, "group", kind=TEXT), get(file, document, "results", i, "name", kind=TEXT),
               get(file, document, "results", i, "shape", kind=OBJECT),
               get(file, document, "results", i, "median_s", kind=TIME))


def two_terms(first, second):
    """x and y with a x + b y = c for both (a, b, c)."""
    (a, b, c), (d, e, f) = first, second
    return (c * e - b * f) / (a * e - b * d), (a * f - c * d) / (a * e - b * d)


def figure(value, source):
    shown = "[" + ", ".join(f"{v / 1e12:.1f}e12" for v in value) + "]" if isinstance(value, list) else f"{value:.3g}"
    return f'{{ value = {shown}, source = "{source}" }}'


def surface(results, name, pass_, head_dim, other):
    """A table of `kernels`. `other`: the text of the file's surface of another head dimension."""
    group, per_pair = PASSES[pass_]
    points = sorted((shape["tokens"], shape["heads"], shape["kv_heads"], seconds) for g, n, shape, seconds in results
                    if (g, n, shape.get("head_dim")) == (group, "cudnn", head_dim))
    if len(points) < 2:
        raise Malformed(f"{name}: {len(points)} lengths of {group} by cudnn with heads of {head_dim}; wanted: 2 or more")
    kept = {key: re.search(rf"^{key} = .*\n", other, re.MULTILINE)[0] for key in ("launch_s", "merge_s")}
    launch = float(re.search(r"value = ([-+.e\d]+)", kept["launch_s"])[1])
    flops = {tokens: per_pair * head_dim * tokens * (tokens + 1) / 2 for tokens, *_ in points}
    work = {tokens: (seconds - launch) / heads for tokens, heads, _, seconds in points}
    shortest = [(flops[tokens], tokens - 1, work[tokens]) for tokens, *_ in points[:2]]
    edge = max(0.0, two_terms(*shortest)[1])
    rates = [flops[tokens] / (work[tokens] - edge * (tokens - 1)) for tokens, *_ in points]
    times = ", ".join(f"{tokens} tokens {1e3 * seconds:.4g} ms" for tokens, _, _, seconds in points)
    of = f"{name}, {group}, cudnn: {points[0][1]} heads ({points[0][2]} KV), bf16, causal"
    lengths = f"{points[0][0]} and {points[1][0]} tokens"
    return (f'{KERNELS}pass = "{pass_}"\ndtype = "bf16"\nhead_dim = {head_dim}\nlibrary = "cuDNN"\n{kept["launch_s"]}'
            f'diagonal_s = {figure(edge, f"{of}; assumed: without it, {lengths} have one rate")}\n{kept["merge_s"]}'
            f"rows = {[tokens for tokens, *_ in points]}\n"
            f'flops_per_s = {figure(rates, f"{of}, {times}, less launch_s and diagonal_s")}\n\n')


def logprob_rates(results, name):
    """{key: value} of the log-probability rates."""
    calls = [(2 * s["rows"] * s["columns"], s["rows"], t) for g, n, s, t in results if (g, n) == ("rows", "scores on the host")]
    if len(calls) != 2:
        raise Malformed(f"{name}: {len(calls)} calls of 'scores on the host'; wanted: 2")
    per_byte, per_row = two_terms(*calls)
    of = f"{name}, rows, scores on the host: two numbers of columns"
    return {"logprob_bytes_per_s": figure(1 / per_byte, of), "logprob_row_s": figure(max(0.0, per_row), of)}


def with_rates(text, results, name, head_dim):
    """Returns the text of a machine file with the recorded rates in it."""
    head, *tables = re.split(r"(?=^\[\[)", text, flags=re.MULTILINE)
    def is_kernel(table, **keys):
        return table.startswith(KERNELS) and all(re.search(rf'^{k} = "?{v}"?$', table, re.MULTILINE) for k, v in keys.items())
    tables = [t for t in tables if not is_kernel(t, dtype="bf16", head_dim=head_dim)]
    made = []
    for pass_ in PASSES:
        other = [t for t in tables if is_kernel(t, dtype="bf16", **{"pass": pass_})]
        if not other:
            raise Malformed(f"a machine without bf16 kernels of pass {pass_}; wanted: one, for launch_s and merge_s")
        made.append(surface(results, name, pass_, head_dim, other[0]))
    place = next(i for i, table in enumerate(tables) if table.startswith(KERNELS))
    head = re.sub(r"^logprob_\w+ = .*\n", "", head, flags=re.MULTILINE).rstrip("\n")
    head += "".join(f"\n{key} = {value}" for key, value in logprob_rates(results, name).items()) + "\n\n"
    return head + "".join([*tables[:place], *made, *tables[place:]])


def results_of(record, without=None):
    """The recorded results, and the name of the file in sources."""
    path = pathlib.Path(record).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    found = recorded(name, load_json(path, name, "bench-gpu-kernels"))
    return [r for r in found if without is None or r[2].get("tokens") != without], name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", help="results/gpu/DEVICE-DATE-kernels.json")
    parser.add_argument("machines", nargs="+", type=pathlib.Path, metavar="MACHINE.toml")
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--without", type=int, metavar="TOKENS")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        results, name = results_of(options.record, options.without)
        for machine in options.machines:
            text = machine.read_text(encoding="utf-8")
            new = with_rates(text, results, name, options.head_dim)
            if options.check and new != text:
                sys.exit(f"surface.py: {machine} differs from {name}; without --check it is written")
            if new != text:
                machine.write_text(new, encoding="utf-8")
    except (Malformed, OSError, KeyError) as error:
        sys.exit(f"surface.py: {error}")


if __name__ == "__main__":
    main()
