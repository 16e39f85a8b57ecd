#!/usr/bin/env bash
# What is proved on a CUDA machine, in one go: the tests marked gpu, replays of traces with attention, the benchmarks.
#
#   benchmarks/gpu_proof.sh RESULTS [TRACE...]
#
# In the active Python, with attncore, the plugins and the kernel libraries importable (PYTHONPATH). KERNELS4 is the path
# of a folder with flash-attn-4 (and flash-attn 2 in the same folder, for what compares them) where PYTHONPATH has it not;
# ONLY is one or more of "tests replays benchmarks" (default: all); LIMIT is seconds for each part (default 300). Goes on
# after a failure, leaves logs and JSON in RESULTS, and exits with 1 where anything failed. Tests and replays run side by side, benchmarks one after another.
set -uo pipefail
results=${1:?a folder for logs and results}; shift
mkdir -p "$results"; results=$(cd "$results" && pwd)
cd "$(dirname "$0")/.."
only=${ONLY:-tests replays benchmarks} limit=${LIMIT:-300} python=${PYTHON:-python3} failed=0
four=${KERNELS4:+$KERNELS4:}${PYTHONPATH:-}
pids=()
# Side by side, threads of many processes that wait for each other take a hundred times as long.
quiet=(env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1)

part() { # name, command...: in the background, its log in RESULTS
  local name=$1; shift
  (timeout "$limit" "${quiet[@]}" "$@" >"$results/$name.log" 2>&1; echo "$?" >"$results/$name.rc") &
  pids+=($!)
}

report() {
  wait "${pids[@]}" 2>/dev/null; pids=()
  for rc in "$results"/*.rc; do
    [ -e "$rc" ] || continue
    name=$(basename "$rc" .rc)
    echo "$name: exit code $(cat "$rc"); $(tail -n 1 "$results/$name.log" | cut -c1-160)"
    [ "$(cat "$rc")" = 0 ] || failed=1
    rm "$rc"
  done
}

tests() { # name, folder or file, more: as make test-gpu, a part of it
  local name=$1; shift
  part "tests_$name" "$python" -P -m pytest -m gpu -q -p no:cacheprovider "$@"
}

if [[ $only == *tests* ]]; then
  tests core tests --ignore tests/integrations --ignore tests/test_backends_agree.py
  tests models tests/integrations
  tests flashinfer plugins/attn-flashinfer/tests
  tests flash plugins/attn-flash/tests
  tests rocm plugins/attn-rocm/tests
  report
  part tests_agree env PYTHONPATH="$four" "$python" -P -m pytest -m gpu -q -rP -p no:cacheprovider tests/test_backends_agree.py
  [ -z "${KERNELS4:-}" ] || part tests_flash4 env PYTHONPATH="$four" "$python" -P -m pytest -m gpu -q -p no:cacheprovider plugins/attn-flash/tests
  report
fi
if [[ $only == *replays* ]]; then
  for trace in "$@"; do
    for backend in flashinfer flash; do
      block=16; [ $backend = flash ] && block=256
      part "replay_${backend}_$(basename "$trace" | cut -d. -f1)" "$python" -P -m attncore replay "$trace" \
        --backend $backend --head-size 64 --block-size $block ${REQUESTS:+--requests $REQUESTS} --json
    done
  done
  report
fi
if [[ $only == *benchmarks* ]]; then
  quiet=(env)
  part flashinfer "$python" -P plugins/attn-flashinfer/benchmarks/bench.py --save "$results/flashinfer_bench.json"; report
  part flash2 "$python" -P plugins/attn-flash/benchmarks/forward.py --generation 2 --save "$results/flash_forward_fa2.json"; report
  [ -z "${KERNELS4:-}" ] || { part flash4 env PYTHONPATH="$four" "$python" -P plugins/attn-flash/benchmarks/forward.py --generation 4 --save "$results/flash_forward_fa4.json"; report; }
  part each env PYTHONPATH="$four" "$python" -P benchmarks/steps_of_each_backend.py --save "$results/steps_of_each_backend.json"; report
  part transformers "$python" -P benchmarks/transformers_gpu.py --backends flashinfer,flash ${1:+--trace "$1"} --save "$results/transformers.json"; report
fi
exit $failed
