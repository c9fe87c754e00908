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

# A limit on open files is no damage to a file, and MPI_Init that fails has a code of MPI: 3 and the error's text.
cp "$source_dir/inputs/docs_tiny.h5" tiny.h5
small() { echo "$apps/gyre-pack --input tiny.h5 --capacity 4K -q $*"; } # an argument with blanks would need quotes
for ((files = 7; ; ++files)); do # more and more, until they suffice; the last error is behind MPI_Init
  code=0
  (ulimit -n $files && exec timeout 30 $(small)) >output 2>&1 </dev/null || code=$?
  ((code != 0)) || break
  ((code == 3)) || fail "exit code $code with $files open files: $(cat output)"
  grep -Eqi 'too many open files|files that could be opened' output || fail "no reason with $files files: $(cat output)"
  mv output last
done
grep -qE "^gyre-pack: error: .*'tiny.h5.*Too many open files" last || fail "no file is named: $(cat last)"
(ulimit -f 1 && ends 3 $(small))
if [[ -n ${GYRE_OWN_MOUNTS:-} ]]; then
  no_shared_memory='mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
  ends 3 unshare -m sh -c "$no_shared_memory" sh $(small)
  ends 3 unshare -m sh -c "$no_shared_memory" sh "${mpi[@]}" 2 $(small)
fi

# Standard error that cannot be written: what would be said there is dropped, and the run ends as it would. Standard output:
# the files of the run are left, complete, and the exit code is 3; without files, the run ends at once.
mkfifo unread
# DESCRIPTOR COMMAND...: the descriptor is a pipe whose reader has gone.
no_reader=(bash -c 'exec 8<>unread 9>unread 8<&-; to="$1>&9 9>&-"; shift; eval "exec \"\$@\" $to"' bash)
for program in "$apps"/gyre-*; do
  ends 2 bash -c 'exec "$0" --nonsense 2>/dev/full' "$program"
done
ends 2 bash -c 'exec "$@" 2>&-' bash $(small) --nonsense
ends 2 "${no_reader[@]}" 2 $(small) --nonsense
ends 2 "${mpi[@]}" 2 bash -c 'exec "$0" "$@" 2>/dev/full' $(small) --nonsense
mkfifo unread.json
ends 4 bash -c 'exec "$@" 2>/dev/full' bash $(small) -J unread.json --timeout 0.2 # the watchdog's report
for way in '>&-' '>/dev/full'; do
  rm -f a.json a.h5
  ends 3 bash -c "exec \"\$@\" $way" bash $(small) -J a.json -o a.h5
  says 'cannot write to standard output'
  "$apps/gyre-compare" -q a.h5 a.h5 >output || fail "no whole file behind $way"
  /usr/bin/python3 -m json.tool a.json >output || fail "no whole document behind $way"
done
ends 3 "${no_reader[@]}" 1 $(small)
says 'cannot write to standard output: Broken pipe'
ends 3 "${no_reader[@]}" 1 "$apps/gyre-pack" --help

# Special files are written to, not replaced, or refused.
ln -s /proc/self/fd/1 stdout.json
ln -s /dev/null null.json
ln -s /dev/full full.json
ln -s real/a.json link.json
mkdir real
mkfifo pipe.json pipe.jsonl
$(small) -J stdout.json >log || fail "exit code $?: -J /dev/stdout"
/usr/bin/python3 -c 'import json; assert json.JSONDecoder().raw_decode(open("log").read())[0]["schema"] == "gyre-result/1"'
grep -q '^RESULT' <(tail -1 log) || fail "standard output is not behind the document: $(tail -1 log)"
ends 0 $(small) -J null.json --csv null.json
ends 3 $(small) -J full.json
says "cannot write 'full.json': No space left on device"
cat pipe.json >got &
ends 0 "${mpi[@]}" 2 $(small) -J pipe.json
wait $!
/usr/bin/python3 -m json.tool got >output || fail "no whole document went through a pipe"
ends 0 $(small) -J link.json
[[ -L stdout.json && -L null.json && -L full.json && -L link.json && -p pipe.json && -f real/a.json ]] || fail "replaced: $(ls -l)"
for option in '-o pipe.json' '-o stdout.json' '-J pipe.jsonl'; do
  ends 2 $(small) $option
  says "cannot write '${option#* }': it is there and no regular file"
done

# Rows of a file that is removed meanwhile would be lost.
mkdir gone
"$apps/gyre-attention" --tokens 16 --heads 1 --kv-heads 1 --head-dim 8 --schedule ring -n 1 -N 100000 -J gone/rows.jsonl \
  >output 2>&1 &
until grep -qs '"kind":"row"' gone/rows.jsonl; do kill -0 $! || fail "no row: $(cat output)"; done
rm -r gone
code=0
wait $! || code=$?
((code == 3)) || fail "exit code $code, and the rows are lost: $(cat output)"
says 'gone/rows.jsonl is no longer the file that this run writes'

# An output that is an input, under any name.
printf 'capacity = "4K"\n' >c.toml
ln tiny.h5 hard.h5
ln -s c.toml config.json
for case in '--config c.toml -J ./c.toml' '--config c.toml --csv config.json' '-o hard.h5' '-J hard.h5'; do
  ends 2 $(small) $case
  says "is the file of --"
  [[ $(cat c.toml) = 'capacity = "4K"' ]] || fail "the configuration is destroyed: $case"
done
# Files that a value names, too.
printf '64\n32\n' >lengths.txt
cp lengths.txt kept.txt
cp "$source_dir/inputs/machines/h100-sxm-8.toml" m.toml
for case in 'attention' 'logprobs --vocab 64' 'pack' 'shard' "pipeline --model $source_dir/inputs/model_tiny.h5" \
  'predict --machine h100-sxm-8' 'attention --explain'; do
  for output_name in '-J lengths.txt' '--csv ./lengths.txt'; do
    [[ $case != *explain || $output_name = -J* ]] || continue
    ends 2 "$apps"/gyre-$case --gen dist=list,file=lengths.txt $output_name
    says "is the file of --gen"
    cmp -s lengths.txt kept.txt || fail "the lengths are destroyed: $case"
  done
done
for case in 'attention --emulate-compute m.toml -J m.toml' 'attention --emulate-compute m.toml --trace ./m.toml' \
  'predict --machine m.toml --svg m.toml' 'predict --machine m.toml --csv m.toml'; do
  ends 2 "$apps"/gyre-$case
  says "is the file of --"
  cmp -s m.toml "$source_dir/inputs/machines/h100-sxm-8.toml" || fail "the machine is destroyed: $case"
done
printf 'quick = true\n' >quick.toml
ends 2 "$apps/gyre-info" --config quick.toml -J quick.toml
says "is the file of --config"
ends 2 bash -c 'exec "$@" 2>&1 >same.txt -J same.txt' bash $(small)
says "--json 'same.txt' is the file of standard output"
mkdir folder
cp text folder/notes.txt
ln -s folder/notes.txt alias
for names in 'folder/notes.txt folder/notes.txt' 'folder/notes.txt folder/../folder/notes.txt' 'alias folder/notes.txt' \
  'folder/notes.txt alias'; do
  read -r input output_name <<<"$names"
  ends 2 "${mpi[@]}" 2 "$apps/gyre-import" -o "$output_name" "$input"
  says "--output '$output_name' is the file of paths"
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
  "$program" --help | awk 'length($0) > 100 { print "longer than 100 columns: " $0; found = 1 } END { exit found }' || fail "$program --help"
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
