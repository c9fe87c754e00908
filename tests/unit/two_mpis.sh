#!/usr/bin/env bash
# two_mpis.sh SOURCE_DIR: cmake/CheckMpiOfHdf5.cmake refuses an HDF5 library that was built with another MPI.
set -euo pipefail

script=$(realpath "$1")/cmake/CheckMpiOfHdf5.cmake
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# library FILE SONAME [NEEDED]
library() { echo 'int x;' | cc -shared -fPIC -o "$1" -Wl,-soname,"$2" -Wl,--no-as-needed -x c - ${3:+-x none "$3"}; }

library libmpich.so libmpich.so.12
library libmpi.so libmpi.so.40
library libhdf5_mpich.so libhdf5.so.1 ./libmpich.so
library libhdf5_openmpi.so libhdf5.so.2 ./libmpi.so
check() {
  printf 'cmake_minimum_required(VERSION 3.20)\ninclude(%s)\ngyre_check_mpi_of_hdf5("%s" "%s")\n' "$script" "$1" "$2" >check.cmake
  cmake -P check.cmake 2>output
}

check "$folder/libhdf5_mpich.so" "$folder/libmpich.so" || { cat output && exit 1; }
check "$folder/libhdf5_openmpi.so" "$folder/libmpi.so" || { cat output && exit 1; }
check "z;$folder/no.so" "$folder/libmpi.so" || { cat output && exit 1; }
if check "$folder/libhdf5_openmpi.so;m" "$folder/libmpich.so"; then
  echo "FAILED: two MPIs were not noticed" && exit 1
fi
tr -s ' \n' ' ' <output >line
grep -qF "libhdf5_openmpi.so) was built with libmpi.so.40, and MPI is libmpich.so.12" line || { cat output && exit 1; }
echo "two_mpis: all as expected"
