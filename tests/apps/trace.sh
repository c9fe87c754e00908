#!/usr/bin/env bash
# Timelines of gyre-attention: format, messages and arrows, of schedules that communicate in different ways, on 1, 2 and 4 ranks.
# Usage: trace.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
attention=$apps/gyre-attention
checker=$source_dir/tests/support/check_attention_trace.py
small="--tokens 70 --heads 4 --kv-heads 4 --head-dim 8 -n 1 -w 0 -v"
check() { /usr/bin/python3 "$checker" trace.json "$@" output; }

for ranks in 1 2 4; do
  for schedule in ring all-gather all-to-all; do
    expect 0 'RESULT' "$MPIEXEC" -n $ranks "$attention" $small --schedule $schedule --trace trace.json
    check $ranks || fail "$schedule on $ranks ranks: see above"
  done
done
# One direction; sinks, whose gradient is summed in the backward pass; messages that take their time.
expect 0 'RESULT' "$MPIEXEC" -n 2 "$attention" $small --schedule ring --pass fwd --sinks --trace trace.json
check 2
expect 0 'RESULT' "$MPIEXEC" -n 3 "$attention" $small --schedule group-cast --sinks -d bf16 --emulate-network alpha=2ms,beta=10M --trace trace.json
check 3

# What is wrong in a timeline is noticed.
notices() {
  /usr/bin/python3 - "$1" <<'PY'
import json, sys
document = json.load(open("trace.json"))
events = document["traceEvents"]
exec(sys.argv[1])
json.dump(document, open("trace.json", "w"))
PY
  ! check 3 2>said || fail "not noticed: $1"
  grep -qF "$2" said || fail "'$2' is not said of $1: $(cat said)"
}
cp trace.json good.json
while IFS='|' read -r change said; do
  cp good.json trace.json
  notices "$change" "$said"
done <<'CHANGES'
events.remove(next(e for e in events if e["ph"] == "f"))|has the phases 's'
[events.remove(next(e for e in events if e["ph"] == ph)) for ph in "sf"]|arrows:
next(e for e in events if e["ph"] == "s")["args"]["bytes"] += 1|bytes
next(m for e in events if e.get("cat") == "message" and e["ph"] == "X" for m in e["args"]["to"])["bytes"] += 1|bytes_sent
next(e for e in events if e.get("cat") == "wait")["tid"] = 99|pid 0 tid 99 has no thread_name
next(e for e in events if e.get("cat") == "wait")["cat"] = "pause"|category pause
events[:] = [e for e in events if e.get("cat") != "message"]|planned
CHANGES
echo "trace: all passed"
