# What the shell tests of the programs share; sourced with the test's arguments, SOURCE_DIR BUILD_DIR.
# Gives source_dir, apps, MPIEXEC, a scratch folder (removed at exit, and the present one), fail, expect and column.
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
