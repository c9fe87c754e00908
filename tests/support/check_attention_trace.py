#!/usr/bin/env python3
"""check_attention_trace.py FILE RANKS OUTPUT: a timeline (--trace FILE) of gyre-attention on RANKS ranks, whose -v wrote OUTPUT.

It keeps the rules of its format (check_trace_format.py). Each rank computes, in each pass. What a rank sends to another is what
the other receives from it, message by message, and there is an arrow for each. Messages and bytes are those of the plan, as the
table of OUTPUT counts them.
"""

import collections
import json
import re
import sys

from check_trace_format import events_of, problems, slice_at, slices_of

CATEGORIES = {"compute", "pass", "copy", "wait", "message"}


def check(condition, *what):
    if not condition:
        sys.exit(f"{sys.argv[1]}: {' '.join(str(w) for w in what)}")


def planned(output):
    """(pass, rank) -> (messages, MB sent), of the tables of -v."""
    plan, direction = {}, None
    with open(output, encoding="utf-8") as file:
        for line in file:
            title = re.match(r"# \S+ \S+ (fwd|bwd) \d+: total", line)
            row = re.match(r"# +(\d+) +\S+ +\S+ +\S+ +\d+ +(\S+) +(\d+)$", line)
            if title:
                direction = title[1]
            elif row and direction:
                plan[direction, int(row[1])] = (int(row[3]), float(row[2]))
    return plan


def check_lanes(events, ranks, passes):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    hosts = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    check(all(re.match(f"rank {r} on .", host) for r, host in enumerate(hosts)), "processes", hosts)
    check(len(hosts) == ranks, len(hosts), "processes")
    for e in events:
        if e["ph"] != "X":
            continue
        lane = "communication" if e["cat"] == "message" else "compute"
        check(e["cat"] in CATEGORIES, "category", e["cat"])
        check(re.fullmatch(lane + r"( \d+)?", names[e["pid"], e["tid"]]), e, "is on", names[e["pid"], e["tid"]])
        check(e["args"]["pass"] in passes, e)
    for direction in passes:
        computing = {e["pid"] for e in events if e.get("cat") == "compute" and e["args"]["pass"] == direction}
        check(computing == set(range(ranks)), "ranks that compute", direction, computing)


def check_messages(events, plan):
    """Both ends of all messages, and the plan. Returns bytes by (sender, receiver), in the order of time."""
    transfers = sorted((e for e in events if e.get("cat") == "message" and e["ph"] == "X"), key=lambda e: e["ts"])
    sent, received, counted = (collections.defaultdict(list) for _ in range(3))
    for e in transfers:
        args, rank = e["args"], e["pid"]
        for peers, total in (("to", "bytes_sent"), ("from", "bytes_received")):
            check(args[total] == sum(m["bytes"] for m in args[peers]), e)
            check(rank not in [m["peer"] for m in args[peers]], e)
        check(args["step"] >= 0 and (args["to"] or args["from"]), e)
        for m in args["to"]:
            sent[rank, m["peer"]].append(m["bytes"])
            counted[args["pass"], rank].append(m["bytes"])
        for m in args["from"]:
            received[m["peer"], rank].append(m["bytes"])
    check(sent == received, "sent:", dict(sent), "received:", dict(received))
    for key, (messages, megabytes) in plan.items():
        mine = counted[key]
        check(len(mine) == messages and abs(sum(mine) / 1e6 - megabytes) <= 0.00051, key, "planned", messages, megabytes, mine)
    return sent


def check_arrows(events, sent):
    ends = collections.defaultdict(dict)
    for e in events:
        if e["ph"] in "sf":
            ends[e["id"]][e["ph"]] = e
    drawn = collections.defaultdict(list)
    slices = slices_of(events, [])
    for arrow in sorted(ends.values(), key=lambda arrow: arrow["s"]["ts"]):
        s, f = arrow["s"], arrow["f"]
        check(s["args"]["peer"] == f["pid"] and f["args"]["peer"] == s["pid"], "ends", arrow)
        check(s["args"]["bytes"] == f["args"]["bytes"], "bytes", arrow)
        drawn[s["pid"], f["pid"]].append(s["args"]["bytes"])
        for end, peers in ((s, "to"), (f, "from")):
            args = slice_at(slices, end)["args"]
            check(args["step"] == end["args"]["step"], "steps", arrow)
            check({"peer": end["args"]["peer"], "bytes": end["args"]["bytes"]} in args[peers], "no such message", arrow)
    check(drawn == sent, "arrows:", dict(drawn), "messages:", dict(sent))


def main(path, ranks, output):
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    found = problems(document)
    check(not found, *found)
    events = events_of(document)
    plan = planned(output)
    passes = {direction for direction, _ in plan}
    check(len(plan) == ranks * len(passes) > 0, "a plan of", sorted(plan))
    check_lanes(events, ranks, passes)
    sent = check_messages(events, plan)
    check_arrows(events, sent)
    total = sum(messages for messages, _ in plan.values())
    check(sum(e["ph"] == "s" for e in events) == total, "not", total, "arrows")
    print(f"{path}: {len(events)} events, {total} messages of {ranks} ranks")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
