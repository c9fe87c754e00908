#!/usr/bin/env bash
# records.sh SOURCE_DIR BUILD_DIR: records in results/ that no clock makes are what the programs say now, of those that take
# seconds; then the comparison itself is checked. (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
check() { /usr/bin/python3 "$source_dir/tests/support/check_records.py" "$source_dir/results" "$@"; }

GYRE_RESULTS=$scratch/again "$source_dir/results/record.sh" few "$2" >made || fail "$(cat made)"
check again || fail "results/ is stale"

must_notice() { # TEXT FILE SED: after this change of the new record, the comparison says TEXT
  rm -rf changed
  cp -r again changed
  sed -i "$3" "changed/$2"
  ! check changed >said || fail "$2: '$3' is not noticed"
  grep -qF -- "$1" said || fail "of $2 it says $(cat said), not $1"
}
must_notice 'tokens: recorded' cpu-2core/pack-algorithms.json 's/"tokens": [0-9][0-9]*/"tokens": 7/'
must_notice 'need: recorded' cpu-2core/shard-layouts.json 's/"need": [0-9][0-9.e-]*/"need": 7/'
must_notice 'time: recorded' prediction/hiding-50.json 's/"time": [0-9][0-9.e-]*/"time": 7.5/'
must_notice 'is not recorded' prediction/hiding-50.json 's/"tokens": 16384/"tokens": 16385/g'
must_notice 'predicted-cp64.txt:1: recorded' cpu-2core/predicted-cp64.txt '1s/64K/65K/'
mkdir nothing
! check nothing >said || fail 'no record at all is not noticed'
echo "records: all passed"
