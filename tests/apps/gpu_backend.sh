#!/usr/bin/env bash
# --backend, --comm and --share-gpus: what does not go together, what a machine lacks, and what a report says of devices.
# Usage: gpu_backend.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
source "$source_dir/tests/support/gpu_app_test.bash"
shard=("$apps/gyre-shard" --gen "dist=fixed,length=30,count=5" --capacity 60 --layout striped)

# Without a GPU too.
expect 0 'VERIFY PASSED' "$MPIEXEC" -n 2 "${shard[@]}" --backend cpu --comm mpi
expect 2 '--comm mpi moves host memory; with --backend cuda it is nccl, staged or mpi-gpu' "$MPIEXEC" -n 2 "${shard[@]}" --backend cuda --comm mpi
expect 2 '--comm nccl moves GPU memory' "${shard[@]}" --comm nccl
expect 2 '--comm staged moves GPU memory' "${shard[@]}" --comm staged
expect 2 '--share-gpus goes with --backend cuda' "$MPIEXEC" -n 2 "${shard[@]}" --share-gpus
expect 2 'nearest: cuda' "${shard[@]}" --backend cud

require_gpu "${shard[@]}" "${gpu[@]}" -o none.h5
rm none.h5
expect 0 '# devices (rank:device) ' "${shard[@]}" --backend cuda --comm staged -J one.json
grep -q '"device_uuid": "GPU-' one.json || fail "no UUID: $(cat one.json)"
grep -q '"comm": "staged"' one.json || fail "no backend: $(cat one.json)"
if grep -q 'software GPU' one.json; then
  # unofficial REASONS: the reasons of the RESULT line end in these; a modified source tree is one, too.
  unofficial() { grep -qE "^RESULT UNOFFICIAL \((dirty tree; )?$1\)$" output || fail "not '$1': $(cat output)"; }
  alone=(--backend cuda --comm staged)
  export GYRE_SOFTGPU_DEVICES=1
  expect 0 '# devices' "${shard[@]}" --backend cuda
  unofficial 'software GPU'
  expect 3 'ranks 0, 1, 2 on host ' "$MPIEXEC" -n 3 "${shard[@]}" "${alone[@]}"
  grep -qF -- 'share it with --share-gpus' output || fail "no option: $(cat output)"
  expect 0 'comm=staged' "$MPIEXEC" -n 3 "${shard[@]}" --backend cuda --share-gpus -J three.json
  unofficial 'shared GPU; software GPU'
  grep -qF '"rank": 2' three.json || fail "not all ranks: $(cat three.json)"
  expect 3 'says that it takes no GPU memory' "$MPIEXEC" -n 3 "${shard[@]}" --backend cuda --share-gpus --comm mpi-gpu -o none.h5
  [ "$(grep -c error output)" -eq 1 ] || fail "not said once: $(cat output)"
  GYRE_SOFTGPU_MPI=1 expect 0 'comm=mpi-gpu' "$MPIEXEC" -n 3 "${shard[@]}" --backend cuda --share-gpus --comm mpi-gpu
  export GYRE_SOFTGPU_DEVICES=2
  expect 0 ': 0:0 1:1 software GPU (9.0)' "$MPIEXEC" -n 2 "${shard[@]}" "${alone[@]}"
  unofficial 'software GPU'
  expect 0 ': 0:0 1:1 2:0 3:1 software GPU (9.0)' "$MPIEXEC" -n 4 "${shard[@]}" "${gpu[@]}"
  unofficial 'shared GPU; software GPU'
  expect 3 'ranks 0, 2 on host ' "$MPIEXEC" -n 4 "${shard[@]}" "${alone[@]}"
  export GYRE_SOFTGPU_DEVICES=0
  expect 3 'no usable CUDA device on host ' "$MPIEXEC" -n 2 "${shard[@]}" "${gpu[@]}" -o none.h5
  [ "$(grep -c error output)" -eq 1 ] || fail "not said once: $(cat output)"
fi
[ ! -e none.h5 ] || fail "a refused run left a file"
echo "gpu_backend: all passed"
