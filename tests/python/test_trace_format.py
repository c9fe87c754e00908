#!/usr/bin/env python3
"""Checks tests/support/check_trace_format.py: each rule finds what breaks it, and nothing else does."""

import copy
import json
import os
import subprocess
import sys
import tempfile
import unittest

SUPPORT = os.path.join(os.path.abspath(sys.argv[1]), "tests", "support")
sys.path.insert(0, SUPPORT)
import check_trace_format  # noqa: E402

NAMES = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {pid}"}}
         for pid in (0, 1)] + [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid,
                                "args": {"name": f"lane {tid}"}} for pid in (0, 1)
                               for tid in (0, 1)]


def x(ts, dur, name="a", pid=0, tid=0, **others):
    return {"ph": "X", "name": name, "cat": "c", "pid": pid, "tid": tid, "ts": ts, "dur": dur, **others}


def point(ph, ts, pid, ident=7, **others):
    end = {"bp": "e"} if ph == "f" else {}
    return {"ph": ph, "name": "KV", "cat": "c", "id": ident, "pid": pid, "tid": 1, "ts": ts, **end, **others}


# Two ranks; a message from the first to the second.
GOOD = NAMES + [x(0, 10), x(2, 3, "inside"), x(5, 5, "inside, too"), x(10, 1, "next"),
                x(1, 8, "KV", 0, 1), x(1.5, 8.25, "KV", 1, 1), point("s", 1, 0),
                point("f", 9.749, 1)]


class Format(unittest.TestCase):
    def found(self, events, wanted):
        problems = check_trace_format.problems({"traceEvents": events})
        self.assertTrue(any(wanted in p for p in problems), f"{wanted!r} is not among {problems}")

    def changed(self, index, wanted, **fields):
        """GOOD with other fields of an event (a value of None: without it) has the problem."""
        events = copy.deepcopy(GOOD)
        for name, value in fields.items():
            events[index][name] = value
            if value is None:
                del events[index][name]
        self.found(events, wanted)

    def test_what_is_right(self):
        self.assertEqual(check_trace_format.problems({"traceEvents": GOOD, "displayTimeUnit": "ms"}), [])
        self.assertEqual(check_trace_format.problems(GOOD), [])
        self.assertEqual(check_trace_format.problems([]), [])
        others = [{"ph": "B", "name": "outer", "cat": "c", "pid": 0, "tid": 0, "ts": 20}, x(21, 1),
                  {"ph": "B", "name": "inner", "cat": "c", "pid": 0, "tid": 0, "ts": 22},
                  {"ph": "E", "name": "inner", "pid": 0, "tid": 0, "ts": 23},
                  {"ph": "E", "pid": 0, "tid": 0, "ts": 24},
                  {"ph": "i", "name": "now", "pid": 0, "tid": 0, "ts": 3, "s": "t"},
                  {"ph": "C", "name": "bytes", "pid": 0, "ts": 3, "args": {"sent": 3}},
                  point("t", 5, 0)]
        self.assertEqual(check_trace_format.problems(GOOD + others), [])

    def test_documents(self):
        for document in ({}, {"traceEvents": {}}, 3, "x"):
            self.assertEqual(check_trace_format.problems(document), ["no list traceEvents"])
        self.assertIn("displayTimeUnit", check_trace_format.problems({"traceEvents": [], "displayTimeUnit": "s"})[0])

    def test_fields(self):
        self.found([3], "event 0 is no object")
        self.changed(6, "event 6 has the unknown phase 'Z'", ph="Z")
        self.changed(6, "has the unknown phase None", ph=None)
        for name in ("name", "cat", "pid", "tid", "ts", "dur"):
            self.changed(6, f"event 6 has no {name}", **{name: None})
            self.changed(6, f"event 6 has {name} = [1]", **{name: [1]})
        self.changed(6, "has pid = True", pid=True)
        self.changed(6, "has ts = '3'", ts="3")
        self.changed(6, "has dur = -1", dur=-1)
        self.changed(6, "has ts = -0.5", ts=-0.5)
        self.changed(6, "has ts = nan", ts=float("nan"))
        self.changed(6, "has args = 3", args=3)
        for name in ("name", "cat", "id", "pid", "tid", "ts"):
            self.changed(12, f"event 12 has no {name}", **{name: None})
        self.changed(13, "bind to the next slice", bp=None)
        self.changed(0, "has no argument name", args={})
        self.changed(0, "unknown metadata", name="process")
        self.found(GOOD + [{"ph": "i", "name": "now", "pid": 0, "tid": 0, "ts": 3, "s": "x"}], "has the scope 'x'")
        self.found(GOOD + [{"ph": "C", "name": "n", "pid": 0, "ts": 3, "args": {"a": "b"}}], "counts what is no number")

    def test_metadata(self):
        self.found(GOOD[1:], "pid 0 has no process_name")
        self.found(GOOD[:5] + GOOD[6:], "pid 1 tid 1 has no thread_name")
        self.found(GOOD + [GOOD[0]], "process_name of pid 0 is given 2 times")
        self.found(GOOD + [GOOD[2]], "thread_name of pid 0 tid 0 is given 2 times")
        self.changed(3, "pid 0 has 2 threads of the name 'lane 0'", args={"name": "lane 0"})

    def test_nesting(self):
        self.changed(6, "'inside, too' at 5 of pid 0 tid 0 begins in 'a' and ends behind it", dur=9.999)
        self.found(GOOD + [x(4.999, 0.002)], "begins in 'inside' and ends behind it")
        end = {"ph": "E", "pid": 0, "tid": 0, "ts": 30}
        begin = {"ph": "B", "name": "b", "cat": "c", "pid": 0, "tid": 0, "ts": 20}
        self.found(GOOD + [end], "ends nothing")
        self.found(GOOD + [begin], "'b' at 20 of pid 0 tid 0 never ends")
        self.found(GOOD + [begin, {**end, "name": "other"}], "the E of 'other' at 30 ends 'b'")
        self.found(GOOD + [begin, end, x(25, 6)], "ends behind it")

    def test_flows(self):
        self.found(GOOD[:-1], "has the phases 's', not one s and one f")
        self.found(GOOD[:-2] + GOOD[-1:], "has the phases 'f'")
        self.found(GOOD + [point("s", 2, 0)], "has the phases 'ssf'")
        self.found(GOOD + [point("s", 2, 0, name="V")], "id 7 is of flows with 2 names or categories")
        self.found(GOOD[:-2] + [point("s", 5, 0), point("f", 4.999, 1)], "goes backwards in time: [5000, 4999] ns")
        self.found(GOOD + [point("t", 0.5, 0)], "goes backwards in time")
        self.changed(12, "its s at 0.999 of pid 0 tid 1 is in no slice", ts=0.999)
        self.changed(13, "its f at 9.75 of pid 1 tid 1 is in no slice", ts=9.75)  # closed at that moment
        self.changed(13, "its f at 9.749 of pid 1 tid 0 is in no slice", tid=0)

    def test_program(self):
        with tempfile.TemporaryDirectory() as folder:
            codes = []
            for events in (GOOD, GOOD[1:]):
                path = os.path.join(folder, "trace.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({"traceEvents": events}, file)
                script = os.path.join(SUPPORT, "check_trace_format.py")
                done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, check=False)
                codes.append((done.returncode, done.stderr))
            self.assertEqual(codes, [(0, ""), (1, f"{path}: pid 0 has no process_name\n")])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
