#!/usr/bin/env bash
# gyre-attention --replay writes files with the bits of runs on as many ranks. Its rows say that they are replayed. It finds a
# wrong result, stays within the planned memory, and refuses what it cannot do. results/drift.py runs on a few ranks.
# Usage: replay.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
attention=$apps/gyre-attention
small="--tokens 96 --heads 4 --kv-heads 2 --head-dim 16 -n 1 -w 0"

same_bits() { # RANKS OPTION...: what a replay writes is what the ranks write
  expect 0 'RESULT' "$MPIEXEC" -n "$1" "$attention" "${@:2}" -o ranks.h5
  expect 0 'VERIFY PASSED' "$attention" --replay --cp "$1" "${@:2}" -o replayed.h5
  expect 0 'VERIFY PASSED' "$apps/gyre-compare" replayed.h5 ranks.h5 --rtol 0 --atol 0
}
same_bits 3 $small --schedule all-to-all -d bf16 --layout striped --collectives library
same_bits 2 $small --schedule all-gather --layout zigzag --collectives library --sinks
same_bits 4 $small --schedule ring --merge at-end -d bf16 --partial-out bf16
same_bits 3 --input "$source_dir/inputs/attention_window.h5" --schedule halo --layout contiguous -n 1
same_bits 4 $small --schedule ring
# The test of bits can fail: other schedules, numbers of ranks and orders of merges have other bits.
for other in "--cp 4 --schedule canonical" "--cp 2 --schedule ring" "--cp 4 --schedule ring --merge at-end"; do
  expect 0 'VERIFY PASSED' "$attention" --replay $small $other -o other.h5
  expect 1 'VERIFY FAILED' "$apps/gyre-compare" other.h5 ranks.h5 --rtol 0 --atol 0
done

# Rows say what they are, and nothing looks like a time of ranks.
expect 0 'replayed: one process runs the 8 ranks in turn' "$attention" --replay --cp 8 $small --schedule all --layout all -J rows.json --csv rows.csv -v
! grep -qE '^FOM|^# fastest' output || fail "a figure of merit of a replay: $(cat output)"
grep -q 'RESULT UNOFFICIAL' output || fail "not unofficial: $(cat output)"
/usr/bin/python3 - rows.json <<'PY'
import json, sys
document = json.load(open(sys.argv[1]))
rows = document["results"]
assert document["configuration"]["replay"] is True and document["configuration"]["cp"] == 8
assert len(rows) > 60, len(rows)
for row in rows:
    assert row["key"]["replay"] is True and row["key"]["cp"] == 8, row["key"]
    assert row["measurements"]["check"] == "ok", row
    for name in ("exposed", "overlap", "exposed_time", "compute_only", "communication_only"):
        assert row["measurements"][name] is None, (name, row)
    rate = row["model"]["flops"] / row["measurements"]["time"] / 1e9  # of one process
    assert abs(row["measurements"]["rate"] / rate - 1) < 1e-6, row
PY
[ "$(column rows.csv replay | sort -u)" = true ] || fail "rows do not say that they are replayed: $(head -2 rows.csv)"
expect 1 'VERIFY FAILED' "$attention" --replay --cp 4 $small --tol-scale 1e-6 -d bf16

# All ranks are in the memory of one process, with what a file needs of them.
expect 0 'VERIFY PASSED' "$attention" --replay --cp 4 --tokens 4K --heads 16 --kv-heads 4 --head-dim 128 --window 64 -d bf16 --partial-out bf16 \
  -n 1 -w 0 -o memory.h5 -J memory.json
/usr/bin/python3 - memory.json <<'PY'
import json, sys
memory = json.load(open(sys.argv[1]))["memory"]
used = memory["peak_bytes"] - memory["start_bytes"]
assert memory["planned_bytes"] / 1.5 < used < memory["planned_bytes"] + 40e6, memory
PY

expect 2 '--replay in a run of 2 ranks: one process runs them all, without mpirun' "$MPIEXEC" -n 2 "$attention" --replay --cp 2 $small
expect 2 '--cp 2000 with --replay: at most 1024, as each rank has 1 of 1024 threads' "$attention" --replay --cp 2000 $small
expect 2 '--cp 300 with --replay: at most 256, as each rank has 4 of 1024 threads' "$attention" --replay --cp 300 --threads 4 $small
expect 2 '--replay has ranks in host memory, none on a GPU: --backend cpu, or without it' "$attention" --replay --cp 2 --backend cuda $small
expect 2 '--trace is about the time of ranks, which --replay does not show' "$attention" --replay --cp 2 $small --trace none.trace \
  --emulate-network alpha=1us,beta=1G --explain --at-least attention_rate=1
for text in '--emulate-network is about the time' '--explain shows a plan and --replay runs it' '--at-least is about the time'; do
  grep -qF -- "$text" output || fail "it does not say '$text': $(cat output)"
done
expect 2 '--merge at-end: schedule all-gather does not read it; ring and ring-forward do' "$attention" $small --schedule all-gather --merge at-end

/usr/bin/python3 "$source_dir/results/drift.py" "$apps" --quick -o "$PWD" >output 2>&1 || fail "$(cat output)"
/usr/bin/python3 - drift.csv <<'PY'
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))
assert len(rows) == 48, len(rows)
for row in rows:
    case, error, distance = (row["type"], row["schedule"], row["cp"]), float(row["error"]), float(row["distance"])
    assert 0 < error < 3e-6 and distance < 3 * error, row
    same = row["cp"] == "1" or row["schedule"] == "canonical"
    if row["schedule"] != "all-to-all":  # it may add the same terms in the same order
        assert (distance == 0) == same and (float(row["changed"]) == 0) == same, (case, row)
PY
grep -q 'cp 4' drift.txt && grep -q '<svg' drift.svg || fail "no table, or no picture"
echo "replay: all passed"
