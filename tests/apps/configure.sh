#!/usr/bin/env bash
# configure.sh SOURCE_DIR: CMake without ./run, a preset or the libraries of tests and benchmarks finds what lies in
# CMAKE_PREFIX_PATH; ./run build takes packages for granted when it is set.
set -euo pipefail
source_dir=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# A prefix with links to installed libraries, one for each way to find them: find_path, a CMake package, pkg-config.
prefix=$scratch/prefix
mkdir -p "$prefix"/{include,lib/cmake/CLI11,lib/pkgconfig}
ln -s "$(echo '#include <xxhash.h>' | cc -E -x c - | sed -nE 's/^# 1 "(.*xxhash\.h)".*/\1/p' | head -n 1)" "$prefix/include/"
cat >"$prefix/lib/cmake/CLI11/CLI11Config.cmake" <<'CMAKE'
add_library(CLI11::CLI11 INTERFACE IMPORTED)
CMAKE
sed 's/^Version:.*/Version: 99.7/' "$(pkg-config --variable=pcfiledir hwloc)/hwloc.pc" >"$prefix/lib/pkgconfig/hwloc.pc"

# Were their libraries looked for, these would be errors.
absent=(-DCMAKE_DISABLE_FIND_PACKAGE_{GTest,rapidcheck,benchmark}=ON)
generator=Ninja
! command -v make >/dev/null || generator="Unix Makefiles"
CMAKE_PREFIX_PATH=$prefix cmake -G "$generator" -S "$source_dir" -B "$scratch/build" -DBUILD_TESTING=OFF -DGYRE_BENCHMARKS=OFF \
  -DGYRE_CUDA=OFF "${absent[@]}" >"$scratch/log" 2>&1 || fail "$(cat "$scratch/log")"
cache=$scratch/build/CMakeCache.txt
for found in "XXHASH_INCLUDE_DIR:PATH=$prefix/include" "CLI11_DIR:PATH=$prefix/lib/cmake/CLI11" "hwloc_VERSION:INTERNAL=99.7"; do
  grep -qxF "$found" "$cache" || fail "no '$found' in $(grep -E 'XXHASH|CLI11|hwloc_VERSION' "$cache")"
done
[[ -d $scratch/build/apps && ! -e $scratch/build/tests && ! -e $scratch/build/CTestTestfile.cmake ]] ||
  fail "BUILD_TESTING=OFF has tests: $(ls "$scratch/build")"
# make builds what a program's link line names only if the program depends on it; Ninja knows the files.
[[ $generator == Ninja ]] || grep -qx 'apps/CMakeFiles/gyre-import.dir/all: src/CMakeFiles/gyre_mpi_shim.dir/all' \
  "$scratch/build/CMakeFiles/Makefile2" || fail "gyre-import does not depend on the objects of gyre_mpi_shim"
[[ ! -e $scratch/build/bench ]] || fail "GYRE_BENCHMARKS=OFF has benchmarks"
for with in BUILD_TESTING GYRE_BENCHMARKS; do
  ! cmake -D$with=ON "$scratch/build" >"$scratch/log" 2>&1 || fail "$with=ON does not need what it is for"
  cmake -D$with=OFF "$scratch/build" >"$scratch/log" 2>&1 || fail "$(cat "$scratch/log")"
done

# What cannot be built for is refused before libraries are looked for.
! cmake -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -S "$source_dir" -B "$scratch/arm" >"$scratch/log" 2>&1 ||
  fail "it configures for ARM64"
grep -q 'Gyre needs an x86-64 processor' "$scratch/log" || fail "ARM64: $(cat "$scratch/log")"

# Options that change sums, or take NaN away, are refused by name; others are recorded.
! cmake -DCMAKE_CXX_FLAGS=-ffast-math "$scratch/build" >"$scratch/log" 2>&1 || fail "-ffast-math is accepted"
grep -q 'CMAKE_CXX_FLAGS has -ffast-math' "$scratch/log" || fail "-ffast-math: $(cat "$scratch/log")"
flags() { cmake "$@" -P "$source_dir/cmake/GyreFlags.cmake" >"$scratch/log" 2>&1; }
for given in 'CXX_FLAGS=-O2 -Ofast' 'CXX_FLAGS=-funsafe-math-optimizations -g' 'CXX_FLAGS_RELEASE=-ffinite-math-only' \
  'CXX_FLAGS=-fassociative-math' 'CUDA_FLAGS=--use_fast_math'; do
  ! flags -DCMAKE_BUILD_TYPE=Release -DGYRE_WITH_CUDA=ON "-DCMAKE_$given" || fail "$given is accepted"
  grep -q "CMAKE_${given%%=*} has -" "$scratch/log" || fail "$given: $(cat "$scratch/log")"
done
flags '-DCMAKE_CXX_FLAGS=-fno-fast-math -DNAME=-Ofaster' || fail "what is no such option is refused: $(cat "$scratch/log")"

# ./run build: no package is installed, and CMake does not succeed.
mkdir "$scratch/bin"
printf '#!/bin/sh\nexit 1\n' | tee "$scratch/bin/dpkg-query" >"$scratch/bin/cmake"
chmod -R a+rx "$scratch"
user=()
[[ $EUID -ne 0 ]] || user=(setpriv --reuid=65534 --clear-groups)
run_build() { PATH=$scratch/bin:$PATH "${user[@]}" env "$@" "$source_dir/run" build >"$scratch/log" 2>&1 || true; }
if "${user[@]}" test -x "$source_dir/run"; then
  run_build -u CMAKE_PREFIX_PATH
  grep -q 'missing packages; as root: .* libxsmm-dev ' "$scratch/log" || fail "missing packages: $(cat "$scratch/log")"
  run_build "CMAKE_PREFIX_PATH=$prefix"
  grep -q 'taking for granted, .* libxsmm-dev ' "$scratch/log" || fail "CMAKE_PREFIX_PATH: $(cat "$scratch/log")"
  grep -q 'configuring build/cpu failed' "$scratch/log" || fail "it went on: $(cat "$scratch/log")"
fi
echo "configure: all passed"
