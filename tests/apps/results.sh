#!/usr/bin/env bash
# What is written of a run: JSON, lines and CSV follow the schema and hold the same numbers; a run that was killed goes on
# behind its last row; a run beside busy processes says that it is noisy; tables are at most 120 columns wide.
source "$(dirname "$0")/../support/app_test.bash"
inputs=$source_dir/inputs
conforms() { /usr/bin/python3 "$source_dir/tests/support/check_results.py" "$source_dir/results/gyre-result-1.schema.json" "$@" || fail "$*"; }
mpi=("$MPIEXEC" -n)

"$apps/gyre-pack" --input "$inputs/docs_tiny.h5" --capacity 144 --cp 4 -o packed.h5 >output
run() { # PROGRAM RANKS ARGUMENTS...: as a document and as lines
  local program=$1 ranks=$2
  shift 2
  expect 0 'RESULT ' "${mpi[@]}" "$ranks" "$apps/gyre-$program" "$@" -J "$program.json" --csv "$program.csv"
  local widest
  rm -f "$program.jsonl"
  widest=$({ grep -vE '^(# |FOM|VERIFY)' output && grep '^# config' output; } | wc -L)
  ((widest <= 120)) || fail "$widest columns: $(cat output)"
  conforms "$program.json" "$program.csv"
  local figure # each is one that --at-least takes
  for figure in $(/usr/bin/python3 -c 'import json, sys; print(*{fom["metric"] for fom in json.load(open(sys.argv[1]))["fom"]})' "$program.json"); do
    if [[ $program == predict ]]; then # it measures nothing, and so takes no --resume
      expect 0 'RESULT ' "${mpi[@]}" "$ranks" "$apps/gyre-$program" "$@" --at-least "$figure=0"
    else
      expect 2 'leave out one of the two' "${mpi[@]}" "$ranks" "$apps/gyre-$program" "$@" --at-least "$figure=1" -J figure.jsonl --resume finished
    fi
  done
  expect 0 'RESULT ' "${mpi[@]}" "$ranks" "$apps/gyre-$program" "$@" -J "$program.jsonl" --csv "$program.csv"
  conforms "$program.jsonl" "$program.csv"
}
run attention 2 --tokens 64 --heads 2 --kv-heads 2 --head-dim 16 --schedule all --layout all -n 2 -w 0
run logprobs 2 --op all --method all --tokens 32 --vocab 200 --picks 5 --hidden 16 -n 2 -w 0
run pipeline 2 --input "$inputs/docs_tiny.h5" --model "$inputs/model_tiny.h5" --cp 2 -n 2
run pack 1 --gen dist=long-tailed,count=200,max=1K --capacity 4K --algorithm all -n 3
run shard 2 --input packed.h5 --cp 4
run shard 1 --input "$inputs/bshd_tiny.h5" --cp 2 --chunks 2
run predict 1 --machine "$inputs/machines/h100-sxm-8.toml" --cp 4 --tokens 4K

# Killed behind some rows: these stay, the others are measured, none twice.
sweep=("${mpi[@]}" 2 "$apps/gyre-attention" --heads 2 --kv-heads 2 --head-dim 16 -b 32 -e 160 -i 32 --layout striped
  --schedule all -c none -w 0 -n 300 -J sweep.jsonl)
rows() { grep -c '"kind":"row"' sweep.jsonl || true; }
"${sweep[@]}" >output 2>&1 & # ends by itself, or is killed
launcher=$!
until [[ -e sweep.jsonl ]] && (($(rows) >= 5)) || ! kill -0 "$launcher" 2>/dev/null; do sleep 0.02; done
kill -KILL "$launcher" 2>/dev/null || true
wait "$launcher" || true
for _ in $(seq 100); do # until the ranks have lost their launcher
  pgrep -f -- "-J sweep.jsonl" >/dev/null || break
  sleep 0.1
done
before=$(rows) wanted=$((10 * ($(registered schedules | wc -w) - 1))) # 5 sizes and 2 passes; halo is refused
expect 0 'stay and were not measured again' "${sweep[@]}" --resume finished
all=$(rows)
((all == wanted && before < all)) || fail "$before rows, then $all, not $wanted"
distinct=$(grep '"kind":"row"' sweep.jsonl | sed 's/.*"key":\({[^}]*}\).*/\1/' | sort -u | wc -l)
((distinct == all)) || fail "$distinct different rows of $all"
conforms sweep.jsonl
expect 0 "$all rows of sweep.jsonl stay" "${sweep[@]}" --resume finished
grep -qF "$all rows that stay are UNVERIFIED (nothing checked" <<<"$(result)" || fail "rows that nobody checked: $(cat output)"
expect 2 'nearest: finished' "${sweep[@]}" --resume finish
expect 2 'needs -J FILE.jsonl' "$apps/gyre-shard" --input packed.h5 --resume finished
expect 2 "there is no column 'tim'" "$apps/gyre-shard" --input packed.h5 --columns tim

# Rows of an experiment that differs in an option are no rows of this one, and the same experiment has its rows again.
tells_apart() { # PROGRAM ARGUMENTS... -- ['OPTION VALUE']...
  local program=$1 common=() once
  shift
  while [[ $1 != -- ]]; do
    common+=("$1")
    shift
  done
  rm -f apart.jsonl
  for once in '' "${@:2}" ''; do
    expect 0 'RESULT ' "${mpi[@]}" 2 "$apps/gyre-$program" "${common[@]}" $once -n 1 -w 0 -J apart.jsonl --resume finished
    if grep -q 'were not measured again' output; then
      [[ -z $once && -e apart ]] || fail "rows of another experiment stay: $program $once"
    elif [[ -e apart && -z $once ]]; then
      fail "rows of the same experiment do not stay: $program"
    fi
    touch apart
  done
  rm apart
  conforms apart.jsonl
}
tells_apart attention --tokens 64 --heads 4 --kv-heads 4 --head-dim 16 --schedule all --layout all -- '--collectives library' \
  '--inner 2' '--stripe 2' '--chunk 8' '--seed 2' '--check-pairs 1000' '--batch 2' '--max-seconds 2' '--tol-scale 2'
tells_apart logprobs --op logprob --tokens 32 --vocab 200 -- '--seed 2' '--logit-scale 2' '--peaks 3' '--peak-height 2' \
  '--check-tokens 8' '--max-seconds 2'
tells_apart logprobs --op packed --gen dist=fixed,length=16,count=2 --capacity 32 --cp 2 --vocab 200 -- \
  '--layout striped' '--layout striped --stripe 2'
tells_apart attention --tokens 64 --heads 4 --kv-heads 4 --head-dim 16 -- '--layout striped --stripe 4' '--seed 3'
(
  export OMP_PROC_BIND=false
  cp apart.jsonl bound.jsonl
  expect 0 'RESULT ' "${mpi[@]}" 2 "$apps/gyre-attention" --tokens 64 --heads 4 --kv-heads 4 --head-dim 16 -n 1 -w 0 \
    -J bound.jsonl --resume finished
  ! grep -q 'were not measured again' output || fail "rows of another environment stay: $(cat output)"
)

# A figure that the program has not is found before anything is measured; nothing is written.
expect 2 'there is no figure atention_rate; nearest: attention_rate; there are: attention_rate' "$apps/gyre-attention" \
  --at-least atention_rate=1 -J none.json
expect 2 'there is no figure x; there are: ' "${mpi[@]}" 2 "$apps/gyre-logprobs" --at-least x=1 -J none.json
expect 2 'there is no figure fused_linear_rate; ' "$apps/gyre-logprobs" --op logprob --at-least fused_linear_rate=1 -J none.json
for figure in 'logits_rate --op raw-gather --pass fwd' 'speedup_over_upstream --op logprob --method upstream' \
  'speedup_over_upstream --op z-loss --method all' 'share_of_bandwidth --op fused-linear'; do
  expect 2 "there is no figure ${figure%% *}; " "$apps/gyre-logprobs" --at-least "${figure%% *}=0" ${figure#* } -J none.json
done
expect 2 'there is no figure documents_per_s; ' "$apps/gyre-pack" --gen dist=fixed,count=2 -n 1 --at-least documents_per_s=0 -J none.json
expect 2 'there is no figure pair_ratio; ' "$apps/gyre-shard" --gen dist=fixed,count=2 --ulysses --at-least pair_ratio=0 -J none.json
expect 2 'there is no figure predicted_tokens_per_s; ' "$apps/gyre-predict" --machine h100-sxm-8 --at-least predicted_tokens_per_s=0 \
  -J none.json
expect 2 "--at-least 'x' is not METRIC=VALUE" "$apps/gyre-pack" --gen dist=fixed,count=2 --at-least x -J none.json
grep -q RESULT output && fail "measured all the same: $(cat output)"
[[ ! -e none.json ]] || fail "none.json was written"

# Beside busy processes, one a core and one more, no run is valid, and each says why.
hogs=()
for _ in $(seq $(($(nproc) + 1))); do
  (while :; do :; done) &
  hogs+=($!)
done
trap 'kill "${hogs[@]}" 2>/dev/null; rm -rf "$scratch"' EXIT
noisy() {
  expect 0 'RESULT UNOFFICIAL' "$@"
  grep -q 'UNOFFICIAL.*noisy: ' <<<"$(result)" || fail "nothing about noise: $(cat output)"
}
noisy "${mpi[@]}" 2 "$apps/gyre-attention" --tokens 1K --heads 4 --kv-heads 4 --pass fwd --max-seconds 0.5
noisy "${mpi[@]}" 2 "$apps/gyre-logprobs" --op logprob --tokens 256 --vocab 8K --pass fwd --max-seconds 0.5
noisy "${mpi[@]}" 2 "$apps/gyre-pipeline" --input "$inputs/docs_tiny.h5" --model "$inputs/model_tiny.h5" --cp 2 --max-seconds 0.5
echo ok
