#!/usr/bin/env bash
# gyre-import: what it writes, what it prints, what it refuses.
# Usage: import.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
import=$apps/gyre-import
compare=$apps/gyre-compare

mkdir -p text/sub
printf 'hello' >text/a.txt
: >text/empty.txt
printf 'x\0y' >text/sub/binary
printf 'w\303\266rld\n' >'text/sub/with blank.txt'

expect 0 'files   skipped   documents' "$import" -o docs.h5 text
awk '!/^#/ && NF { found = ($1 == 4 && $2 == 1 && $3 == 3 && $4 == 18 && $5 == 9 && $6 == 12) }
     END { exit !found }' output || fail "wrong numbers: $(cat output)"
expect 0 'text/sub/binary' "$import" -v -o docs.h5 text
[ "$(ls)" = "$(printf 'docs.h5\noutput\ntext')" ] || fail "other files are left: $(ls)"

# Any number of ranks writes the same documents.
for ranks in 2 4; do
  expect 0 ' 3 ' "$MPIEXEC" -n "$ranks" "$import" --output "docs_$ranks.h5" text
  expect 0 'VERIFY PASSED 3/3' "$compare" docs.h5 "docs_$ranks.h5"
done
expect 0 'VERIFY PASSED 3/3' "$MPIEXEC" -n 2 "$compare" docs.h5 docs_2.h5
expect 0 ' 4 ' "$import" -o cut.h5 --max-tokens 8 text
expect 0 '' "$import" -o own.h5 "$source_dir/src"

if command -v h5dump >/dev/null; then
  expect 0 '"gyre/documents"' h5dump -a /schema docs.h5
  expect 0 'gyre-import -v -o docs.h5 text' h5dump -a /provenance/command docs.h5
  expect 0 '256, 119, 195, 182, 114, 108, 100, 10, 257' h5dump -w 0 -d /documents/tokens docs.h5
  expect 0 '"text/a.txt", "text/empty.txt", "text/sub/with blank.txt"' \
    h5dump -w 0 -d /documents/names docs.h5
fi

expect 2 'output' "$import" text
expect 2 'either text files or --model' "$import" -o none.h5
expect 2 "cannot read 'nowhere': No such file or directory" "$import" -o none.h5 text nowhere
expect 2 "there is no folder '$scratch/no'" "$import" -o no/none.h5 text
expect 2 'nothing to import: 1 files found, 1 of them hold a NUL byte' \
  "$import" -o none.h5 text/sub/binary
expect 2 'at least 3 are needed' "$import" -o none.h5 --max-tokens 2 text
expect 2 "cannot read 'nowhere'" "$MPIEXEC" -n 3 "$import" -o none.h5 nowhere
[ ! -e none.h5 ] || fail "a refused import left a file"
[ "$(grep -c 'cannot read' output)" -eq 1 ] || fail "the error is printed more than once"
echo "import: all passed"
