# Sourced by the scripts beside it.
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH}
run() { "${PYTHON:-python3}" -m driftgen "$@"; }

# NAME SECONDS COMMAND...: runs it with its output in $out/NAME.log, and says how it ended. SECONDS is its limit.
step() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout -s INT -k 20 "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  echo "$name: exit $code, $((SECONDS - start)) s"
  return $code
}

# FILE...: waits until all of them exist.
need() {
  local file
  for file in "$@"; do
    until [ -e "$file" ]; do sleep 1; done
  done
}
