#!/usr/bin/env bash
# dependencies.sh SOURCE_DIR [BUILD_DIR]: the layering of the sources, checked by reading them. Then the check itself is
# checked: each rule must notice a violation planted into a copy.
set -euo pipefail

# The quoted includes that a module of src may use, its own included:
#     apps -> {harness, predict, baselines} -> {report, io} -> model -> {attention, recurrence, logprobs, packing, sharding, machine} -> comm -> runtime
#          -> core
# supervision stands above runtime. Only apps, report and io use it: programs can leave it out.
# predict draws with report's SVG, and report tells the provenance that io writes.
declare -A ALLOWED=(
  [core]='core'
  [runtime]='runtime core'
  [comm]='comm runtime core'
  [machine]='machine comm runtime core'
  [packing]='packing sharding comm runtime core'
  [sharding]='sharding comm runtime core'
  [attention]='attention sharding comm runtime core'
  [recurrence]='recurrence sharding comm runtime core'
  [logprobs]='logprobs sharding comm runtime core'
  [supervision]='supervision runtime core'
  [io]='io logprobs sharding comm supervision runtime core'
  [model]='model attention recurrence logprobs packing sharding comm runtime core'
  [baselines]='baselines logprobs sharding comm runtime core'
  [report]='report machine io comm supervision runtime core'
  [harness]='harness report io model attention recurrence logprobs machine sharding comm runtime core'
  [predict]='predict report model machine attention recurrence logprobs packing sharding comm runtime core'
)
PRINTING='std::(cout|cerr|clog|puts|printf|print)|\b(vf?|f|d)?printf *\(|\bf?put[cs] *\(|\bputchar *\(|\bperror *\('
PRINTING+='|\bfwrite *\(|fmt::print|<iostream>|\bwrite *\( *(STD(OUT|ERR)_FILENO|[12]\b)'
MAX_MAIN_LINES=200 # what is read in five minutes
MAX_FILE_LINES=450

# code_lines PATTERN FOLDER...: lines that match outside of // comments, as FILE:LINE:TEXT.
code_lines() {
  grep -rnE --include='*.[ch]pp' --include='*.[ch]' --include='*.cu' --include='*.cuh' "$@" |
    sed 's@//.*@@' | grep -E "$1" || true
}

check_includes() {
  local folder module line included
  for folder in src/*/; do
    module=$(basename "$folder")
    [[ -v ALLOWED[$module] ]] || echo "src/$module: a module that the table of tests/unit/dependencies.sh does not know"
  done
  while IFS= read -r line; do
    module=${line#*/}
    module=${module%%/*}
    [[ $line =~ \#include\ \"([^\"]*)\" ]] && included=${BASH_REMATCH[1]}
    if [[ $line == src/* ]]; then
      [[ -v ALLOWED[$module] && $included != gyre_build.hpp ]] || continue # made by the build
      [[ $included == */* && " ${ALLOWED[$module]} " == *" ${included%%/*} "* ]] ||
        echo "$line: $module may include only ${ALLOWED[$module]}, by their full path"
    else # apps use everything of src, their own folder and what is common to them
      [[ $module == info && $included == apps/*/registry.hpp ]] && continue # it lists what registries hold
      [[ $included == apps/$module/* || $included == apps/common/* || -v ALLOWED[${included%%/*}] ]] ||
        echo "$line: apps/$module may include src, apps/common and itself, by their full path"
    fi
  done < <(code_lines '#include "' src apps)
}

# forbid PATTERN REASON FOLDER...: the pattern may not occur below the folders.
forbid() {
  local folder folders=()
  for folder in "${@:3}"; do
    [[ ! -d $folder ]] || folders+=("$folder")
  done
  [[ ${#folders[@]} -eq 0 ]] || code_lines "$1" "${folders[@]}" | sed "s@\$@   <- $2@"
}

# All modules of src but one.
but() {
  local module
  for module in src/*/; do
    [[ $module == "src/$1/" ]] || echo "$module"
  done
}

check_names() {
  forbid '\bMPI_COMM_WORLD' 'only src/runtime/mpi_env.cpp may name it' src apps tests bench |
    grep -v '^src/runtime/mpi_env\.cpp:' || true
  # The software GPU knows no <<<...>>>, and nothing would check the launch.
  forbid '<<<[^<]' 'launches go through gyre::launch' src tests bench
  # What it writes through ends although nobody reads, or nothing can be written.
  forbid "$PRINTING" 'only src/runtime/process.cpp prints: write_stdout, write_diagnostic' src apps |
    grep -v '^src/runtime/process\.cpp:' || true
  forbid '<CLI/' 'only report reads options' $(but report)
  forbid '<hdf5' 'only io speaks HDF5' $(but io)
  # The others are compiled once for all devices, without these definitions.
  forbid '\bGYRE_(WITH_[A-Z]+|SOFTGPU)\b' 'only sources of a device may ask for it' src apps |
    grep -vE '^src/[^:]*(/(cuda|nccl|cublas|cudnn)[^/:]*|\.cuh?):' || true
}

# at_most LINES WHAT: says which of the files that are read from stdin, separated by NUL, have more.
at_most() {
  xargs -0 -r wc -l |
    awk -v most="$1" -v what="$2" '$2 != "total" && $1 > most { print $2 ": " $1 " lines; " what " has at most " most }'
}

check_sizes() {
  find apps -path 'apps/*/main.cpp' -print0 | at_most "$MAX_MAIN_LINES" 'the main file of an app'
  find src apps '(' -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' ')' -print0 | at_most "$MAX_FILE_LINES" 'a file'
}

# Prints every violation in the tree $1.
violations() { (cd "$1" && check_includes && check_names && check_sizes); }

failed=0

# must_notice FILE LINE EXPECTED: with LINE added to FILE of a copy, a violation must contain EXPECTED.
must_notice() {
  local copy found
  copy=$(mktemp -d)
  mkdir -p "$copy/src/core" "$copy/src/runtime" "$copy/src/comm" "$copy/src/io" "$copy/apps"
  mkdir -p "$copy/$(dirname "$1")"
  printf '%b\n' "$2" >"$copy/$1"
  found=$(violations "$copy")
  rm -rf "$copy"
  if [[ -n $3 && $found != *"$3"* ]] || [[ -z $3 && -n $found ]]; then
    echo "the check is broken: with '$2' in $1 it should find '${3:-nothing}', but finds '$found'"
    failed=1
  fi
}

found=$(violations "$1")
if [[ -n $found ]]; then
  printf '%s\n' "$found"
  failed=1
fi

must_notice src/core/a.hpp '#include "comm/mpi.hpp"' 'core may include only'
must_notice src/attention/a.cpp '#include "packing/packing.hpp"' 'attention may include only'
must_notice src/sharding/a.cpp '#include "attention/plan.hpp"' 'sharding may include only'
must_notice src/model/a.cu '#include "io/tensors.hpp"' 'model may include only'
must_notice src/packing/a.cpp '#include "attention/plan.hpp"' 'packing may include only'
must_notice src/packing/a.cpp '#include "a.hpp"' 'by their full path'
must_notice src/newcomer/a.cpp '' 'does not know'
must_notice src/comm/a.cpp 'MPI_Barrier(MPI_COMM_WORLD);' 'may name it'
must_notice tests/mpi/a.cpp 'MPI_Barrier(MPI_COMM_WORLD);' 'may name it'
must_notice src/logprobs/a.cpp 'std::cout << 1;' 'process.cpp prints'
must_notice apps/one/a.cpp 'fmt::print("x");' 'process.cpp prints'
must_notice src/report/a.cpp 'fputs(text, stdout);' 'process.cpp prints'
must_notice src/io/a.cpp 'write(STDERR_FILENO, text, 3);' 'process.cpp prints'
must_notice src/comm/a.cpp 'fprintf(stderr, "x");' 'process.cpp prints'
must_notice src/attention/a.cu 'printf("x");' 'process.cpp prints'
must_notice src/model/a.cu 'kernel<<<grid, block>>>(x);' 'gyre::launch'
must_notice src/model/a.cpp '#include <CLI/CLI.hpp>' 'only report reads options'
must_notice src/report/a.cpp '#include <hdf5.h>' 'only io speaks HDF5'
must_notice apps/long/main.cpp "$(printf '%.0s\\n' $(seq 200))" 'at most 200'
must_notice apps/long/run.cpp "$(printf '%.0s\\n' $(seq 450))" 'at most 450'
must_notice src/io/long.cpp "$(printf '%.0s\\n' $(seq 450))" 'at most 450'
must_notice apps/one/a.cpp '#include "apps/other/run.hpp"' 'apps/one may include'
must_notice src/io/a.cpp '#include "harness/suite.hpp"' 'io may include only'
must_notice src/report/a.cpp '#include "predict/explain.hpp"' 'report may include only'
must_notice src/report/a.cpp '#include "attention/plan.hpp"' 'report may include only'
must_notice src/report/a.cpp '#include "harness/suite.hpp"' 'report may include only'
must_notice src/harness/a.cpp '#include "predict/explain.hpp"' 'harness may include only'
must_notice src/logprobs/a.cpp '#include "baselines/upstream.hpp"' 'logprobs may include only'
must_notice apps/one/a.cpp '#include "apps/other/registry.hpp"' 'apps/one may include'
must_notice src/machine/a.cpp '#include "report/value.hpp"' 'machine may include only'
must_notice src/runtime/a.cpp '#include "supervision/guard.hpp"' 'runtime may include only'
must_notice src/attention/a.cpp '#include "supervision/supervision.hpp"' 'attention may include only'
must_notice src/runtime/a.hpp '#ifdef GYRE_WITH_CUDA' 'sources of a device'
must_notice apps/one/a.cpp '#ifdef GYRE_SOFTGPU' 'sources of a device'
# And what is allowed must pass.
must_notice src/runtime/cuda_a.cpp '#ifdef GYRE_SOFTGPU' ''
must_notice src/attention/a.cuh '#ifdef GYRE_SOFTGPU' ''
must_notice apps/info/a.cpp '#include "apps/other/registry.hpp"' ''
must_notice src/report/a.cpp '#include "io/schemas/schema.hpp"\n#include <CLI/CLI.hpp>\nwrite_stdout("x");' ''
must_notice apps/one/a.cpp '#include "apps/common/extras.hpp"\n#include "harness/suite.hpp"' ''
must_notice src/runtime/mpi_env.cpp 'MPI_Comm_dup(MPI_COMM_WORLD, &world);' ''
must_notice src/report/a.cpp 'getenv("OMPI_COMM_WORLD_SIZE");' ''
must_notice src/model/a.cpp '// MPI_COMM_WORLD and printf() in a comment\nsnprintf(text, 3, "x");' ''
must_notice src/runtime/process.cpp 'write(STDERR_FILENO, text, 3);' ''
must_notice apps/short/main.cpp "$(printf '%.0s\\n' $(seq 199))" ''

[[ $failed -eq 0 ]] && echo "dependencies: all rules hold"
exit "$failed"
