#!/usr/bin/env bash
# gyre-info: what it prints, the document gyre-machine/1, and what other programs make of it.
# Usage: info.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
info=$apps/gyre-info
attention=("$apps/gyre-attention" --tokens 64 --heads 2 --kv-heads 2 --head-dim 16 -n 1)

# holds FILE CONDITION: a condition in Python on `d`, the document in FILE.
holds() {
  /usr/bin/python3 - "$@" <<'PYTHON' || fail "$1: not so: $2"
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    d = json.load(file, parse_constant=lambda name: sys.exit(f"{name} is no number of JSON"))
sys.exit(0 if eval("(" + sys.argv[2] + ")") else 1)
PYTHON
}

expect 0 'NUMA nodes' "$info" --quick -J quick.json
expect 0 '# machine ' "$info" --quick
expect 0 ' schedules ' "$info" --quick
expect 0 'device ch4:ucx' "$info" --quick
grep -q 'measured' output && fail "--quick measures"
[ "$(grep '^# machine ' output | wc -L)" -le 120 ] || fail "a machine line of more than 120 columns"
holds quick.json 'd["schema"] == "gyre-machine/1" and d["measured"] is None'
holds quick.json 'd["hosts"][0]["cores"] >= 1 and d["hosts"][0]["memory_bytes"] > 2**20'
holds quick.json '[r["rank"] for r in d["ranks"]] == [0] and d["ranks"][0]["cpus"]'
holds quick.json 'all(d[key] for key in ("suite", "build", "run", "libraries", "mpi", "capabilities"))'

# What can be chosen is what the programs offer.
"$apps/gyre-attention" --help >help
for name in $(/usr/bin/python3 -c 'import json
d = json.load(open("quick.json"))["capabilities"]
print(*d["schedules"], *d["layouts"])'); do
  grep -q "^  $name " help || fail "gyre-attention --help does not know $name"
done
"$apps/gyre-logprobs" --list >list
for name in $(/usr/bin/python3 -c 'import json
print(*json.load(open("quick.json"))["capabilities"]["operations"])'); do
  grep -q "$name" list || fail "gyre-logprobs --list does not know $name"
done

for ranks in 1 2 4 8; do
  expect 0 'f32 FMA' "$MPIEXEC" -n "$ranks" "$info" --seconds 0.002 --json "machine_$ranks.json"
  holds "machine_$ranks.json" "d['measured']['ranks'] == $ranks == len(d['ranks'])"
  holds "machine_$ranks.json" 'd["measured"]["rates"]["one_rank"]["read_bytes_per_s"]["value"] > 0'
  holds "machine_$ranks.json" "(d['measured']['messages']['inside_host'] is None) == ($ranks == 1)"
done
holds machine_2.json 'd["measured"]["messages"]["inside_host"]["messages"][0]["bytes"] == 8'
holds machine_2.json 'd["mpi"]["inside_host"]["small"]'
expect 0 '2 threads' "$info" --threads 2 --seconds 0.002
if grep -q '"software-gpu"' quick.json; then
  ! grep -q '"gpu-aware-mpi"' quick.json || fail "MPI takes no GPU memory here"
  GYRE_SOFTGPU_MPI=1 expect 0 'gpu-aware-mpi' "$info" --quick
  expect 0 "GPU's memory" "$info" --backend cuda --seconds 0.002 -J gpu.json
  holds gpu.json 'd["measured"]["gpu"]["copy_bytes_per_s"] > 0 and d["measured"]["comm"] == "nccl"'
fi
expect 0 'job 7, cluster c, partition p, nodes n[1-2]' env SLURM_JOB_ID=7 SLURM_CLUSTER_NAME=c SLURM_JOB_PARTITION=p \
  'SLURM_JOB_NODELIST=n[1-2]' "$info" --quick -J slurm.json
holds slurm.json 'd["slurm"]["nodes"] == "n[1-2]"'
UCX_TLS=tcp expect 0 'short messages by tcp/' "$MPIEXEC" -n 2 "$info" --quick
timeout 60 "$info" -q --quick >output || fail "-q --quick fails"
[ ! -s output ] || fail "-q --quick prints something"

# Other programs name the machine in every result, and what was measured where there is --machine.
expect 0 '# machine ' "${attention[@]}" -J plain.json
holds plain.json 'd["machine"]["hosts"][0]["cores"] >= 1 and "measured" not in d["machine"]'
holds plain.json 'd["ranks"][0]["cpus"] and d["machine"]["mpi"]["library"]'
expect 0 'RESULT' "$MPIEXEC" -n 2 "${attention[@]}" --machine machine_2.json -J with.json
sum=$(sha256sum machine_2.json)
holds with.json "d['machine']['measured']['sha256'] == '${sum%% *}'"
holds with.json 'd["machine"]["measured"]["file"] == "machine_2.json"'
holds with.json "d['machine']['measured']['rates']['one_core_fma_flops_per_s'] ==
  json.load(open('machine_2.json'))['measured']['rates']['one_core_fma_flops_per_s']['value']"
expect 0 'RESULT' "$apps/gyre-logprobs" --op entropy --tokens 8 --vocab 64 --machine machine_2.json -J l.json
holds l.json 'd["machine"]["measured"]["rates"]'

# Files that are no measurements of this machine.
expect 2 '--machine goes with a run, not with --explain' "${attention[@]}" --explain --machine machine_2.json
expect 2 "cannot read 'none.json'" "${attention[@]}" --machine none.json
expect 2 "quick.json: measured is null; wanted: what gyre-info --json writes without --quick" \
  "$MPIEXEC" -n 2 "${attention[@]}" --machine quick.json
[ "$(grep -c 'measured is null' output)" -eq 1 ] || fail "the error is printed more than once"
expect 2 'plain.json: schema is "gyre-result/1"; wanted: "gyre-machine/1"' \
  "${attention[@]}" --machine plain.json
echo 'no JSON' >text.json
expect 2 'text.json: ' "${attention[@]}" --machine text.json
truncate -s 17M large.json
expect 2 'large.json: 17825792 bytes; wanted: gyre-machine/1, at most 16777216 bytes' \
  "${attention[@]}" --machine large.json
sed 's/"rates"/"rate"/' machine_2.json >typo.json
expect 2 "typo.json: measured has no 'rates'; nearest: 'rate'" "${attention[@]}" --machine typo.json
sed 's/"cpu": "[^"]*"/"cpu": "another"/' machine_2.json >other.json
expect 2 "hosts[0] is another with" "${attention[@]}" --machine other.json
expect 2 "cannot read '.': it is a folder" "${attention[@]}" --machine .
expect 2 "--json './machine_2.json' is the file of --machine" "${attention[@]}" --machine machine_2.json --json ./machine_2.json

expect 2 "--seconds: '0' is not at least 0.001" "$info" --seconds 0
expect 2 '--threads 2: --quick measures nothing' "$info" --quick --threads 2
expect 2 '--seconds 1: --quick measures nothing' "$info" --quick --seconds 1
expect 2 'there is no folder' "$info" --quick -J no/machine.json
expect 2 'such as --json machine.json' "$info" --quick -J machine.jsonl # one document of many lines
expect 2 'unknown option --machine' "$info" --machine machine_2.json
echo "info: all passed"
