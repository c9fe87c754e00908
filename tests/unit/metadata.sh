#!/usr/bin/env bash
# metadata.sh SOURCE_DIR: the version of CMakeLists.txt is that of the other files that must state it, and the address of
# the repository stands in one file.
set -euo pipefail
cd "$1"
failed=0
version=$(sed -nE 's/^project\(gyre VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "no version in CMakeLists.txt: '$version'" && exit 1; }
states() { grep -qF -- "$2" "$1" || { echo "$1 does not state '$2'" && failed=1; }; }
states python/gyre/version.py "__version__ = \"$version\""
states CITATION.cff "version: $version"
states docs/numbers.md "# gyre-shard $version "
states docs/library.md "find_package(gyre ${version%.*})"
states docs/building.md "gyre_${version}_amd64.deb and gyre-$version-Linux.tar.zst"
newest=$(grep -m 1 '^## ' CHANGELOG.md)
[[ $newest == "## $version "* ]] || { echo "CHANGELOG.md begins with '$newest', not with $version" && failed=1; }
address=ADDRESS-OF
files=$(grep -rlI --exclude-dir=build --exclude-dir=.git -- "$address-GYRE" .)
[[ $files == ./docs/building.md ]] || { echo "the placeholder of the address stands in: $files" && failed=1; }
[[ $failed -eq 0 ]] && echo "metadata: version $version"
exit "$failed"
