#!/usr/bin/env python3
"""Reads a GOAL schedule of gyre-predict and plays it: check_goal.py FILE.goal LATENCY_S BYTES_PER_S

Every message must have its two ends, of equal size, and an operation may require only earlier ones. Prints messages, bytes
and the time in seconds at which the last rank ends: a rank's messages leave one after the other.
"""

import collections
import re
import sys

OPERATION = re.compile(r"l(\d+): (?:calc (\d+)|(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+))")


def ranks_of(text):
    """[{label: (operation, required labels)}] of each rank."""
    head, *parts = re.split(r"\nrank (\d+) \{\n", text)
    count = int(re.fullmatch(r"num_ranks (\d+)", head.strip())[1])
    assert [int(r) for r in parts[::2]] == list(range(count)), "ranks are missing"
    ranks = []
    for body in parts[1::2]:
        operations = {}
        for line in body.strip().removesuffix("}").split("\n"):
            if found := OPERATION.fullmatch(line):
                operations[int(found[1])] = (found.groups()[1:], [])
            elif line:
                label, required = map(int, re.fullmatch(r"l(\d+) requires l(\d+)", line).groups())
                assert required < label, line
                operations[label][1].append(required)
        ranks.append(operations)
    return ranks


def play(ranks, latency, rate):
    """(messages, bytes, end)."""
    arrivals, expected, ends = {}, {}, [{} for _ in ranks]
    left = collections.deque((rank, label) for rank, operations in enumerate(ranks) for label in operations)
    link = [0.0] * len(ranks)
    waited = 0
    while left:
        rank, label = left.popleft()
        (nanoseconds, kind, size, peer, tag), required = ranks[rank][label]
        time = max((ends[rank].get(r, float("inf")) for r in required), default=0)
        if kind == "recv":
            expected[int(peer), rank, tag] = size
            time = max(time, arrivals.get((int(peer), rank, tag), (float("inf"), 0))[0])
        if time == float("inf"):  # what it requires has not ended
            left.append((rank, label))
            waited += 1
            assert waited <= len(left), "operations wait for each other"
            continue
        waited = 0
        if kind == "send":
            time = link[rank] = max(time, link[rank]) + int(size) / rate
            assert arrivals.setdefault((rank, int(peer), tag), (time + latency, size)) == (time + latency, size)
        ends[rank][label] = time + (int(nanoseconds) * 1e-9 if nanoseconds else 0)
    assert {key: size for key, (_, size) in arrivals.items()} == expected, "sends and receives differ"
    return len(arrivals), sum(int(size) for _, size in arrivals.values()), max(max(e.values(), default=0) for e in ends)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(*play(ranks_of(file.read()), float(sys.argv[2]), float(sys.argv[3])))
