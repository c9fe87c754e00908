#!/usr/bin/env bash
# gyre-pipeline with every schedule and every layout: equal to the independent float64 reference, twice the same bits, and
# impossible configurations refused. pipeline_grids.sh has the grids.
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/pipeline_test.bash"

# Every schedule and every layout.
for schedule in "${schedules[@]}"; do
  compared 4 --cp 2 --tp 2 --bin 48 --schedule "$schedule"
  # It alone needs what scoring never gives, a window.
  ((refusals == 0)) || [[ $schedule == halo ]] || fail "$schedule refused"
  refusals=0
done
for layout in "${layouts[@]}"; do
  compared 4 --cp 4 --bin 48 --layout "$layout"
  grep -qE "^FOM .* layout=$layout schedule=ring\$" "$scratch/log" || fail "no FOM of $layout: $(cat "$scratch/log")"
done
compared 3 --layout striped --stripe 4 --schedule group-cast --bin 50
((refusals == 0)) || fail "group-cast refused"
compared 4 --cp 4 --schedule all-to-all-ring --inner 2 --layout balanced --chunk 4 --bin 50
config() { sed -n 's/^# config //p' "$scratch/log" | xargs -d '\n'; }
grep -qE ' layout=balanced chunk=4 schedule=all-to-all-ring inner=2 ' <<<"$(config)" ||
  fail "the configuration lacks its options: $(cat "$scratch/log")"
compared 2 --schedule all-gather-strided --heads-at-once 2
grep -qE ' heads_at_once=2 ' <<<"$(config)" || fail "the configuration lacks its option: $(cat "$scratch/log")"

# The same run twice.
pipeline 4 --cp 2 --tp 2 -c none -o "$scratch/a.h5" >"$scratch/log"
grep -q '^RESULT UNVERIFIED' "$scratch/log" || fail "an unchecked run must say so: $(cat "$scratch/log")"
pipeline 4 --cp 2 --tp 2 -c none -o "$scratch/b.h5" >"$scratch/log"
same "$scratch/a.h5" "$scratch/b.h5" 0 "two runs differ"

# bf16, against the float64 reference of the same model, hidden states and what all errors have in common included.
for options in "" "--residual bf16"; do
  # shellcheck disable=SC2086
  pipeline 4 --cp 2 --tp 2 -d bf16 $options -o "$scratch/b.h5" >"$scratch/log" || fail "-d bf16 $options: $(cat "$scratch/log")"
  grep -q '^VERIFY PASSED 6/6 ' "$scratch/log" || fail "-d bf16 $options: $(cat "$scratch/log")"
  differ "$scratch/a.h5" "$scratch/b.h5" 1e-4 "-d bf16 $options has the scores of f32"
done

# bf16, against references of wrong parameters, whose every single error is within its tolerance.
/usr/bin/python3 - "$source_dir/inputs" "$scratch" <<'PY'
import shutil, sys, h5py
inputs, scratch = sys.argv[1:]
with h5py.File(f"{inputs}/model.h5") as f:
    theta, epsilon = (f["model"].attrs[name] for name in ("rope_theta", "rms_norm_eps"))
def model(name, change):
    shutil.copy(f"{inputs}/model.h5", f"{scratch}/{name}.h5")
    with h5py.File(f"{scratch}/{name}.h5", "r+") as f:
        f.attrs.pop("content_sha256", None)
        change(f["model"])
model("theta", lambda m: m.attrs.__setitem__("rope_theta", 2 * theta))
model("epsilon", lambda m: m.attrs.__setitem__("rms_norm_eps", 100 * epsilon))
model("head", lambda m: m["head"].__setitem__(..., m["head"][...] * 1.01))
model("offset", lambda m: None)
shutil.copy(f"{inputs}/docs_small.h5", f"{scratch}/documents.h5")
with h5py.File(f"{scratch}/documents.h5", "r+") as f:
    f.attrs.pop("content_sha256", None)
    del f["reference"]
PY
# scores MODEL ARGUMENTS...: of the trained model, or a changed one.
scores() {
  timeout 120 "$MPIEXEC" -n 2 "$apps/gyre-pipeline" --model "$1" -n 1 -w 0 "${@:2}" >"$scratch/log"
}
for wrong in theta epsilon head offset; do
  scores "$scratch/$wrong.h5" --input "$scratch/documents.h5" -c none -o "$scratch/scores.h5" || fail "$wrong: $(cat "$scratch/log")"
  /usr/bin/python3 - "$scratch" $wrong <<'PY'
import shutil, sys, h5py
scratch, wrong = sys.argv[1:]
shutil.copy(f"{scratch}/documents.h5", f"{scratch}/answers.h5")
with h5py.File(f"{scratch}/answers.h5", "r+") as f, h5py.File(f"{scratch}/scores.h5") as scores:
    for name in ("logprob", "entropy"):
        f[f"reference/{name}"] = scores[f"results/{name}"][...].astype("f8") - (0.1 if wrong == "offset" and name == "logprob" else 0)
PY
  status=0
  scores "$source_dir/inputs/model.h5" --input "$scratch/answers.h5" -d bf16 --cp 2 || status=$?
  if ((status != 1)) || ! grep -qE '^VERIFY   (logprob|entropy): the (rms|mean|factor) of all ' "$scratch/log"; then
    fail "$wrong: exit $status, $(cat "$scratch/log")"
  fi
done
scores "$source_dir/inputs/model.h5" --input "$source_dir/inputs/docs_small.h5" -d bf16 --tp 2 || fail "$(cat "$scratch/log")"
grep -q '^VERIFY PASSED 8/8 ' "$scratch/log" || fail "$(cat "$scratch/log")"

# Drawn documents: the same scores on any grid, and those of the serial twin.
for ranks in 1 4; do
  timeout 120 "$MPIEXEC" -n "$ranks" "$apps/gyre-pipeline" --gen dist=uniform,count=9,max=60,seed=3 --model "$model" -n 1 --bin 64 \
    -o "$scratch/drawn$ranks.h5" >"$scratch/log" || fail "drawn documents on $ranks ranks: $(cat "$scratch/log")"
  grep -q '^documents=9 .* source="*dist=uniform,count=9,' <<<"$(config)" || fail "other documents: $(cat "$scratch/log")"
  grep -q '^VERIFY PASSED' "$scratch/log" || fail "drawn documents are not verified: $(cat "$scratch/log")"
  grep -qE '^FOM gyre-pipeline tokens_per_s_per_rank ' "$scratch/log" || fail "no rate of a rank: $(cat "$scratch/log")"
done
same "$scratch/drawn1.h5" "$scratch/drawn4.h5" 1e-4 "drawn documents differ between grids"

# Impossible grids: exit 2, all problems at once, the nearest grids, nothing written.
out=$scratch/never.h5
refused() { # TEXT RANKS ARGUMENTS...
  local text=$1 status=0
  shift
  pipeline "$@" -o "$out" >"$scratch/log" 2>&1 || status=$?
  ((status == 2)) || fail "exit $status, not 2, for $*: $(cat "$scratch/log")"
  grep -qF -- "$text" "$scratch/log" || fail "'$text' is not in: $(cat "$scratch/log")"
  [[ ! -e $out ]] || fail "a refused run wrote its output"
}
refused "--tp 3 does not divide the model's num_attention_heads = 8" 3 --tp 3
refused "the nearest grids of this run's ranks: dp=3 cp=1 tp=1 | dp=1 cp=3 tp=1" 3 --tp 3
refused "one of --input and --gen is needed, and not both" 2 --gen dist=fixed
refused "dp=1 cp=3 tp=1 is 3 ranks, but the run has 4" 4 --cp 3
refused "--residual bf16 needs --dtype bf16" 1 --residual bf16
refused "--bin 50 is not a multiple of 2 cp = 4; the nearest are 48 and 52" 2 --cp 2 --bin 50
refused "nearest: --schedule" 1 --shedule ring
refused "'rings' is not one of $(printf '%s, ' "${schedules[@]}" | sed 's/, $//'); nearest: ring" 1 --schedule rings
refused "'stripe' is not one of $(printf '%s, ' "${layouts[@]}" | sed 's/, $//'); nearest: striped" 1 --layout stripe
refused "schedule all-to-all-ring: inner groups of 3 do not divide 4 ranks" 4 --schedule all-to-all-ring --inner 3
refused "--stripe 8: layout zigzag does not read it; striped does" 1 --stripe 8 --layout zigzag
refused "--chunk 8: layout zigzag does not read it; balanced and balanced-joint do" 1 --chunk 8 --layout zigzag
refused "--inner 2: schedule ring does not read it; all-to-all-ring does" 1 --inner 2
refused "--heads-at-once 2: schedule all-gather does not read it; all-gather-strided does" 1 --schedule all-gather --heads-at-once 2
refused "schedule all-gather-strided: 9 KV heads at once of" 1 --schedule all-gather-strided --heads-at-once 9
out=$scratch/no/folder/out.h5
refused "cannot write '$out': there is no folder" 1
out=$scratch/never.h5

# A plan needs no ranks.
pipeline 1 --cp 64 --dp 2 --dry-run >"$scratch/log"
grep -q 'dp=2 cp=64 tp=1, dual-chunk-swap, ring: nothing was computed' "$scratch/log" || fail "$(cat "$scratch/log")"
pipeline 1 --cp 64 --schedule group-cast --layout contiguous --dry-run >"$scratch/log"
grep -q 'dp=1 cp=64 tp=1, contiguous, group-cast: nothing was computed' "$scratch/log" || fail "$(cat "$scratch/log")"
refused "--columns goes with a run, not with --dry-run" 1 --dry-run --columns all

# The real model against its reference, hidden states included.
input=$source_dir/inputs/docs_small.h5 model=$source_dir/inputs/model.h5
for grid in "4 --cp 2 --tp 2" "3 --cp 3"; do
  read -ra arguments <<<"$grid"
  pipeline "${arguments[@]}" >"$scratch/log"
  grep -q '^VERIFY PASSED 8/8 ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
done
model=$source_dir/inputs/model_tiny.h5

# The serial twin, where the input has no reference.
timeout 60 "$apps/gyre-import" -o "$scratch/text.h5" "$source_dir/LICENSE" "$source_dir/CMakePresets.json" >"$scratch/log"
input=$scratch/text.h5
pipeline 2 --cp 2 --layout zigzag --schedule all-gather --json "$scratch/r.json" --csv "$scratch/r.csv" --top 1 >"$scratch/log"
grep -q '^VERIFY PASSED 3/3 ' "$scratch/log" || fail "$(cat "$scratch/log")"
/usr/bin/python3 - "$scratch/r.json" "$scratch/r.csv" <<'PY'
import csv, json, sys
result = json.load(open(sys.argv[1]))
assert result["schema"] == "gyre-result/1", result["schema"]
assert len(result["results"][0]["samples_ms"]) == 2, "samples of two ranks"
key = result["results"][0]["key"]
assert key == {"grid": "dp=1 cp=2 tp=1", "layout": "zigzag", "schedule": "all-gather"}, key
assert result["configuration"]["layout"] == "zigzag", result["configuration"]
assert {f["metric"] for f in result["fom"]} >= {"tokens_per_s", "bits_per_byte"}, result["fom"]
header, row = csv.reader(open(sys.argv[2]))
assert row[header.index("layout")] == "zigzag", (header, row)
PY

# A prompt and its answers, stored once: every document has the same scores, and the file says where they lie.
for i in 1 2 3 4 5; do
  { head -c 200 "$source_dir/LICENSE"; head -c $((340 + 50 * i)) "$source_dir/LICENSE" | tail -c 40; } >"$scratch/answer$i"
done
timeout 60 "$apps/gyre-import" -o "$scratch/rollouts.h5" "$scratch"/answer? "$source_dir/CMakePresets.json" >"$scratch/log"
input=$scratch/rollouts.h5
pipeline 2 --cp 2 -o "$scratch/a.h5" >"$scratch/log"
for grid in "1" "2 --cp 2" "2 --tp 2" "4 --cp 4 --layout balanced --schedule group-cast" "4 --dp 2 --cp 2 --bin 1K --layout zigzag"; do
  read -ra arguments <<<"$grid"
  pipeline "${arguments[@]}" --share-prefixes -o "$scratch/b.h5" >"$scratch/log"
  grep -q '^VERIFY PASSED 3/3 ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
  grep -q '^# prefixes  6 documents in 2 trees: ' "$scratch/log" || fail "$grid: $(cat "$scratch/log")"
  same "$scratch/a.h5" "$scratch/b.h5" 1e-4 "$grid"
done
grep -q '(0,0): -1, 201, 0, 5' <(h5dump -d /packed/prefixes/nodes "$scratch/b.h5") || fail "$(h5dump -g /packed "$scratch/b.h5")"
pipeline 1 --share-prefixes --dry-run >"$scratch/log"
grep -q '^# prefixes  6 documents in 2 trees: ' "$scratch/log" || fail "$(cat "$scratch/log")"
# Documents without a prediction: nothing to score is said, claimed by nobody, and written as such.
for documents in "" "0 0 0" "1 0 1"; do
  read -ra lengths <<<"$documents"
  documents_of "$scratch/rollouts.h5" "$scratch/few.h5" "${lengths[@]}"
  input=$scratch/few.h5
  for grid in "1" "4 --cp 2 --tp 2"; do
    read -ra arguments <<<"$grid"
    pipeline "${arguments[@]}" -o "$scratch/none.h5" >"$scratch/log" || fail "exit code $?: $(cat "$scratch/log")"
    grep -q '^# score  nothing to score: no token has a next one' "$scratch/log" || fail "$(cat "$scratch/log")"
    grep -q '^VERIFY SKIPPED' "$scratch/log" || fail "$(cat "$scratch/log")"
    grep -q '^RESULT UNVERIFIED (nothing to check: no token has a next one' "$scratch/log" || fail "$(cat "$scratch/log")"
    grep -q '( 0 )' <(h5dump -H -d /results/logprob "$scratch/none.h5") || fail "$(h5dump -H "$scratch/none.h5")"
    rm "$scratch/none.h5"
  done
done
input=$scratch/rollouts.h5
out=$scratch/never.h5
refused 'steps, messages and rectangles, at most 1073741824); ' 1 --dry-run --cp 65536
refused '--min-prefix 8 needs --share-prefixes' 1 --min-prefix 8
refused '--min-prefix' 1 --share-prefixes --min-prefix 0
# A row of an earlier run stays. Then nothing is scored, so that nothing can be written.
input=$source_dir/inputs/docs_tiny.h5
pipeline 2 -J "$scratch/rows.jsonl" >"$scratch/log" || fail "$(cat "$scratch/log")"
pipeline 2 -J "$scratch/rows.jsonl" --resume finished >"$scratch/log" || fail "$(cat "$scratch/log")"
grep -q '^# 1 row of .*rows.jsonl stay and were not measured again' "$scratch/log" || fail "$(cat "$scratch/log")"
! grep -q '^# score' "$scratch/log" || fail "scored again: $(cat "$scratch/log")"
refused '--resume leaves rows out, and --output needs them' 2 --resume finished

echo "ok: ${#schedules[@]} schedules, ${#layouts[@]} layouts"
