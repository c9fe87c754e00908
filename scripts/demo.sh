#!/usr/bin/env bash
# demo.sh BUILD_DIR: runs every program once on a small corpus, from the repository's root. Prints one line per step, then
# one screen of results. Everything else goes to demo/: logs, JSON files, drawings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

apps=$1/apps
mpiexec=${MPIEXEC:-mpiexec}
# At most as many ranks as cores, so that timings are meaningful; 2 or 4, for cp = 2 by tp.
cores=$(env -u OMP_NUM_THREADS nproc)
ranks=2
[[ $cores -lt 4 ]] || ranks=4
tp=$((ranks / 2))
folder=demo
source scripts/step.bash

rm -rf demo/text demo/*.json demo/*.h5 demo/*.svg
mkdir -p demo/text
# English text that the model was not trained on, and some C++; lengths from a screenful to two thirds of a bin.
cp --parents -r LICENSE softgpu/README.md src/core/*.hpp demo/text
for licence in BSD CC0-1.0 LGPL-3 Apache-2.0; do
  [[ ! -e /usr/share/common-licenses/$licence ]] || cp -L "/usr/share/common-licenses/$licence" demo/text
done

echo "demo: $ranks ranks on $cores cores; all output of a step goes to demo/NAME.log"
step import 'text files become tokenised documents' "$apps/gyre-import" -o demo/corpus.h5 demo/text
step pack 'documents are packed into bins of 16K tokens' "$mpiexec" -n "$ranks" "$apps/gyre-pack" \
  --input demo/corpus.h5 --capacity 16K --cp 4 --algorithm balanced --output demo/packed.h5 --json demo/pack.json
step unpack 'the bins are unpacked again' "$apps/gyre-pack" --input demo/packed.h5 --unpack --output demo/unpacked.h5
step compare 'unpacked and imported documents are compared' "$apps/gyre-compare" demo/corpus.h5 demo/unpacked.h5
step shard 'bins are sharded over 4 ranks by every layout' "$mpiexec" -n 4 "$apps/gyre-shard" \
  --input demo/packed.h5 --cp 4 --svg demo/layouts.svg --json demo/shard.json
step explain 'ring attention over 8 ranks is predicted and drawn' "$apps/gyre-attention" \
  --explain --cp 8 --tokens 64K --schedule ring --svg demo/ring.svg
step attention 'attention is run by every schedule, forward and backward' "$mpiexec" -n "$ranks" "$apps/gyre-attention" \
  --tokens 1K --heads 8 --kv-heads 4 --schedule all --max-seconds 0.1 --json demo/attention.json
step recurrence 'recurrent layers pass their states by every schedule' "$mpiexec" -n "$ranks" "$apps/gyre-recurrence" \
  --tokens 1K --heads 4 --key-heads 2 --key-dim 32 --value-dim 32 --kind all --schedule all --max-seconds 0.1 \
  --json demo/recurrence.json
step logprobs 'log-probabilities, ours and the algorithms in use, are run' "$mpiexec" -n "$ranks" "$apps/gyre-logprobs" \
  --op all --method all --tp 2 --tokens 128 --vocab 32K -d bf16 --max-seconds 0.1 --check-tokens 16 --json demo/logprobs.json
step reference 'documents with a NumPy reference are scored' "$mpiexec" -n "$ranks" "$apps/gyre-pipeline" \
  --input inputs/docs_tiny.h5 --model inputs/model_tiny.h5 --cp 2 --tp "$tp" -n 1 --json demo/reference.json
step pipeline 'the text is scored by a trained model' "$mpiexec" -n "$ranks" "$apps/gyre-pipeline" \
  --input demo/corpus.h5 --model inputs/model.h5 --cp 2 --tp "$tp" -n 1 --top 5 --check-tokens 1024 \
  --output demo/results.h5 --json demo/result.json
echo
python3 scripts/demo_summary.py demo "$apps"
