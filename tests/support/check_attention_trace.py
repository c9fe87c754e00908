"""check_attention_trace.py FILE: a timeline of two ranks of gyre-attention by the ring schedule, forward and backward.

Each rank computes and communicates, in spans that do not overlap in a lane.
"""

import json
import sys

spans = [e for e in json.load(open(sys.argv[1], encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]
lanes = {}
for e in spans:
    lanes.setdefault((e["pid"], e["cat"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
for rank in (0, 1):
    names = [s[2] for (pid, cat, _), lane in lanes.items() if pid == rank and cat == "communication" for s in lane]
    assert "KV" in names and "dKV" in names, names
    computes = [s[2] for (pid, cat, _), lane in lanes.items() if pid == rank and cat == "compute" for s in lane]
    assert computes.count("attention") == 4, computes
for lane in lanes.values():
    lane.sort()
    assert all(a[1] <= b[0] + 0.002 for a, b in zip(lane, lane[1:])), lane
