#!/usr/bin/env bash
# Pack what the scripts beside it have written so far: records, logs and pictures, and models in 8 bits in parts of 15 MB.
#
#   tools/goes/fetch.sh OUT PACKED
set -uo pipefail
mkdir -p "$2"
packed=$(cd "$2" && pwd)
cd "$1" || exit
find . -type f \( -name '*.json' -o -name '*.jsonl' -o -name '*.yaml' -o -name '*.log' -o -name '*.png' -o -name '*.html' \) -size -4M -print0 |
  tar czf "$packed/records.tar.gz" --null --files-from -
find . -type d -name '*-8bit' -print0 | tar cf - --null --files-from - | split -b 15000000 -d - "$packed/models.tar."
ls -l "$packed"
tail -n 8 ./*.log
