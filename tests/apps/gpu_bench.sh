#!/usr/bin/env bash
# bench-gpu-kernels: all that it measures runs, and its JSON is complete; without a GPU, a reason and exit code 3.
source "$(dirname "$0")/../support/app_test.bash"

bench=$2/bench/bench-gpu-kernels
[[ -x $bench ]] || { echo "skipped: there is no bench-gpu-kernels in this build" && exit 77; }
expect 2 'there are attention, rows and gather' "$bench" --only matmul
status=0
timeout 120 "$bench" --smoke --json result.json >log 2>&1 || status=$?
if [[ $status -eq 3 ]]; then
  grep -qE 'no NVIDIA driver|no CUDA-capable device|supports CUDA' log || fail "no reason: $(cat log)"
  [[ ! -e result.json ]] || fail "a run without a GPU wrote a result"
  echo "ok: $(grep -E -m 1 'driver|device' log)"
  exit 0
fi
[[ $status -eq 0 ]] || fail "exit $status: $(cat log)"
/usr/bin/python3 - result.json <<'PYTHON' || fail "$(cat result.json)"
import json, sys
result = json.load(open(sys.argv[1]))
for key in ("device", "date", "version", "cuda", "compute_capability", "device_state", "repetitions"):
    assert key in result, key
groups = {}
for r in result["results"]:
    assert len(r["seconds"]) == result["repetitions"] and r["median_s"] > 0, r
    groups.setdefault((r["group"], json.dumps(r["shape"])), []).append(r)
names = {g for g, _ in groups}
assert names == {"attention forward", "attention backward", "rows", "gather"}, names
for entries in groups.values():  # everything is compared with the first of its group
    assert "ratio" not in entries[0], entries[0]
    for r in entries[1:]:
        assert r["baseline"] == entries[0]["name"] and r["ratio"] > 0, r
rows = [r for (g, _), e in groups.items() if g == "rows" for r in e]
assert {r["name"] for r in rows} == {"copy", "statistics", "scores on the host", "gradient"}, rows
copy = rows[0]
assert abs(copy["bytes_per_s"] * copy["median_s"] - 4 * copy["shape"]["rows"] * copy["shape"]["columns"]) < 1, copy
PYTHON
echo "ok: $(grep -c . log) lines"
