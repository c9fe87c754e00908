# What the shell tests of the programs share; sourced with the test's arguments, SOURCE_DIR BUILD_DIR.
# Gives source_dir, apps, MPIEXEC, a scratch folder (removed at exit, and the present one), fail, expect, registered,
# result, column and documents_of.
set -euo pipefail

source_dir=$1
apps=$2/apps
: "${MPIEXEC:=mpiexec}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# expect CODE PATTERN COMMAND...: the command ends with CODE and prints a line that holds PATTERN.
expect() {
  local code=$1 pattern=$2 got=0
  shift 2
  timeout 60 "$@" >output 2>&1 </dev/null || got=$?
  [ "$got" -eq "$code" ] || fail "exit code $got, not $code: $*
$(cat output)"
  grep -qF -- "$pattern" output || fail "no line holds '$pattern': $*
$(cat output)"
}

# registered KIND: the names of all schedules, layouts, ..., as gyre-info lists them.
registered() {
  "$apps/gyre-info" --quick -J info.json >/dev/null || fail "gyre-info fails"
  /usr/bin/python3 -c 'import json, sys; print(*json.load(open("info.json"))["capabilities"][sys.argv[1]])' "$1"
}

# result: what RESULT says in the output of `expect`, in one line.
result() {
  sed -n 's/^RESULT *//p' output | tr '\n' ' '
}

# documents_of FROM.h5 TO.h5 LENGTH...: the first tokens of a file of documents, as documents of these lengths.
documents_of() {
  /usr/bin/python3 - "$@" <<'PY'
import h5py, sys
path, made, *lengths = sys.argv[1:]
with h5py.File(path) as full, h5py.File(made, "w") as few:
    few.attrs.update({name: value for name, value in full.attrs.items() if name != "content_sha256"})
    group = few.create_group("documents")
    group.attrs.update(full["documents"].attrs)
    group["offsets"] = [sum(map(int, lengths[:i])) for i in range(len(lengths) + 1)]
    group["tokens"] = full["documents/tokens"][: group["offsets"][-1]]
PY
}

# column FILE.csv NAME [OTHER=VALUE...]: the cells of a column, of the rows in which other columns have these values.
column() {
  /usr/bin/python3 - "$@" <<'PY'
import csv, sys
path, name, *wanted = sys.argv[1:]
wanted = dict(pair.split("=", 1) for pair in wanted)
for row in csv.DictReader(open(path)):
    if all(row[other] == value for other, value in wanted.items()):
        print(row[name])
PY
}
