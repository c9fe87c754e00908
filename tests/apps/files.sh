#!/usr/bin/env bash
# Files that cannot be written or read: full disks, limits, folders that are read-only, outputs that are inputs, paths that
# are no files, damaged files. What ends badly does so with the designed exit code, names the file and leaves everything as it was.
# Usage: files.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)

# A disk of our own needs a mount, which nobody else is to see.
if [[ -z ${GYRE_OWN_MOUNTS:-} ]] && unshare -m true 2>/dev/null; then
  GYRE_OWN_MOUNTS=1 exec unshare -m bash "$0" "$@"
fi
source "$(dirname "$0")/../support/app_test.bash"
mpi=("$MPIEXEC" -n)

# ends CODE COMMAND...: the command ends with CODE within 30 seconds.
ends() {
  local code=$1 got=0
  shift
  timeout 30 "$@" >output 2>&1 </dev/null || got=$?
  [ "$got" -eq "$code" ] || fail "exit code $got, not $code: $*
$(cat output)"
}
says() { grep -qF -- "$1" output || fail "no line holds '$1': $(cat output)"; }

# Outputs of about 6, 3, 3, 2, 3 and 1 MB.
seq 1 220000 >text
"$apps/gyre-import" -o docs.h5 text >output
"$apps/gyre-pack" --input "$source_dir/inputs/docs_small.h5" --capacity 32K --cp 4 -o packed.h5 >output
import() { echo "$apps/gyre-import text"; }
pack() { echo "$apps/gyre-pack --input docs.h5 --capacity 2M -c none"; }
shard() { echo "$apps/gyre-shard --input packed.h5 --cp 4 --layout contiguous -c none"; }
attention() { echo "$apps/gyre-attention --tokens 256 --heads 8 --kv-heads 8 --head-dim 64 --schedule ring -c none -w 0 -n 1"; }
logprobs() { echo "$apps/gyre-logprobs --op logprob --tokens 4K --vocab 256 --picks 128 -c none -w 0 -n 1"; }
pipeline() {
  echo "$apps/gyre-pipeline --input $source_dir/inputs/docs_tiny.h5 --model $source_dir/inputs/model_tiny.h5 --cp $1 -c none -w 0 -n 1"
}

# room BYTES: leaves so many bytes free on the small disk, which holds an old output.
room() {
  rm -f disk/*
  echo old >disk/out.h5
  echo old >disk/out.json
  local free
  free=$(df --output=avail -B1 disk | tail -1)
  fallocate -l $((free - $1)) disk/ballast
  ls -l disk >before
}
unchanged() { # the watchers of the outputs need a moment
  for _ in $(seq 30); do
    ls -l disk >after
    cmp -s before after && [[ $(cat disk/out.h5 disk/out.json) = $'old\nold' ]] && return
    sleep 0.1
  done
  fail "the disk has changed: $(diff before after) after $*: $(cat output)"
}

# full BYTES RANKS APP: with little space, the whole output or none.
full() {
  local code=0 command
  read -ra command <<<"$($3 "$2")"
  room "$1"
  SECONDS=0
  timeout 30 "${mpi[@]}" "$2" "${command[@]}" -o disk/out.h5 >output 2>&1 </dev/null || code=$?
  ((SECONDS < 20)) || fail "$SECONDS seconds on a full disk: $*"
  if ((code == 0 && $1 > 500000)); then
    "$apps/gyre-compare" disk/out.h5 disk/out.h5 --equal-nan >output || fail "a broken output: $*"
    [[ $(ls disk) = $'ballast\nout.h5\nout.json' ]] || fail "left behind: $(ls disk): $*"
    return
  fi
  ((code == 3)) || fail "exit code $code with $1 bytes free: $*: $(cat output)"
  grep -Eq "no space left for 'disk/out.h5[^']*': at least [0-9]+ bytes are needed, [0-9]+ are free" output ||
    fail "what is needed is not said: $*: $(cat output)"
  unchanged "$*"
}

if [[ -n ${GYRE_OWN_MOUNTS:-} ]]; then
  mkdir disk
  mount -t tmpfs -o size=16M tmpfs disk
  trap 'cd /; umount "$scratch"/disk "$scratch"/locked 2>/dev/null; rm -rf "$scratch"' EXIT
  for ranks in 1 4; do
    for bytes in 1048576 8192; do
      full $bytes $ranks import
    done
  done
  for app in import pack shard attention logprobs pipeline; do
    full 0 4 $app
    for bytes in 2097152 1048576 600000 8192; do
      full $bytes 2 $app
    done
  done
  for app in pack shard attention logprobs pipeline; do
    read -ra command <<<"$($app 2)"
    room 0
    ends 3 "${mpi[@]}" 2 "${command[@]}" -J disk/out.json
    says disk/out.json
    unchanged "$app -J"
  done
  # With room, the same commands write the whole output, and nothing stays reserved.
  full 12582912 2 import
  grep -q 'VERIFY PASSED' output || fail "12 MB are not enough: $(cat output)"
  (($(stat -c '%b * 512 - %s' disk/out.h5) < 8192)) || fail "space stays reserved behind the file: $(stat disk/out.h5)"

  mkdir locked
  echo old >locked/out.h5
  mount --bind locked locked
  mount -o remount,ro,bind locked
  ends 2 "${mpi[@]}" 2 "$apps/gyre-import" -o locked/out.h5 text
  says "locked"
  [[ $(ls locked) = out.h5 && $(cat locked/out.h5) = old ]] || fail "a folder that cannot be written has changed"
else
  echo "note: full disks are not tested: no permission to mount one"
fi

# A limit on the size of files (ulimit -f) used to be a signal without a word. MPI needs files of some MB for its own.
mkdir few
echo old >few/out.h5
seq 1 800000 >long
for ranks in 1 3; do
  (ulimit -f 16000 && ends 3 "${mpi[@]}" "$ranks" "$apps/gyre-import" -o few/out.h5 long)
  says "no space left for 'few/out.h5"
  says "files are limited to 16384000 (ulimit -f)"
done
sleep 0.3
[[ $(ls few) = out.h5 && $(cat few/out.h5) = old ]] || fail "the limit on files left something: $(ls few)"

# An output that is an input, under any name.
mkdir folder
cp text folder/notes.txt
ln -s folder/notes.txt alias
for names in 'folder/notes.txt folder/notes.txt' 'folder/notes.txt folder/../folder/notes.txt' 'alias folder/notes.txt' \
  'folder/notes.txt alias'; do
  read -r input output_name <<<"$names"
  ends 2 "${mpi[@]}" 2 "$apps/gyre-import" -o "$output_name" "$input"
  says "the output '$output_name' is the file of the input '$input'"
  cmp -s text folder/notes.txt || fail "an input is destroyed: $names"
done
for note in '' "# 'folder/out.h5' is found among the inputs, and left out: it is the output"; do
  ends 0 "${mpi[@]}" 2 "$apps/gyre-import" -o folder/out.h5 folder
  says "$note"
  awk '!/^#/ && NF { found = ($1 == 1 && $3 == 1) } END { exit !found }' output || fail "not one document: $(cat output)"
done

# Paths that are no regular files are refused before they are opened; a read that never ends ends by --timeout.
mkfifo pipe
for path in pipe /dev/zero; do
  ends 2 "${mpi[@]}" 2 "$apps/gyre-pack" --input $path
  says "cannot read '$path': it is no regular file"
  ends 2 timeout 20 "$apps/gyre-pack" --config $path
  says "cannot read '$path': it is no regular file"
done
ends 2 bash -c "true | '$apps/gyre-pack' --input /dev/stdin -o none.h5"
says "cannot read '/dev/stdin': it is no regular file"
timeout 1 cat /proc/kmsg >/dev/null 2>&1 && blocked=0 || blocked=$?
if ((blocked == 124)); then
  ends 4 "$apps/gyre-import" -o none.h5 --timeout 1 /proc/kmsg
  says "waiting for 'reading /proc/kmsg'"
else
  echo "note: a read that never ends is not tested: /proc/kmsg cannot be read"
fi

# An empty text, of a shell variable that was never set, is no value of any option.
for program in "$apps"/gyre-*; do
  for option in $("$program" --help | grep -oE -- '--[a-z-]+ (TEXT|FILE)' | cut -d' ' -f1); do
    ends 2 "$program" "$option" ''
    says 'an empty text is no value'
  done
done
ends 2 "$apps/gyre-import" -o none.h5 ''
says 'an empty text is no value'
ends 2 "$apps/gyre-compare" '' docs.h5
says 'an empty text is no value'

# Links and elements in other files: a checksum of the input would not cover them.
/usr/bin/python3 - "$source_dir/inputs/docs_tiny.h5" <<'PY'
import shutil, sys, h5py
for name in ("dangling", "external"):
    shutil.copy(sys.argv[1], f"{name}.h5")
    with h5py.File(f"{name}.h5", "r+") as f:
        del f.attrs["content_sha256"]
        del f["/documents/names"]
        f["/documents/names"] = h5py.SoftLink("/none") if name == "dangling" else h5py.ExternalLink("pipe", "/names")
PY
ends 2 "${mpi[@]}" 3 "$apps/gyre-pack" --input dangling.h5
says "'/documents/names' of 'dangling.h5' is behind the link 'names' -> '/none', which leads to nothing"
ends 2 "${mpi[@]}" 3 "$apps/gyre-pack" --input external.h5
says "'/documents/names' of 'external.h5' is behind a link to another file ('pipe', '/names')"

# One changed byte. The first few are known to crash HDF5 1.10.8; some destroy memory first.
known=bshd_tiny.h5:2074:32,bshd_tiny.h5:2073:16,docs_tiny.h5:12934:8,attention_window.h5:29025:58
flip() { /usr/bin/python3 "$source_dir/tests/support/flip_bytes.py" "$source_dir" "$apps" "$scratch" "$@"; }
flip $known 1
flip $known 1 "${mpi[@]}" 3
flip 18 7
echo "files: all passed"
