"""Result files (gyre-result/1) with changes, read by the scripts that read such files."""

import copy
import importlib.util
import json
import pathlib
import random
import re
import sys

VALUES = (None, True, 0, -1, 1e308, 10**400, "", "x", [], {}, [[]], float("nan"), float("inf"), "\n", "\ud800")


def module(path):
    path = pathlib.Path(path)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def readers(source, scratch):
    """{name: function of a result file}, and the one exception that they may end with."""
    tables, torch = module(f"{source}/results/tables.py"), module(f"{source}/bench/gpu_vs_torch.py")
    page = "<!-- table case.json: op pass sent=sent:.2f err_over_tol=error:.3f -->\n\n"
    read = {"tables.py": lambda path: "".join(tables.render(pathlib.Path(scratch), tables.TABLE.search(page))).encode(),
            "gpu_vs_torch.py": lambda path: torch.times_of_file(path, path.name)}
    return read, tables.Malformed


def places(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from places(child, (*path, name))


def mutated(document, text, rng):
    if rng.random() < 0.3:
        data = bytearray(text)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            data[at:at + rng.randrange(3)] = bytes(rng.choice(b'{}[]",:0-9eEnN\\\xff') for _ in range(rng.randrange(3)))
        return bytes(data)
    changed = copy.deepcopy(document)
    *way, last = rng.choice([p for p in places(changed) if p])
    node = changed
    for name in way:
        node = node[name]
    if rng.random() < 0.4:
        del node[last]
    else:
        node[last] = rng.choice(VALUES)
    return json.dumps(changed).encode()


def run(source, scratch, seed, cases):
    """Counts by reader, and what was found. A refusal is one line: the file, what is wrong where, and what is wanted."""
    text = pathlib.Path(source, "results/cpu-2core/logprobs-counted.json").read_bytes()
    document = json.loads(text)
    document["results"] = document["results"][:4]
    text = json.dumps(document).encode()
    counts, found, path = {}, [], pathlib.Path(scratch, "case.json")
    functions, malformed = readers(source, scratch)
    for name, read in functions.items():
        count = counts[name] = {"cases": 0, "accepted": 0, "refused": 0, "other": 0}
        for index in range(cases):
            path.write_bytes(mutated(document, text, random.Random(f"{seed}/{name}/{index}")))
            try:
                read(path)
                end, message = "accepted", ""
            except malformed as error:
                message = str(error)
                end = "refused" if re.fullmatch(r"case\.json: .+; (wanted|nearest): .+", message) else "other"
            except Exception as error:  # pylint: disable=broad-except
                end, message = "other", f"{type(error).__name__}: {error}"
            count["cases"] += 1
            count[end] += 1
            if end == "other":
                found.append(f"{name}: case {index} of seed {seed}: {message}")
    return counts, found
