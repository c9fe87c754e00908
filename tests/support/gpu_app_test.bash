# For shell tests of programs on GPUs; sourced after app_test.bash. The ranks share one GPU, or the software GPU.
gpu=(--backend cuda --comm staged --share-gpus)

# require_gpu COMMAND...: runs the command, which asks for a GPU and would write none.h5, on 2 ranks. Where there is no
# GPU it must end with 3, the reason, and no file, and the test ends here: skipped in builds without CUDA, else passed.
require_gpu() {
  local status=0
  timeout 60 "$MPIEXEC" -n 2 "$@" >output 2>&1 || status=$?
  [ "$status" -ne 0 ] || return 0
  [ "$status" -eq 3 ] || fail "exit code $status, not 3, without a GPU: $(cat output)"
  [ ! -e none.h5 ] || fail "a run without a GPU left a file"
  if grep -qF 'this build has no CUDA' output; then
    echo "skipped: this build has no CUDA"
    exit 77
  fi
  grep -qE 'no NVIDIA driver|no CUDA-capable device|supports CUDA' output || fail "no reason: $(cat output)"
  grep -qF "on host $(hostname)" output || fail "no host: $(cat output)"
  echo "ok: $(grep -E -m 1 'driver|device' output)"
  exit 0
}

# on_shared_gpu FILE: the output names the device, and is not official.
on_shared_gpu() {
  grep -qE '^# devices .* 0:0' "$1" || fail "no device: $(cat "$1")"
  grep -qE '^RESULT .*(shared|software) GPU' "$1" || fail "official: $(cat "$1")"
}
