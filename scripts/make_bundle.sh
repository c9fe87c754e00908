#!/usr/bin/env bash
# Packs a build into one archive that runs on hosts where none of its packages is installed:
#
#   make_bundle.sh BUILD_FOLDER OUTPUT [--with-cuda-libs]
#
#   gyre/run                   test-gpu, bench-gpu, exec PROGRAM ...
#   gyre/apps, tests, bench    programs, each as NAME.bin behind a wrapper that finds the libraries
#   gyre/libexec               hydra's mpiexec and its proxy
#   gyre/lib                   the libraries of all of them: ucx/ plugins, libc/ for hosts with an older glibc,
#                              stubs/ in the place of NCCL and cuBLASLt (700 MB) where the host has none
#   gyre/inputs, scripts       small inputs, scripts that run needs
#
# The driver is the host's. So are NCCL, cuBLASLt and cuDNN, unless --with-cuda-libs packs them; they are looked for in
# the usual places, in CUDA_HOME, NCCL_HOME, and Python's site-packages. Without NCCL and cuBLASLt the stubs return
# errors from every call: --comm nccl then fails, and products use Gyre's own kernel.
set -Eeuo pipefail
trap 'echo "bundle: line $LINENO failed: $BASH_COMMAND" >&2' ERR

build=$(cd "$1" && pwd)
output=$2
with_cuda=${3:-}
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/gyre
mkdir -p "$root"/{apps,tests,bench,libexec,inputs,scripts,lib/{ucx,libc,stubs}}

say() { printf 'bundle: %s\n' "$*"; }

# Libraries of glibc and of the driver must not be mixed with other versions; those of CUDA are large.
is_libc() { [[ $1 =~ ^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|anl|nss_.*))\.so ]]; }
is_driver() { [[ $1 =~ ^lib(cuda|nvidia-.*)\.so ]]; }
is_large() { [[ $1 =~ ^lib(nccl|cublasLt|cublas|cudnn.*|nvrtc.*)\.so ]]; }

declare -A taken=()
large=()
# take FILE: copies the libraries that a program or library needs to lib/.
take() {
  local name path
  while read -r name path; do
    [[ -z ${taken[$name]:-} ]] || continue
    taken[$name]=$path
    if is_driver "$name"; then
      continue
    elif is_libc "$name"; then
      cp -L "$path" "$root/lib/libc/$name"
    elif is_large "$name" && [[ $with_cuda != --with-cuda-libs ]]; then
      large+=("$name=$path")
    else
      cp -L "$path" "$root/lib/$name"
      strip --strip-unneeded "$root/lib/$name" 2>/dev/null || true
    fi
  done < <(ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 } $1 ~ /^\/.*ld-linux/ { n = split($1, p, "/"); print p[n], $1 }')
}

# program FILE FOLDER NAME: installs FOLDER/NAME.bin and a wrapper.
program() {
  local to=$root/$2/$3
  cp -L "$1" "$to.bin"
  strip --strip-unneeded "$to.bin"
  take "$1"
  cat >"$to" <<'WRAPPER'
#!/bin/sh
. "$(dirname "$0")/../environment"
exec $GYRE_LOADER "$0.bin" "$@"
WRAPPER
  chmod +x "$to"
}

count=0
for file in "$build"/apps/gyre-* "$build"/tests/gpu.* "$build"/bench/bench-gpu-*; do
  [[ -f $file && -x $file ]] || continue
  folder=$(basename "$(dirname "$file")")
  program "$file" "$folder" "$(basename "$file")"
  count=$((count + 1))
done
[[ $count -gt 0 ]] || { echo "bundle: there are no programs in $build" >&2 && exit 2; }

# Launcher of the MPI that the programs were linked with; mpiexec starts the proxy in its own folder.
mpiexec=$(readlink -f "$(command -v mpiexec.hydra || command -v mpiexec.mpich || command -v mpiexec)")
program "$mpiexec" libexec mpiexec
program "$(dirname "$mpiexec")/hydra_pmi_proxy" libexec hydra_pmi_proxy

# UCX loads its transports at run time.
ucx_dir=$(dirname "${taken[libucs.so.0]:-/none}")/ucx
if [[ -d $ucx_dir ]]; then
  for file in "$ucx_dir"/lib*.so.0; do
    cp -L "$file" "$root/lib/ucx/"
    take "$file"
  done
fi

# cuDNN and NVRTC are loaded by name on first use.
cuda=13 # major version of the build's CUDA
for name in "${!taken[@]}"; do [[ ! $name =~ ^lib(cudart|cublasLt)\.so\.([0-9]+)$ ]] || cuda=${BASH_REMATCH[2]}; done
if [[ $with_cuda == --with-cuda-libs && -n ${taken[libcudart.so.$cuda]:-} ]]; then
  for file in "$(dirname "${taken[libcudart.so.$cuda]}")"/libcudnn*.so.9 \
    "$(dirname "${taken[libcudart.so.$cuda]}")"/libnvrtc*.so.1[0-9]*; do
    [[ ! -e $file || $file == *.alt.* ]] || cp -L "$file" "$root/lib/"
  done
fi

# stub NAME LIBRARY: defines every function of the library that a program here calls; each returns an error.
stub() {
  local name=$1 library=$2 symbols version
  symbols=$(find "$root" -name '*.bin' -exec nm -D --undefined-only {} + | awk '$1 == "U" { print $2 }' |
    sed 's/@.*//' | sort -u | comm -12 - <(nm -D --defined-only "$library" | awk '{ print $3 }' | sed 's/@.*//' | sort -u))
  version=$(objdump -p "$library" | awk '/Version definitions/ { on = 1; next } on && $1 == 2 { print $4; on = 0 }')
  {
    for symbol in $symbols; do
      case $symbol in
        *String | *LastError) echo "const char* $symbol(void) { return \"$name is not on this host\"; }" ;;
        cublasLtGetVersion) echo "unsigned long $symbol(void) { return 0; }" ;;
        *) echo "int $symbol(void) { return 2; }" ;;
      esac
    done
  } >"$stage/stub.c"
  [[ -s $stage/stub.c ]] || return 0
  echo "${version:-GYRE_STUB} { global: *; };" >"$stage/stub.map"
  cc -shared -fPIC -w -o "$root/lib/stubs/$name" -Wl,-soname,"$name" \
    ${version:+-Wl,--version-script="$stage/stub.map"} "$stage/stub.c"
}
if [[ ${#large[@]} -gt 0 ]]; then
  for entry in "${large[@]}"; do stub "${entry%%=*}" "${entry#*=}"; done
  say "left out, taken from the host or stubbed: $(for e in "${large[@]}"; do
    printf '%s (%s MB) ' "${e%%=*}" "$(($(stat -Lc %s "${e#*=}") / 1000000))"
  done)"
fi

cat >"$root/environment" <<'ENVIRONMENT'
# Where the libraries are; sourced by the wrappers.
if [ -z "${GYRE_BUNDLE:-}" ]; then
  GYRE_BUNDLE=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
  gyre_path=$GYRE_BUNDLE/lib
  for gyre_dir in ${CUDA_HOME:+"$CUDA_HOME/lib64" "$CUDA_HOME/lib"} ${NCCL_HOME:+"$NCCL_HOME/lib"} \
    /usr/local/cuda/lib64 /usr/local/cuda-@CUDA@*/lib64 /usr/local/cuda-@CUDA@*/lib \
    /usr/lib/x86_64-linux-gnu /usr/lib64 \
    /usr/local/lib/python3*/*-packages/nvidia/*/lib /usr/lib/python3*/*-packages/nvidia/*/lib \
    /opt/conda/lib/python3*/site-packages/nvidia/*/lib ${VIRTUAL_ENV:+"$VIRTUAL_ENV"/lib/python3*/site-packages/nvidia/*/lib}; do
    # Only folders that hold what is looked for, and no other library that programs here have brought along.
    for gyre_lib in libnccl.so.2 libcublasLt.so.@CUDA@ libcudnn.so.9; do
      if [ -e "$gyre_dir/$gyre_lib" ]; then
        case $gyre_path: in *":$gyre_dir:"*) ;; *) gyre_path=$gyre_path:$gyre_dir ;; esac
      fi
    done
  done
  LD_LIBRARY_PATH=$gyre_path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:$GYRE_BUNDLE/lib/stubs
  UCX_MODULE_DIR=$GYRE_BUNDLE/lib/ucx
  # An older glibc than that of the build cannot run these programs: then the one in the bundle does.
  GYRE_LOADER=
  gyre_wanted=@GLIBC@
  gyre_has=$( (getconf GNU_LIBC_VERSION 2>/dev/null || echo 'glibc 0') | sed 's/.* //')
  if [ "$(printf '%s\n%s\n' "$gyre_wanted" "$gyre_has" | sort -V | head -n 1)" != "$gyre_wanted" ] ||
    [ "${GYRE_BUNDLE_LIBC:-}" = 1 ]; then
    GYRE_LOADER="$GYRE_BUNDLE/lib/libc/ld-linux-x86-64.so.2 --library-path $GYRE_BUNDLE/lib/libc:$LD_LIBRARY_PATH"
  fi
  export GYRE_BUNDLE LD_LIBRARY_PATH UCX_MODULE_DIR GYRE_LOADER
fi
ENVIRONMENT
sed -i "s/@GLIBC@/$(getconf GNU_LIBC_VERSION | sed 's/.* //')/; s/@CUDA@/$cuda/g" "$root/environment"

cp "$source_dir"/inputs/{docs_tiny,docs_small,model_tiny,attention_causal,attention_window,logprobs_golden}.h5 "$root/inputs/"
cp "$source_dir/scripts/gpu_suite.sh" "$root/scripts/"
cp "$source_dir/scripts/bundle_run.sh" "$root/run"
cp "$source_dir/LICENSE" "$root/"
grep -q 'GYRE_CUDA:STRING=SOFTWARE' "$build/CMakeCache.txt" && echo 1 >"$root/softgpu" || echo 0 >"$root/softgpu"
git -C "$source_dir" describe --always --dirty >"$root/VERSION" 2>/dev/null || echo unknown >"$root/VERSION"

mkdir -p "$(dirname "$output")"
# A window of 128 MB: the programs share most of their code.
case $output in
  *.zst) tar -C "$stage" -cf - gyre | zstd -q -12 --long=27 -T0 -f -o "$output" ;;
  *.gz) tar -C "$stage" -czf "$output" gyre ;;
  *.tar) tar -C "$stage" -cf "$output" gyre ;;
  *) echo "bundle: $output: the name of a bundle ends with .tar.zst, .tar.gz or .tar" >&2 && exit 2 ;;
esac
say "$output: $count programs, $(($(stat -c %s "$output") / 1000000)) MB, unpacked $(du -sm "$root" | cut -f 1) MB"
