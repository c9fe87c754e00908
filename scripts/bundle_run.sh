#!/usr/bin/env bash
# Entry point of a bundle. From the host it uses the driver, and NCCL, cuBLASLt and cuDNN where present.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
GYRE_SOFTGPU=$(cat "$here/softgpu")
export GYRE_PROGRAMS=$here GYRE_INPUTS=$here/inputs GYRE_RESULTS=$PWD/results MPIEXEC=$here/libexec/mpiexec GYRE_SOFTGPU
export UCX_HANDLE_ERRORS=none UCX_MEM_EVENTS=n HWLOC_COMPONENTS=-pci,-linux:pci OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

usage() {
  cat <<'TEXT'
usage: ./run COMMAND

  test-gpu [--apps-only]     the GPU's unit tests, and the programs on 1 to 4 ranks; 3: there is no usable GPU
  bench-gpu [ARGS]           the GPU benchmarks; JSON to results/gpu/ below the present folder
  exec RANKS PROGRAM ARGS    one program, e.g. ./run exec 2 gyre-attention --tokens 1K
  version                    what this was built from
TEXT
}

command=${1:-help}
[[ $# -eq 0 ]] || shift
case $command in
  test-gpu) exec bash "$here/scripts/gpu_suite.sh" test "$@" ;;
  bench-gpu) exec bash "$here/scripts/gpu_suite.sh" bench "$@" ;;
  exec)
    [[ $# -ge 2 && -x $here/apps/$2 ]] || { usage >&2 && exit 2; }
    exec "$MPIEXEC" -n "$1" "$here/apps/$2" "${@:3}"
    ;;
  version) cat "$here/VERSION" ;;
  help | -h | --help) usage ;;
  *)
    usage >&2
    echo "run: unknown command '$command'" >&2
    exit 2
    ;;
esac
