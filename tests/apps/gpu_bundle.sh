#!/usr/bin/env bash
# The bundle: unpacked somewhere else, in an empty environment, its programs find all their libraries in it; a CPU run
# on two ranks is verified; test-gpu and bench-gpu run what they find, or say why they cannot.
source "$(dirname "$0")/../support/app_test.bash"

build_dir=$2
grep -q '^GYRE_CUDA:STRING=OFF' "$build_dir/CMakeCache.txt" && echo "skipped: this build has no CUDA" && exit 77
[[ -x $build_dir/apps/gyre-attention && -x $build_dir/tests/gpu.device_code ]] || {
  echo "skipped: gyre-attention or gpu.device_code is not built"
  exit 77
}

# A part of the build, so that packing takes seconds.
mkdir -p part/apps part/tests part/bench
cp "$build_dir/CMakeCache.txt" part/
cp "$build_dir/apps/gyre-attention" part/apps/
cp "$build_dir/tests/gpu.device_code" part/tests/
[[ ! -x $build_dir/bench/bench-gpu-kernels ]] || cp "$build_dir/bench/bench-gpu-kernels" part/bench/
bash "$source_dir/scripts/make_bundle.sh" part "$scratch/bundle.tar" >log || fail "make_bundle: $(cat log)"
expect 2 'ends with .tar.zst, .tar.gz or .tar' bash "$source_dir/scripts/make_bundle.sh" part "$scratch/bundle.zip"
mkdir there
tar -C there -xf bundle.tar
cd there/gyre

bare() { env -i PATH=/usr/bin:/bin "$@"; }

# Every library comes from the bundle, but for glibc, and CUDA's large ones where the host has them.
for binary in apps/*.bin tests/*.bin libexec/*.bin; do
  bare bash -c '. ./environment; ldd "$1"' apps/x "$binary" >log 2>&1 || fail "ldd $binary: $(cat log)"
  ! grep -q 'not found' log || fail "$binary lacks a library: $(cat log)"
  outside=$(awk '$2 == "=>" { print $3 }' log | grep -v "^$PWD/lib/" |
    grep -vE '/(lib(c|m|dl|rt|pthread|resolv)\.so|libnccl|libcublasLt|libcudnn)' || true)
  [[ -z $outside ]] || fail "$binary takes from the host: $outside"
done

bare ./run exec 2 gyre-attention --tokens 64 --heads 2 --kv-heads 1 --head-dim 16 -n 1 >log 2>&1 || fail "a CPU run: $(cat log)"
grep -q '^VERIFY PASSED' log || fail "not verified: $(cat log)"
# The same with the bundle's own glibc, as on a host with an older one.
bare GYRE_BUNDLE_LIBC=1 ./run exec 2 gyre-attention --tokens 64 --heads 2 --kv-heads 1 --head-dim 16 -n 1 >log 2>&1 ||
  fail "with the bundle's glibc: $(cat log)"
grep -q '^VERIFY PASSED' log || fail "not verified: $(cat log)"

expect 2 "unknown command 'test-cpu'" env -i PATH=/usr/bin:/bin ./run test-cpu
status=0
timeout 250 env -i PATH=/usr/bin:/bin GYRE_RANKS=2 ./run test-gpu >log 2>&1 || status=$?
if [[ $(cat softgpu) == 1 ]]; then
  grep -q '^gpu: passed   gpu.device_code on 1' log || fail "the GPU test did not pass: $(cat log)"
  grep -q '^gpu: passed   gyre-attention staged on 2' log || fail "gyre-attention did not pass: $(cat log)"
  # Programs that are not in this bundle must not pass for tested.
  grep -q '^gpu: FAILED   gyre-pipeline staged on 2' log || fail "a missing program was passed over: $(cat log)"
  [[ $status -eq 1 ]] || fail "exit $status, not 1, with failures"
  expect 2 'the software GPU is no machine to time' env -i PATH=/usr/bin:/bin ./run bench-gpu
elif [[ $status -eq 3 ]]; then
  grep -q 'no GPU can be used here: nothing was run' log || fail "no reason: $(cat log)"
  grep -qE 'no NVIDIA driver|no CUDA-capable device|supports CUDA' log || fail "no reason: $(cat log)"
  expect 3 'no GPU can be used here' env -i PATH=/usr/bin:/bin ./run bench-gpu
else
  grep -q '^gpu: passed   gpu.device_code on 1' log || fail "exit $status: $(cat log)"
fi
echo "ok: $(du -sm . | cut -f 1) MB"
