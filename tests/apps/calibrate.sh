#!/usr/bin/env bash
# A machine is measured, predicted for, and asked for by name in a run of another program; one rank is too few.
source "$(dirname "$0")/../support/app_test.bash"

expect 2 'a run of 1 rank: it measures messages' "$apps/gyre-info" --model -J machine.json
expect 2 "'x' is no number of elements of a head" "$MPIEXEC" -n 2 "$apps/gyre-info" --model -J machine.json \
  --model-head-dims 32,x
timeout 200 "$MPIEXEC" -n 2 "$apps/gyre-info" --model --model-head-dims 32 -J machine.json >output 2>&1 || fail "exit $?: $(cat output)"
expect 0 'fastest at cp 2, 4096 tokens' "$apps/gyre-predict" --machine machine.json --cp 2,16 --tokens 4K --heads 4 \
  --kv-heads 2 --head-dim 32 -d f32
grep -q 'outside' output && fail "shapes that were measured are called extrapolated: $(cat output)"
for dtype in f32 bf16; do
  expect 0 'fastest at cp 4, 4096 tokens' "$apps/gyre-predict" --machine machine.json --recurrence gdn --cp 4 --tokens 4K -d $dtype
done
# A run with such a file says what was predicted of it, which is what gyre-predict says.
shape=(--tokens 256 --heads 4 --kv-heads 2 --head-dim 32 -d f32)
run=("$MPIEXEC" -n 2 "$apps/gyre-attention" "${shape[@]}" -n 1 -w 0)
expect 0 '# predicted to be the fastest, 256 tokens: ' "${run[@]}" --machine machine.json --schedule ring,all-gather --csv run.csv
expect 0 'RESULT' "$apps/gyre-predict" --machine machine.json "${shape[@]}" --cp 2 --schedule ring,all-gather \
  --layout dual-chunk-swap --csv predicted.csv
[ "$(column run.csv predicted_ms | wc -l)" -eq 4 ] || fail "not every row has a prediction: $(cat run.csv)"
paste <(column run.csv predicted_ms) <(column predicted.csv time_ms) | awk '!($1 > 0 && ($1 / $2 - 1) ^ 2 < 1e-12) { exit 1 }' ||
  fail "other predictions: $(cat run.csv predicted.csv)"
# --auto runs the case whose predicted time is the shortest.
expect 0 'RESULT' "$apps/gyre-predict" --machine machine.json "${shape[@]}" --cp 2 --layout all --csv predicted.csv
fastest=$(/usr/bin/python3 -c 'import collections, csv
times = collections.Counter()
for row in csv.DictReader(open("predicted.csv")):
    times[row["schedule"] + " under " + row["layout"]] += float(row["time_ms"])
print(min(times, key=times.get))')
expect 0 "# predicted to be the fastest, 256 tokens: $fastest, " "${run[@]}" --machine machine.json --auto --csv run.csv
[ "$(column run.csv check | tr '\n' ' ')" = 'ok ok ' ] || fail "more than one case, or a wrong one: $(cat run.csv)"
# Times of several cycles are means.
expect 0 "# predicted to be the fastest, 256 tokens: $fastest, $(sed -n 's/.*fastest, 256 tokens: [^,]*, \([0-9.]* ms\);.*/\1/p' output)" \
  "${run[@]}" --machine machine.json --auto -N 3
grep -q '"auto": true' <("${run[@]}" --machine machine.json --auto -J auto.json >/dev/null; cat auto.json) || fail "not recorded: $(cat auto.json)"
refused() { expect 2 "$@"; }
refused '--auto needs --machine FILE with a model of this machine' "${run[@]}" --auto
refused '--auto: the model of --machine is of ranks with one thread' "${run[@]}" --auto --machine machine.json --threads 2
refused '--auto: ranks take turns in a replay' "$apps/gyre-attention" "${shape[@]}" --replay --cp 2 --auto --machine machine.json
refused '--auto: the model of --machine is not of an emulated machine' "${run[@]}" --auto --machine machine.json --emulate-network alpha=1ms,beta=10M
refused '--auto chooses what runs, and --explain runs nothing' "$apps/gyre-attention" --explain --cp 2 --auto
# A pass of gyre-pipeline: the time that gyre-predict says, and with --auto its fastest choice, of recurrent layers too.
for name in tiny hybrid; do
  inputs=(--model "$source_dir/inputs/model_$name.h5" --input "$source_dir/inputs/docs_$name.h5")
  run=("$MPIEXEC" -n 2 "$apps/gyre-pipeline" "${inputs[@]}" -n 1)
  predict=("$apps/gyre-predict" --machine machine.json "${inputs[@]}" --capacity 8K --cp 2 -d f32)
  expect 0 " tokens: ring under balanced" "${run[@]}" --layout balanced --machine machine.json --csv run.csv
  expect 0 'VERIFY PASSED' "${predict[@]}" --schedule ring --layout balanced --state-schedule "$([ $name = tiny ] && echo all || echo state-gather)" --csv predicted.csv
  paste <(column run.csv predicted_ms) <(column predicted.csv time_ms) | awk '!($1 > 0 && ($1 / $2 - 1) ^ 2 < 1e-12) { exit 1 }' ||
    fail "other predictions: $(cat run.csv predicted.csv)"
  expect 0 '# fastest of ' "${predict[@]}" --layout all --recurrent-layout "$([ $name = tiny ] && echo contiguous || echo all)"
  fastest=$(sed -n 's/^# fastest of .*dp=1 cp=2 tp=1, \(.*\): [0-9]* tokens.*/\1/p' output)
  [ -n "$fastest" ] || fail "nothing is the fastest: $(cat output)"
  expect 0 'VERIFY PASSED' "${run[@]}" --machine machine.json --auto -J auto.json
  grep -qE "^# predicted to be the fastest, [0-9]* tokens: $fastest, [0-9.e-]* ms" output || fail "not $fastest: $(cat output)"
  grep -q '"auto": true' auto.json || fail "not recorded: $(cat auto.json)"
done
expect 0 "tokens: all-gather under " "${run[@]}" --machine machine.json --auto --schedule all-gather
run=("${run[@]::4}" --model "$source_dir/inputs/model_tiny.h5" --gen dist=fixed,length=32,count=2 -n 1)
refused '--auto needs --machine FILE with a model of this machine' "${run[@]}" --auto
refused '--auto: the model of --machine is not of divergences from a --teacher' "${run[@]}" --auto --machine machine.json --teacher "$source_dir/inputs/model.h5"
refused '--auto: it chooses what runs, and --dry-run runs nothing' "${run[@]}" --auto --dry-run
refused '--auto: no time can be predicted: ' "${run[@]}" --auto --machine machine.json --cp 3
refused "no time can be predicted: no linears of bf16; the machine has f32" "${run[@]}" --auto --machine machine.json -d bf16
/usr/bin/python3 -c 'import json
file = json.load(open("machine.json"))
del file["model"]
json.dump(file, open("measured.json", "w"))'
refused 'measured.json: there is no model in it; --auto needs' "${run[@]}" --auto --machine measured.json
refused 'measured.json: there is no model in it; --auto needs' "$MPIEXEC" -n 2 "$apps/gyre-attention" "${shape[@]}" --auto --machine measured.json
echo ok
