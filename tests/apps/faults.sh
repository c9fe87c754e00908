#!/usr/bin/env bash
# What goes wrong ends with the designed exit code and message on all ranks, and leaves no output file.
source "$(dirname "$0")/../support/app_test.bash"

input=$source_dir/inputs/docs_tiny.h5
model=$source_dir/inputs/model_tiny.h5

no_output() { [[ -z $(find "$scratch/out" -type f) ]] || fail "left behind: $(ls "$scratch/out")"; }
ends() { # STATUS TEXT ARGUMENTS... of a run on four ranks, which leaves no file but wrong results, by their own name
  local status=0 wanted=$1 text=$2
  shift 2
  timeout 60 "$MPIEXEC" -n 4 "$apps/gyre-pipeline" --cp 2 --tp 2 -n 1 -o "$scratch/out/o.h5" "$@" >"$scratch/log" 2>&1 || status=$?
  ((status == wanted)) || fail "exit $status, not $wanted: $*: $(cat "$scratch/log")"
  grep -qF -- "$text" "$scratch/log" || fail "'$text' is missing: $(cat "$scratch/log")"
  ((status != 1)) || rm "$scratch/out/o.invalid.h5"
  no_output
}
mkdir "$scratch/out"
touch "$scratch/start"

# A wrong weight: found by the reference's hidden states, at the layer that it is in; no figure of merit.
/usr/bin/python3 - "$model" "$scratch" <<'PY'
import shutil, sys, h5py
model, scratch = sys.argv[1:]
shutil.copy(model, f"{scratch}/wrong.h5")
with h5py.File(f"{scratch}/wrong.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/model/layers/1/w_up"][3, 5] += 0.25
shutil.copy(model, f"{scratch}/nan.h5")
with h5py.File(f"{scratch}/nan.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/model/layers/0/wq"][1, 2] = float("nan")
PY
ends 1 "RESULT INVALID" --input "$input" --model "$scratch/wrong.h5"
grep -q '^FOM' "$scratch/log" && fail "a wrong result printed a FOM"
grep -q 'hidden\[2\]' "$scratch/log" || fail "the layer is not named"
grep -q 'hidden\[1\].*err' "$scratch/log" && fail "a layer before the wrong weight is blamed"
grep -q 'another model file' "$scratch/log" || fail "the changed model file is not mentioned"
ends 2 "layers/0/wq" --input "$input" --model "$scratch/nan.h5"

# Corrupted inputs: a flipped bit in the data (checksum), a truncated file, a missing dataset, a token out of range.
/usr/bin/python3 - "$input" "$scratch" <<'PY'
import shutil, sys, h5py
source, scratch = sys.argv[1:]
with h5py.File(source) as f:
    at = f["/documents/tokens"].id.get_chunk_info(0).byte_offset
data = bytearray(open(source, "rb").read())
open(f"{scratch}/truncated.h5", "wb").write(data[: len(data) // 2])
data[at + 8] ^= 1
open(f"{scratch}/flipped.h5", "wb").write(data)
for name in ("missing", "range"):
    shutil.copy(source, f"{scratch}/{name}.h5")
with h5py.File(f"{scratch}/missing.h5", "r+") as f:
    del f.attrs["content_sha256"]
    del f["/documents/offsets"]
with h5py.File(f"{scratch}/range.h5", "r+") as f:
    del f.attrs["content_sha256"]
    f["/documents/tokens"][100] = 259
PY
ends 3 "/documents/tokens" --input "$scratch/flipped.h5" --model "$model"
ends 3 "truncated" --input "$scratch/truncated.h5" --model "$model"
ends 2 "/documents/offsets" --input "$scratch/missing.h5" --model "$model"
ends 2 "259" --input "$scratch/range.h5" --model "$model"
ends 2 "nosuch.h5" --input "$scratch/nosuch.h5" --model "$model"

# Processes by command: a supervisor is the child of another program, a rank the child of a supervisor, and a rank that
# reads a file may have a child, too.
ranks_of() { # PATTERN
  local process all
  all=$(pgrep -f "$1")
  for process in $all; do
    grep -qxF "$(ps -o ppid= -p "$process" | tr -d ' ')" <<<"$all" || pgrep -P "$process" -f "$1"
  done
}
# A killed and a stopped rank, in the middle of a long run.
signal_one_rank() { # SIGNAL STATUS TEXT [SIGNAL that another rank gets a moment before]
  local launcher ranks status=0
  timeout 60 "$MPIEXEC" -n 4 "$apps/gyre-pipeline" --input "$input" --model "$model" --cp 2 --tp 2 -n 1000000 \
    --timeout 3 -o "$scratch/out/o.h5" >"$scratch/log" 2>&1 &
  launcher=$!
  for _ in $(seq 200); do
    grep -q '^# input model' "$scratch/log" && break
    sleep 0.1
  done
  sleep 0.5
  ranks=$(ranks_of "^$apps/gyre-pipeline .*-o $scratch/out/o.h5")
  if [[ -n ${4:-} ]]; then
    kill "-$4" "$(head -1 <<<"$ranks")"
    sleep 0.3
  fi
  kill "-$1" "$(tail -1 <<<"$ranks")"
  wait "$launcher" || status=$?
  ((status == $2)) || fail "exit $status, not $2, after SIG$1: $(cat "$scratch/log")"
  # All ranks but the victim say what they were waiting for.
  (($(grep -c "$3" "$scratch/log") >= 3)) || fail "fewer than three ranks said '$3': $(cat "$scratch/log")"
  for _ in $(seq 50); do
    [[ -z $(find "$scratch/out" -type f) ]] && break
    sleep 0.1
  done
  no_output
}
# At start-up: MPI_Init of the others would wait for ever. (A machine with much to do may be past it before the kill.)
# Each run has an output of its own: processes of the one before may still be ending.
runs=0
signal_at_start() { # SIGNAL STATUS TEXT [supervisor]
  local launcher all parent victim='' status=0 output
  output=$scratch/out/s$((++runs)).h5
  timeout 60 "$MPIEXEC" -n 4 "$apps/gyre-pipeline" --input "$input" --model "$model" --cp 2 --tp 2 -n 1000000 \
    --timeout 3 -o "$output" >"$scratch/log" 2>&1 &
  launcher=$!
  # Ranks are forked before MPI_Init.
  until [[ -n $victim ]]; do
    kill -0 "$launcher" 2>/dev/null || fail "the run ended before a signal was sent: $(cat "$scratch/log")"
    all=$(pgrep -f "^$apps/gyre-pipeline .*-o $output") || continue
    for parent in $all; do
      grep -qxF "$(ps -o ppid= -p "$parent" | tr -d ' ')" <<<"$all" && continue # a rank
      victim=$(pgrep -P "$parent" -f "^$apps/gyre-pipeline" | head -1) || continue
      [[ ${4:-} != supervisor ]] || victim=$parent
      kill "-$1" "$victim" 2>/dev/null && break
      victim=''
    done
  done
  wait "$launcher" || status=$?
  ((status == $2)) || fail "exit $status, not $2, after SIG$1 at start-up: $(cat "$scratch/log")"
  [[ -z $3 ]] || grep -q "$3" "$scratch/log" || fail "'$3' is missing: $(cat "$scratch/log")"
  ((status != 1)) || rm "$scratch/out/o.invalid.h5"
  no_output
}
signal_at_start KILL 3 "rank . (.*, pid .*) was killed by signal 9 (Killed); out of memory?; step '"
signal_at_start TERM 3 'was killed by signal 15\|told to end (SIGTERM)'
signal_at_start STOP 4 'has been in MPI_Init for more than 3 s, stopped\|pid [0-9]*: stopped'

# Supervisors: when one is killed, its rank ends the run (and says so, which the launcher may drop).
signal_at_start KILL 3 '' supervisor

signal_one_rank KILL 3 "has died"
grep -q 'was killed by signal 9' "$scratch/log" || fail "the killed rank is not named"
# UCX may abort a moment before the process that it misses is gone.
signal_one_rank KILL 3 "has died" ABRT
grep -q 'a library called abort(); rank . has died' "$scratch/log" || fail "the abort is not explained: $(cat "$scratch/log")"
signal_one_rank STOP 4 "timeout after 3 s without progress"
grep -q 'stopped)' "$scratch/log" || fail "the stopped rank is not named"

# Files of shared memory of all these runs are gone, but those that another run has mapped.
unused_shared_memory() {
  local file
  for file in $(find /dev/shm -maxdepth 1 -newer "$scratch/start" \( -name 'mpich_shar_*' -o -name 'ucx_shm_posix_*' \)); do
    grep -qsF "$file" /proc/[0-9]*/maps || ! [[ -e $file ]] || echo "$file"
  done
}
for _ in $(seq 30); do
  left=$(unused_shared_memory)
  [[ -n $left ]] || break
  sleep 0.1
done
[[ -z $left ]] || fail "left in /dev/shm: $left"

# A supervisor that is stopped goes on; so does the run, to its end.
"$MPIEXEC" -n 2 "$apps/gyre-pipeline" --input "$input" --model "$model" --cp 2 -n 300 -o "$scratch/stopped.h5" >"$scratch/log" 2>&1 &
launcher=$!
parent=''
until [[ -n $parent ]]; do
  for process in $(pgrep -f "^$apps/gyre-pipeline .*stopped.h5"); do
    pgrep -P "$process" -f "^$apps/gyre-pipeline" >"$scratch/children" && parent=$process && break # it has forked its rank
  done
done
kill -STOP "$parent"
for _ in $(seq 200); do
  kill -0 "$launcher" 2>/dev/null || break
  sleep 0.1
done
kill -0 "$launcher" 2>/dev/null && fail "a stopped supervisor stops the run"
wait "$launcher" || fail "exit $? with a stopped supervisor: $(cat "$scratch/log")"

# GYRE_SUPERVISE=0: a rank is one process, which forks nothing, not even to read its files.
start_counted() { # SUPERVISE OUTPUT ITERATIONS
  COUNTED=$2 GYRE_SUPERVISE=$1 timeout 60 "$MPIEXEC" -n 2 "$apps/gyre-pipeline" --input "$input" --model "$model" --cp 2 -n "$3" \
    -o "$2" >"$scratch/log" 2>&1 &
  launcher=$!
}
processes_of() { # OUTPUT: those of the program, without the launcher's
  local environ
  for environ in $(grep -lszxF "COUNTED=$1" /proc/[0-9]*/environ); do
    [[ ! ${environ%environ}exe -ef $apps/gyre-pipeline ]] || echo "${environ//[!0-9]/}"
  done
}
for supervise in 1 0; do
  most=0
  start_counted $supervise "$scratch/counted$supervise.h5" 300
  while kill -0 "$launcher" 2>/dev/null; do
    now=$(processes_of "$scratch/counted$supervise.h5" | wc -l)
    ((now <= most)) || most=$now
  done
  wait "$launcher" || fail "exit $? under GYRE_SUPERVISE=$supervise: $(cat "$scratch/log")"
  ((supervise ? most >= 6 : most == 2)) || fail "$most processes of two ranks under GYRE_SUPERVISE=$supervise"
done
"$apps/gyre-compare" -q "$scratch"/counted{1,0}.h5 || fail "GYRE_SUPERVISE=0 changes the output"
# A rank that is killed then leaves a temporary file, and no output.
start_counted 0 "$scratch/out/killed.h5" 1000000
until grep -q '^# input model' "$scratch/log"; do kill -0 "$launcher" || fail "no run: $(cat "$scratch/log")"; done
kill -KILL "$(processes_of "$scratch/out/killed.h5" | tail -1)"
wait "$launcher" && fail "exit 0 with a killed rank: $(cat "$scratch/log")"
[[ ! -e $scratch/out/killed.h5 ]] || fail "an output of a killed run"
GYRE_SUPERVISE=no expect 2 'GYRE_SUPERVISE=no in the environment; wanted: 0 or 1' "$apps/gyre-pipeline"
echo ok
