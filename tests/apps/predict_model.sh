#!/usr/bin/env bash
# gyre-predict --model: scoring passes of a config.json and of a gyre/model, large grids, and what is refused.
source "$(dirname "$0")/../support/app_test.bash"
machine=$source_dir/inputs/machines/h100-sxm-8.toml
model=$source_dir/inputs/models/llama-3.1-8b.json
predict=("$apps/gyre-predict" --machine "$machine" --model "$model")

expect 0 'RESULT UNOFFICIAL' "${predict[@]}" --tokens 32K --batch 4 --cp 4,8 --dp 2 --tp 2 -J model.json --csv model.csv
grep -q '^VERIFY PASSED' output || fail "nothing was checked: $(cat output)"
shares=$(/usr/bin/python3 - "$machine" <<'PY'
import sys, tomllib
errors = tomllib.load(open(sys.argv[1], "rb"))["model"]["errors"]
print("; ".join(f"{e['ranks']} rank{'s' * (e['ranks'] != 'one')} +-{100 * e['share']['value']:.0f} %"
                for e in errors if e["pass"] == "fwd"))
PY
)
grep -qxF "# error of attention alone, 9 in 10 published times, forward: $shares" output ||
  fail "no errors: $(cat output)"
grep -q '^# fastest of 131072 tokens: dp=2 cp=' output || fail "nothing is the fastest: $(cat output)"
[ "$(grep -v '^# ' output | grep -vE '^(FOM|VERIFY|RESULT)' | wc -L)" -le 120 ] || fail "more than 120 columns: $(cat output)"
/usr/bin/python3 "$source_dir/tests/support/check_results.py" "$source_dir/results/gyre-result-1.schema.json" model.json model.csv || fail "see above"
/usr/bin/python3 - <<'PY' || fail "see above"
import json
rows = json.load(open("model.json"))["results"]
assert len(rows) > 4, len(rows)
for row in rows:
    m = row["measurements"]
    parts = m["linear"] + m["elementwise"] + m["attn"] + m["cp_wait"] + m["tp_wait"] + m["head"]
    assert abs(parts - 100) < 1e-6 and 0 < m["linear"] < 100, row
PY

# Documents of a file, a model with weights, and bins that replicas share unevenly.
expect 0 'RESULT' "$apps/gyre-predict" --machine "$machine" --model "$source_dir/inputs/model_tiny.h5" \
  --input "$source_dir/inputs/docs_tiny.h5" --capacity 2K --cp 2 --dp 3 --schedule ring --csv tiny.csv
[ "$(column tiny.csv imb_dp_percent)" != 0.0 ] || fail "three replicas are equally long: $(cat tiny.csv)"
# A prompt and its answers, stored once, are fewer tokens.
for i in 1 2 3 4 5; do
  { head -c 200 "$source_dir/LICENSE"; head -c $((340 + 50 * i)) "$source_dir/LICENSE" | tail -c 40; } >"answer$i"
done
expect 0 documents "$apps/gyre-import" -o rollouts.h5 answer?
for share in "" --share-prefixes; do
  expect 0 'VERIFY PASSED' "${predict[@]::3}" --model "$source_dir/inputs/model_tiny.h5" --input rollouts.h5 --cp 2 \
    --schedule group-cast $share --csv "rollouts$share.csv"
done
[ "$(column rollouts.csv tokens | head -1) $(column rollouts--share-prefixes.csv tokens | head -1)" = "1210 406" ] ||
  fail "tokens: $(cat rollouts*.csv)"
# 16 384 ranks, each replica with documents of its own.
expect 0 'tokens: dp=32 cp=64 tp=8, ring under dual-chunk-swap' "${predict[@]}" --dp 32 --cp 64 --tp 8 --schedule ring \
  --layout dual-chunk-swap --gen dist=long-tailed,count=2000,max=64K,seed=3 --capacity 64K

# Nothing to score.
expect 0 'no pass has tokens' "${predict[@]}" --gen dist=fixed,length=0,count=3 --cp 2 --schedule ring

# Recurrent layers: moving rows of hidden_size instead of what the projections make of them, 2 x 2048 instead of 12352 + 4096
# elements; with two tensor-parallel ranks, each of which has half of the projections, half as many times.
hybrid=("${predict[@]::3}" --model "$source_dir/inputs/models/qwen3.5-35b-a3b-dense.json" --tokens 16K --schedule ring,all-to-all)
expect 0 '#     behind the projections they would take' "${hybrid[@]}" --cp 8 --layout contiguous,dual-chunk-swap -J hybrid.json --csv hybrid.csv
grep -qE 'send [0-9.]+ MB, 4\.02 times$' output || fail "not 4.02 times: $(cat output)"
for line in 'of 10 layers of softmax attention: ' 'of 30 recurrent layers: ' 'pass with one layout: ' 'pass with a layout for each kind: '; do
  grep -qF "#   $line" output || fail "no line '$line': $(cat output)"
done
/usr/bin/python3 "$source_dir/tests/support/check_results.py" "$source_dir/results/gyre-result-1.schema.json" hybrid.json hybrid.csv || fail "see above"
/usr/bin/python3 - <<'PY' || fail "see above"
import json
rows = json.load(open("hybrid.json"))["results"]
assert {row["key"]["recurrent_layout"] for row in rows} == {"contiguous"} and len(rows) >= 12, len(rows)
for row in rows:
    m = row["measurements"]
    parts = sum(m[name] for name in ("linear", "elementwise", "attn", "cp_wait", "tp_wait", "head", "recur", "st_wait", "relayout"))
    assert abs(parts - 100) < 1e-6 and m["recur"] > 0 and m["relayouts"] == 60, row
    # Under one layout, rows of halos alone travel: three of each rank but the last.
    assert (m["relayout_sent"] == 30 * 3 * 2048 * 2 / 1e6) == (row["key"]["layout"] == "contiguous"), row
PY
expect 0 'MB, 2.01 times' "${hybrid[@]}" --cp 4 --tp 2 --state-schedule state-scan
expect 0 '# refused: cp 4 under dual-chunk-swap: recurrent layout striped, states state-scan: ' "${hybrid[@]}" --cp 4 \
  --recurrent-layout contiguous,striped --state-schedule state-scan

refused() { expect 2 "$@"; }
refused '--state-schedule, --recurrent-layout: the model has no recurrent layers' "${predict[@]}" --state-schedule state-scan
refused '--recurrent-layout goes with --model' "${predict[@]::3}" --recurrent-layout all
refused '--state-schedule goes with --recurrence, or --model' "${predict[@]::3}" --state-schedule state-scan
refused 'nothing can be predicted:' "${hybrid[@]}" --cp 4 --recurrent-layout striped
refused '--heads 4: the heads are the model' "${predict[@]}" --heads 4
refused '--pass bwd: a scoring pass has no backward' "${predict[@]}" --pass bwd
refused '--svg shows one attention; leave out --model' "${predict[@]}" --svg none.svg
refused '--partial-out, --partial-dq, --wire-dkv: a scoring pass chooses them by --dtype' "${predict[@]}" --partial-out bf16
refused '--mask, --window, --queries: a scoring pass has causal attention' "${predict[@]}" --mask full
refused '--mask, --window, --queries: a scoring pass has causal attention' "${predict[@]}" --mask full --input "$source_dir/inputs/docs_tiny.h5"
refused '--gen and --input are two sets of documents' "${predict[@]}" --gen dist=fixed --input none.h5
refused "--tp 3 does not divide the model's num_attention_heads = 32" "${predict[@]}" --tp 3
refused '--dp 65536 --cp 65536 --tp 8 are 34359738368 ranks; at most 16777216' "${predict[@]}" --dp 65536 --cp 65536 --tp 8
refused '--dp 2 goes with --model' "$apps/gyre-predict" --machine "$machine" --dp 2
refused '--input goes with --model' "$apps/gyre-predict" --machine "$machine" --input none.h5
refused "b200-sxm-8.toml: the machine has no 'linears'" "$apps/gyre-predict" --model "$model" \
  --machine "$source_dir/inputs/machines/b200-sxm-8.toml"
with() { # NAME REPLACEMENT: another config.json
  sed "$2" "$model" >"$1.json"
}
with experts 's/"vocab_size"/"num_local_experts": 8, "vocab_size"/'
refused "'num_local_experts' is 8, which means another decoder" "${predict[@]::3}" --model experts.json
with window 's/"vocab_size"/"sliding_window": 4096, "vocab_size"/'
refused "'sliding_window' is 4096, which means another decoder" "${predict[@]::3}" --model window.json
with missing '/hidden_size/d'
refused "missing.json lacks 'hidden_size'" "${predict[@]::3}" --model missing.json
with text 's/4096/"many"/'
refused "text.json: 'hidden_size' is \"many\"; wanted: a whole number" "${predict[@]::3}" --model text.json
with negative 's/4096/-1/'
refused 'hidden_size is -1; it must be at least 1' "${predict[@]::3}" --model negative.json
with deep 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 2147483647/'
refused 'num_hidden_layers is 2147483647; it must be at most 16384' "${predict[@]::3}" --model deep.json
with wide 's/"hidden_size": [0-9]*/"hidden_size": 2147483646/'
refused 'hidden_size is 2147483646; it must be at most 1048576' "${predict[@]::3}" --model wide.json
refused 'visible pairs of a query and a key; at most 2^63 - 1 can be counted: ' "${predict[@]}" --schedule ring --tokens 1G
refused 'steps, messages and rectangles, at most 1073741824)' "${predict[@]}" --cp 65536 --schedule ring --gen dist=fixed,length=1K,count=4
echo '{' >broken.json
refused 'broken.json: parse error at line 2, column 1: ' "${predict[@]::3}" --model broken.json
refused "--model llama-3.1-80b: there is no such file; models that Gyre brings: bench-8-layers, llama-3.1-70b, llama-3.1-8b, qwen3.5-35b-a3b-dense; nearest:" \
  "${predict[@]::3}" --model llama-3.1-80b
echo "predict --model: all passed"
