#!/usr/bin/env bash
# git_identity.sh SOURCE_DIR: which changes of a checkout make a build dirty, by cmake/git_identity.cmake.
set -euo pipefail

script=$(realpath "$1")/cmake/git_identity.cmake
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# expect STATE WHAT
expect() {
  cmake -DSOURCE="$folder/tree" -DOUTPUT="$folder/build.hpp" -DVERSION=1 -DBUILD_TYPE=Release -DCOMPILER=c -P "$script"
  grep -qF "GYRE_GIT_STATE \"$1\"" "$folder/build.hpp" || { echo "FAILED: not $1: $2" && failed=1; }
}

mkdir -p "$folder"/tree/{src,slurm/sites}
cd "$folder/tree"
expect 'no git' 'a folder that is no checkout'
git init -q
echo 'build/' >.gitignore
touch src/a.cpp README.md
git add .
git -c user.name=a -c user.email=a@b commit -qm all
expect clean 'a fresh checkout'
touch docs.h5 ring.svg slurm/sites/mine.toml
expect clean 'outputs and a site of a user'
touch src/b.cpp
expect dirty 'a new source'
rm src/b.cpp
echo changed >README.md
expect dirty 'a file that was changed'

[[ $failed -eq 0 ]] && echo "git_identity: all as expected"
exit "$failed"
