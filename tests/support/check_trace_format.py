#!/usr/bin/env python3
"""check_trace_format.py FILE...: whether timelines keep the rules of the Trace Event Format, as Perfetto reads it.

The rules, of "Trace Event Format" (Google) and of Perfetto's importer of JSON:
  - an object with a list `traceEvents`, or the list itself; each event an object with a known phase `ph`;
  - the fields that its phase needs, of the right type: name, pid, tid, ts (µs), dur (X, not negative), cat, id (flows), args;
  - slices of one thread (X, and B with its E) nest: they are apart, or one holds the other;
  - a flow has one start (s), then steps (t), then one end (f), all of one id, name and category, not backwards in time;
    each of them lies in a slice of its thread, which an end takes for its own by bp: "e". A slice that ends at that moment
    is closed;
  - metadata (M) names each process that has events, and each of its threads, once; names of threads of a process differ.
"""

import json
import sys
from collections import Counter, defaultdict

NUMBER = (int, float)
# Fields of a phase: name -> type. All have ph; pid and tid are integers here, as they are of a process and a thread.
PLACE = {"name": str, "pid": int, "tid": int}
TIMED = {**PLACE, "ts": NUMBER}
FLOW = {**TIMED, "cat": str, "id": (int, str)}
FIELDS = {"X": {**TIMED, "cat": str, "dur": NUMBER}, "B": {**TIMED, "cat": str},
          "E": {"pid": int, "tid": int, "ts": NUMBER}, "i": {**TIMED, "s": str},
          "C": {"name": str, "pid": int, "ts": NUMBER, "args": dict}, "s": FLOW, "t": FLOW,
          "f": FLOW, "M": {**PLACE, "args": dict}}
# What metadata there is, and the one argument of each.
METADATA = {"process_name": ("name", str), "process_labels": ("labels", str),
            "process_sort_index": ("sort_index", int), "thread_name": ("name", str),
            "thread_sort_index": ("sort_index", int)}


def nanoseconds(microseconds):
    """Perfetto's unit. Times of a file have three digits behind the point."""
    return round(microseconds * 1000)


def is_of(value, wanted):
    return isinstance(value, wanted) and not isinstance(value, bool)


def field_problems(event):
    """What is wrong with one event, alone."""
    if not isinstance(event, dict):
        return ["is no object"]
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in FIELDS:
        return [f"has the unknown phase {phase!r}"]
    found = []
    for name, wanted in FIELDS[phase].items():
        if name not in event:
            found.append(f"has no {name}")
        elif not is_of(event[name], wanted):
            found.append(f"has {name} = {event[name]!r}")
    if "args" in event and not isinstance(event["args"], dict):
        found.append(f"has args = {event['args']!r}")
    if found:
        return found
    for name in ("ts", "dur"):
        if not 0 <= event.get(name, 0) < float("inf"):
            found.append(f"has {name} = {event[name]!r}")
    if phase == "i" and event["s"] not in ("g", "p", "t"):
        found.append(f"has the scope {event['s']!r}")
    if phase == "C" and not all(is_of(value, NUMBER) for value in event["args"].values()):
        found.append("counts what is no number")
    if phase == "f" and event.get("bp") != "e":
        found.append(f"has bp = {event.get('bp')!r}, not 'e': it would bind to the next slice")
    if phase == "M":
        argument, wanted = METADATA.get(event["name"], (None, None))
        if argument is None:
            found.append(f"is unknown metadata {event['name']!r}")
        elif not is_of(event["args"].get(argument), wanted):
            found.append(f"has no argument {argument}")
    return found


def metadata_problems(events):
    given = defaultdict(list)
    for event in (e for e in events if e["ph"] == "M"):
        thread = event["tid"] if event["name"].startswith("thread_") else None
        given[event["name"], event["pid"], thread].append(event["args"])
    for (what, pid, tid), all_args in given.items():
        if len(all_args) > 1:
            yield f"{what} of pid {pid}{'' if tid is None else f' tid {tid}'} is given {len(all_args)} times"
    used = [(e["pid"], e.get("tid")) for e in events if e["ph"] != "M"]
    for pid in sorted({pid for pid, _ in used}):
        if ("process_name", pid, None) not in given:
            yield f"pid {pid} has no process_name"
    for pid, tid in sorted({(pid, tid) for pid, tid in used if tid is not None}):
        if ("thread_name", pid, tid) not in given:
            yield f"pid {pid} tid {tid} has no thread_name"
    names = Counter((pid, args[0]["name"]) for (what, pid, _), args in given.items() if what == "thread_name")
    for (pid, name), count in names.items():
        if count > 1:
            yield f"pid {pid} has {count} threads of the name {name!r}"


def slices_of(events, problems):
    """The slices (begin, end, event) of each thread in ns, in the order of begins. Adds what is wrong with B and E."""
    slices, opened = defaultdict(list), defaultdict(list)
    # Of equal times, what ends does so before what begins; a stable sort keeps the order of the file otherwise.
    for event in sorted((e for e in events if e["ph"] in "BEX"), key=lambda e: (nanoseconds(e["ts"]), e["ph"] != "E")):
        thread, ts = (event["pid"], event["tid"]), nanoseconds(event["ts"])
        if event["ph"] == "X":
            slices[thread].append((ts, ts + nanoseconds(event["dur"]), event))
        elif event["ph"] == "B":
            opened[thread].append(event)
        elif not opened[thread]:
            problems.append(f"an E at {event['ts']} of pid {thread[0]} tid {thread[1]} ends nothing")
        else:
            begin = opened[thread].pop()
            if event.get("name", begin["name"]) != begin["name"]:
                problems.append(f"the E of {event['name']!r} at {event['ts']} ends {begin['name']!r}")
            slices[thread].append((nanoseconds(begin["ts"]), ts, begin))
    for (pid, tid), begins in opened.items():
        problems.extend(f"{b['name']!r} at {b['ts']} of pid {pid} tid {tid} never ends" for b in begins)
    for of_thread in slices.values():
        of_thread.sort(key=lambda s: (s[0], -s[1]))
    return slices


def nesting_problems(slices):
    for (pid, tid), of_thread in slices.items():
        around = []
        for begin, end, event in of_thread:
            while around and around[-1][1] <= begin:
                around.pop()
            if around and end > around[-1][1]:
                yield (f"{event['name']!r} at {event['ts']} of pid {pid} tid {tid} begins in {around[-1][2]['name']!r} "
                       "and ends behind it")
            around.append((begin, end, event))


def slice_at(slices, event):
    """The innermost slice of the event's thread that is open at its time, or nothing."""
    ts, found = nanoseconds(event["ts"]), None
    for begin, end, candidate in slices[event["pid"], event["tid"]]:
        if begin > ts:
            break
        if ts < end and (found is None or end <= found[0]):
            found = (end, candidate)
    return found and found[1]


def flows_of(events):
    flows = defaultdict(list)
    for event in (e for e in events if e["ph"] in "stf"):
        flows[event["cat"], event["name"], event["id"]].append(event)
    return flows


def flow_problems(events, slices):
    flows = flows_of(events)
    for ident, count in Counter(ident for _, _, ident in flows).items():
        if count > 1:
            yield f"id {ident} is of flows with {count} names or categories"
    for (_, name, ident), points in flows.items():
        label = f"flow {ident} ({name!r})"
        phases = "".join(p["ph"] for p in sorted(points, key=lambda p: "stf".index(p["ph"])))
        if (phases.count("s"), phases.count("f")) != (1, 1):
            yield f"{label} has the phases {phases!r}, not one s and one f"
            continue
        times = [nanoseconds(p["ts"]) for p in sorted(points, key=lambda p: "stf".index(p["ph"]))]
        if min(times) < times[0] or max(times) > times[-1]:
            yield f"{label} goes backwards in time: {times} ns"
        for point in points:
            if slice_at(slices, point) is None:
                yield f"{label}: its {point['ph']} at {point['ts']} of pid {point['pid']} tid {point['tid']} is in no slice"


def events_of(document):
    return document["traceEvents"] if isinstance(document, dict) else document


def problems(document):
    """What is wrong with a timeline, a line each; an empty list if nothing is."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        return ["no list traceEvents"]
    if isinstance(document, dict) and document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return [f"displayTimeUnit is {document['displayTimeUnit']!r}, not 'ms' or 'ns'"]
    found = [f"event {i} {what}" for i, event in enumerate(events) for what in field_problems(event)]
    if found:
        return found
    slices = slices_of(events, found)
    return [*found, *metadata_problems(events), *nesting_problems(slices), *flow_problems(events, slices)]


def main(paths):
    failed = False
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for problem in problems(json.load(file)):
                print(f"{path}: {problem}", file=sys.stderr)
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
