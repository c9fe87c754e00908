#!/usr/bin/env bash
# docs.sh SOURCE_DIR BUILD_DIR: README.md and the pages say what is true: links, tables, options, commands. Then the check
# itself is checked: it must notice faults planted into a copy.
set -euo pipefail

source_dir=$1
apps=$2/apps
for app in import pack shard attention recurrence logprobs pipeline predict compare; do
  if [[ ! -x $apps/gyre-$app ]]; then
    echo "skipped: $apps/gyre-$app is not built"
    exit 77
  fi
done
check() { python3 "$source_dir/tests/support/check_docs.py" "$@"; }
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
failed=0

check "$source_dir" "$apps" --static || failed=1 # apps/docs.sh runs the commands

# must_notice EXPECTED TEXT [--static]: of a README.md with TEXT the check must say EXPECTED; '': nothing.
must_notice() {
  local found status=0
  rm -rf "${copy:?}"/*
  mkdir -p "$copy/results/cpu-2core"
  cp "$source_dir/results/cpu-2core/pack-algorithms.json" "$copy/results/cpu-2core/"
  printf '%b\n' "# Title\n\n$2" >"$copy/README.md"
  found=$(check "$copy" "$apps" "${@:3}") || status=$?
  if [[ -n $1 && ($status -ne 1 || $found != *"$1"*) ]] || [[ -z $1 && $status -ne 0 ]]; then
    echo "the check is broken: of '$2' it should say '${1:-nothing}', but says '$found'"
    failed=1
  fi
}

table='<!-- table results/cpu-2core/pack-algorithms.json where algorithm=balanced: algorithm bins -->'
rows='| algorithm | bins |\n|---|---:|\n| balanced |'
must_notice "'docs/none.md' does not exist" '[a](docs/none.md)' --static
must_notice "'none.svg' does not exist" '![a](none.svg)' --static
must_notice "there is no heading '#else'" '[a](#else)' --static
must_notice '151 lines' "$(printf '\\n%.0s' {1..148})" --static
must_notice '121 columns' "$(printf 'x%.0s' {1..121})" --static
must_notice 'gyre-pack has no option --inputs' '```sh\ngyre-pack --capacity 8K --inputs x\n```' --static
must_notice 'gyre-shard has no option --inputs' 'say `mpirun -n 2 gyre-shard --inputs x`' --static
must_notice 'no program has the option --nothing' 'use `--nothing`' --static
must_notice 'tables or excerpts differ' "$table\n\n$rows 1 |\n" --static
must_notice 'tables or excerpts differ' '<!-- excerpt results/cpu-2core/pack-algorithms.json lines 1-1 -->\n\n```text\n[\n```\n' --static
demo='export PATH=$PWD/build/cpu/apps:$PATH\n'
must_notice 'exit code 2' "\`\`\`sh\n${demo}gyre-pack --capacity 8K\n\`\`\`"
must_notice 'gyre-pack: command not found' '```sh\ngyre-pack --help\n```'
must_notice 'more than 4 ranks' '```sh\nmpirun -n 5 gyre-pack --help\n```'
# And what is right must pass.
must_notice '' "[a](#title) [b](README.md)\n\n\`\`\`sh\n${demo}gyre-pack --help   # a comment\n\`\`\`"
must_notice '' '<!-- not run: needs more -->\n```sh\nmpirun -n 64 gyre-pack --dp 4\n```'
must_notice '' '<!-- excerpt results/cpu-2core/pack-algorithms.json lines 1-1 -->\n\n```text\n{\n```\n' --static
must_notice '' "$table\n\n$rows $(python3 -c '
import json, sys
rows = json.load(open(sys.argv[1]))["results"]
print(next(r["measurements"]["bins"] for r in rows if r["key"]["algorithm"] == "balanced"))
' "$source_dir/results/cpu-2core/pack-algorithms.json") |\n" --static

mkdir "$copy/docs"
[[ $(check "$copy" "$apps" --static) == *'no row of a table has `ring` of the schedules'* ]] || { echo 'a schedule without a page is not noticed'; failed=1; }

exit "$failed"
