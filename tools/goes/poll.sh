#!/usr/bin/env bash
# Wait for half_hour.sh, at most SECONDS; then pack the records and logs that it has written so far, and show how it stands.
#
#   tools/goes/poll.sh OUT PACKED SECONDS
set -uo pipefail
mkdir -p "$2"
packed=$(cd "$2" && pwd)
cd "$1" || exit
for ((i = 0; i < $3; i += 2)); do
  grep -q '^all done' half_hour.log && break
  sleep 2
done
find . -type f \( -name '*.json' -o -name '*.jsonl' -o -name '*.yaml' -o -name '*.log' -o -name '*.png' \) -size -4M -print0 |
  tar czf "$packed/records.tar.gz" --null --files-from -
cat half_hour.log
tail -qn 1 ./*/*.log | cut -c1-150 | tail -n 30
tail -n 3 ./tests*.log 2> /dev/null | cut -c1-200
true
