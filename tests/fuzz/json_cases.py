"""Result files (gyre-result/1) with changes, read by the scripts that read such files."""

import copy
import importlib.util
import json
import pathlib
import random

VALUES = (None, True, 0, -1, 1e308, 10**400, "", "x", [], {}, [[]], float("nan"), float("inf"))


def module(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def readers(source, scratch):
    """{name: function of the text of a result file}."""
    tables, torch = module(f"{source}/results/tables.py"), module(f"{source}/bench/gpu_vs_torch.py")
    page = "<!-- table case.json: op pass sent=sent:.2f err/tol=error:.3f -->\n\n"

    def read_tables(text):
        path = pathlib.Path(scratch, "case.json")
        path.write_bytes(text)
        tables.render(pathlib.Path(scratch), tables.TABLE.search(page))

    return {"tables.py": read_tables, "gpu_vs_torch.py": lambda text: torch.times_of(json.loads(text))}


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
    """Counts by reader, and what was found. A refusal names what is wrong: the place in the text, or the key."""
    text = pathlib.Path(source, "results/cpu-2core/logprobs-counted.json").read_bytes()
    document = json.loads(text)
    document["results"] = document["results"][:4]
    text = json.dumps(document).encode()
    counts, found = {}, []
    for name, read in readers(source, scratch).items():
        count = counts[name] = {"cases": 0, "accepted": 0, "refused": 0, "other": 0}
        for index in range(cases):
            case = mutated(document, text, random.Random(f"{seed}/{name}/{index}"))
            count["cases"] += 1
            try:
                read(case)
                count["accepted"] += 1
            except (ValueError, KeyError, SystemExit):
                count["refused"] += 1
            except Exception as error:  # pylint: disable=broad-except
                count["other"] += 1
                found.append(f"{name}: case {index} of seed {seed}: {type(error).__name__}: {error}")
    return counts, found
