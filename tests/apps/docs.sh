#!/usr/bin/env bash
# docs.sh SOURCE_DIR BUILD_DIR: the commands of README.md and the pages end well, and draw what docs/ shows.
exec python3 "$1/tests/support/check_docs.py" "$1" "$2/apps"
