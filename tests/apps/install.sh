#!/usr/bin/env bash
# An installation finds its data from any folder, also after it was moved; man pages and completion have all options; the
# target uninstall leaves nothing.
# Usage: install.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
build_dir=$2
PATH=/usr/bin:$PATH # its python3 is for gyre-study

cmake --install "$build_dir" --prefix "$scratch/first" >install.log 2>&1 || fail "$(cat install.log)"
mv first moved
mkdir elsewhere
cd elsewhere
bin=$scratch/moved/bin share=$scratch/moved/share
built=$(cd "$apps" && echo gyre-*[a-z])
[[ $(cd "$bin" && echo gyre-*) == "$(printf '%s\n' gyre-study ${built// lib*/} | sort | xargs)" ]] || fail "programs: $(ls "$bin")"

# Data by name, and what is no name.
predict=("$bin/gyre-predict" --machine h100-sxm-8 --cp 8 --tokens 32K --schedule ring)
sed -i 's/"8 x H100/"8 x moved H100/' "$share/gyre/inputs/machines/h100-sxm-8.toml"
expect 0 'machine="8 x moved H100' "${predict[@]}"
expect 0 "RESULT UNOFFICIAL" "${predict[@]}" --model llama-3.1-8b
expect 2 "--machine h100-smx-8: there is no such file; machines that Gyre brings: a100-sxm-8, " "$bin/gyre-predict" --machine h100-smx-8
grep -qF "; nearest: 'h100-sxm-8'" output || fail "no nearest name: $(cat output)"
echo "x" >h100-sxm-8
expect 2 "h100-sxm-8" "${predict[@]}"
! grep -q "no such file" output || fail "a file does not go before a name: $(cat output)"

expect 0 "VERIFY PASSED" "$MPIEXEC" -n 2 "$bin/gyre-attention" --input "$share/gyre/inputs/attention_causal.h5" -n 2
expect 0 "usage: gyre-study" "$bin/gyre-study" --help
expect 0 " cases in " "$bin/gyre-study" plan pack --site local -o study
grep -qF '"../../moved/bin/gyre-pack"' study/plan.json || fail "a study of another program: $(grep '"path"' study/plan.json)"
PYTHONPATH=$share/gyre/python python3 -B -c '
import gyre, sys
problem = gyre.read(sys.argv[1])
assert len(problem.reference) > 5, problem' "$share/gyre/inputs/logprobs_golden.h5"
for file in gyre/inputs/{MANIFEST,SCHEMA.md,golden/INDEX.md} gyre/slurm/job.sbatch doc/gyre/{LICENSE,README.md,docs/building.md}; do
  [[ -s $share/$file ]] || fail "there is no $share/$file"
done

# Every option that --help lists.
for program in "$bin"/gyre-*; do
  page=$share/man/man1/${program##*/}.1
  [[ -e $page ]] || fail "there is no $page: $(cat ../install.log)"
  "$program" --help >help
  options=$(grep -oE '^ +-[^ ]+( [^ ]+)*' help | grep -oE -- '--[a-z0-9-]+')
  [[ -n $options ]] || fail "$program lists no options"
  for option in $options; do
    grep -qE -- "^\.B .*${option//-/\\\\-}([^a-z0-9\\]|$)" "$page" || fail "$page lacks $option"
  done
done

# complete WORD...: prints the completions of the last word.
complete_words() (
  source "$share/bash-completion/completions/$1"
  PATH=$bin:$PATH COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
  _gyre "$1" "${*: -1}" "${*: -2:1}"
  echo "${COMPREPLY[*]}"
)
completes() { [[ $(complete_words "${@:2}") == "$1" ]] || fail "${*:2}: completed as '$(complete_words "${@:2}")', not '$1'"; }
completes "--schedule" gyre-attention --sch
completes "$(registered schedules | tr ' ' '\n' | grep '^ring' | xargs)" gyre-attention --schedule ring
completes "group-cast" gyre-attention --schedule gro # in the second line of the list
completes "f32 bf16" gyre-attention -d ""
completes "h200-sxm-8-200g h200-sxm-8" gyre-predict --machine h200
completes "llama-3.1-70b llama-3.1-8b" gyre-predict --model l
completes "plan" gyre-study p
completes "--site" gyre-study plan --sit

cd ..
mv moved first
cmake --build "$build_dir" --target uninstall >uninstall.log 2>&1 || fail "$(cat uninstall.log)"
! grep -q Warning uninstall.log || fail "uninstall: $(cat uninstall.log)"
left=$(find first ! -type d -o -name '*gyre*')
[[ -z $left ]] || fail "uninstall left $left"
! cmake --build "$build_dir" --target uninstall >uninstall.log 2>&1 || fail "a second uninstall does something: $(cat uninstall.log)"
echo "install: all passed"
