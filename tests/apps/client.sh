#!/usr/bin/env bash
# The client of docs/library.md: a program outside of the tree builds by the lines that the page shows, against the
# build folder and against an installation, is right on 1 and 2 ranks, and gets none of our warnings.
# Usage: client.sh SOURCE_DIR BUILD_DIR    (MPIEXEC: the launcher)
source "$(dirname "$0")/../support/app_test.bash"
build_dir=$2
page=$source_dir/docs/library.md

# block COMMENT: the block of the page that follows this comment.
block() { sed -n "/^<!-- ${1//\//\\/} -->$/,/^\`\`\`$/p" "$page" | sed '1,2d; $d'; }

for file in docs/client/CMakeLists.txt docs/client/client.cpp; do
  diff <(block "$file") "$source_dir/$file" || fail "docs/library.md does not show $file as it is"
done

# The compilers that the build uses.
cached() { sed -n "s/^CMAKE_$1:[A-Z]*=//p" "$build_dir/CMakeCache.txt"; }
compilers=("-DCMAKE_C_COMPILER=$(cached C_COMPILER)" "-DCMAKE_CXX_COMPILER=$(cached CXX_COMPILER)")

# client FOLDER WHERE: builds it in FOLDER, where gyre is found by the option WHERE, and runs it.
client() {
  cmake -S "$source_dir/docs/client" -B "$1" -G Ninja "${compilers[@]}" "$2" >"$1.log" 2>&1 || fail "$2: $(cat "$1.log")"
  cd "$1"
  cmake --build . >log 2>&1 || fail "$2: $(cat log)"
  expect 0 'rank 0: 1456 pairs, messages sent: 0, bytes: 0, slots: 0 1 2 3 4 5 6 7 8 9 10' "$MPIEXEC" -n 1 ./client
  expect 0 'log-probabilities' "$MPIEXEC" -n 2 ./client
  diff <(block 'a test compares it with what the client prints' | sed 's/error .*//') <(sed 's/error .*//' output) ||
    fail "docs/library.md does not show what the client prints"
  # MPI's libraries call the shim in the program; flags of ours end at our sources.
  nm -D --defined-only client >symbols
  grep -q ' T ucp_worker_progress$' symbols || fail "$2: the program does not export the shim"
  ! grep -E '^ *FLAGS = .* -(Wnon-virtual-dtor|ffp-contract)' build.ninja ||
    fail "$2: the client is compiled with flags of ours"
}

(client built "-Dgyre_DIR=$build_dir") & # while the other is installed and built
built=$!

cmake --install "$build_dir" --prefix "$scratch/prefix" >install.log 2>&1 || fail "$(cat install.log)"
! grep -rnF -e "$source_dir" -e "$build_dir" prefix/lib*/cmake || fail "the package names folders of the build"
expect 0 gyre-pack prefix/bin/gyre-pack --version
(client installed "-DCMAKE_PREFIX_PATH=$scratch/prefix") || exit 1
wait $built || exit 1
grep -q "^gyre_DIR:PATH=$scratch/prefix/" installed/CMakeCache.txt || fail "another installation was found"
echo "client: all passed"
