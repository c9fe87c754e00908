#!/usr/bin/env python3
"""Reads the execution traces of gyre-predict and plays them: check_chakra.py PREFIX RANKS LATENCY_S BYTES_PER_S

The wire format of protocol buffers is read here without a library. Every field must be one of et_def.proto that ASTRA-sim
reads. Prints the same as check_goal.py.
"""

import sys

from check_goal import play

INT32, INT64, BOOL = 7, 9, 27  # fields of an attribute's value
ATTRIBUTES = {"is_cpu_op": BOOL, "comm_src": INT32, "comm_dst": INT32, "comm_size": INT64, "comm_tag": INT32}


def varint(data, at):
    """(value, end)."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data):
    """[(field, number or bytes)] of a message."""
    at, found = 0, []
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        assert key & 7 in (0, 2), key
        if key & 7 == 2:
            assert at + value <= len(data), "a message ends early"
            value, at = data[at : at + value], at + value
        found.append((key >> 3, value))
    return found


def messages(data):
    at, found = 0, []
    while at < len(data):
        size, at = varint(data, at)
        found.append(data[at : at + size])
        at += size
    assert at == len(data), "the file ends early"
    return found


def labels(packed):
    at, found = 0, []
    while at < len(packed):
        value, at = varint(packed, at)
        found.append(value)
    return found


def attributes(node):
    found = {}
    for field, data in node:
        if field == 10:
            (one, name), (kind, value) = fields(data)
            assert one == 1 and ATTRIBUTES[name.decode()] == kind, (name, kind)
            found[name.decode()] = value
    return found


def operations_of(path, rank):
    """{label: (operation, required labels)}, as check_goal.ranks_of()."""
    with open(path, "rb") as file:
        metadata, *nodes = messages(file.read())
    assert fields(metadata) == [(1, b"0.0.4")], metadata
    operations = {}
    for data in nodes:
        node = fields(data)
        one = {field: value for field, value in node if field != 10}
        assert set(one) <= {1, 2, 3, 5, 7}, one
        what, kind = attributes(node), {4: None, 5: "send", 6: "recv"}[one[3]]
        required = labels(one.get(5, b""))
        assert what["is_cpu_op"] == 0 and one[1] not in operations and all(r < one[1] for r in required), one
        if kind is None:
            operation = (1000 * one[7] or None, None, None, None, None)
        else:
            own, other = ("comm_src", "comm_dst") if kind == "send" else ("comm_dst", "comm_src")
            assert what[own] == rank and 7 not in one, what
            operation = (None, kind, what["comm_size"], what[other], what["comm_tag"])
        operations[one[1]] = (operation, required)
    return operations


if __name__ == "__main__":
    prefix, count = sys.argv[1], int(sys.argv[2])
    traces = [operations_of(f"{prefix}.{rank}.et", rank) for rank in range(count)]
    print(*play(traces, float(sys.argv[3]), float(sys.argv[4])))
