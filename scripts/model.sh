#!/usr/bin/env bash
# model.sh BUILD_DIR FOLDER MODEL [TEXT...]: imports a model (a folder with tokenizer.json, or a NAME.gguf), and scores texts by
# it on 1 and on 2 ranks (none given: licences of this machine), from the repository's root. Prints one line per step, then
# what came out; everything else goes to FOLDER. PYTHONPATH finds the packages gyre and tokenizers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

apps=$1/apps
folder=$2
model=$3
mpiexec=${MPIEXEC:-mpiexec}
source scripts/step.bash

tokenizer=$model
[[ ! -d $model ]] || tokenizer=$model/tokenizer.json
texts=("${@:4}")
if [[ ${#texts[@]} -eq 0 ]]; then
  for licence in Apache-2.0 Artistic BSD CC0-1.0; do
    [[ ! -e /usr/share/common-licenses/$licence ]] || texts+=("/usr/share/common-licenses/$licence")
  done
fi
[[ ${#texts[@]} -gt 0 ]] || texts=(LICENSE)

# score NAME RANKS TITLE ARGS...: to NAME.json and NAME.h5.
score() {
  step "$1" "$3" "$mpiexec" -n "$2" "$apps/gyre-pipeline" --input "$folder/docs.h5" --model "$folder/model.h5" -n 1 \
    --top 4 --output "$folder/$1.h5" --json "$folder/$1.json" "${@:4}"
}

rm -f "$folder"/*.{h5,json,log}
echo "model: $model; all output of a step goes to $folder/NAME.log"
step import 'the model becomes a file of ours' "$apps/gyre-import" -o "$folder/model.h5" --model "$model"
step text "${#texts[@]} texts become tokens of its tokenizer" /usr/bin/python3 -m gyre.text -o "$folder/docs.h5" \
  --tokenizer "$tokenizer" "${texts[@]}"
score one-rank 1 'they are scored on one rank'
score two-ranks 2 'and on two, a document over both' --cp 2
step compare 'the scores of both are compared' /usr/bin/python3 -m gyre.cli "$folder/one-rank.h5:/results" \
  "$folder/two-ranks.h5:/results" --atol 1e-3 --rtol 0
echo
/usr/bin/python3 scripts/model_summary.py "$folder" "${texts[@]}"
