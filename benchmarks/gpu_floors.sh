#!/usr/bin/env bash
# The longer race of steps ahead, compute-sanitizer over the nodes, and the floors of what steps cost, in nine minutes.
#
#   benchmarks/gpu_floors.sh RESULTS
#
# On a CUDA machine, in the active Python (PYTHON), with attncore, attn-flash, attn-flashinfer and the kernel libraries
# importable (PYTHONPATH). What is timed runs alone and first; the race runs beside the sanitizer and the tests of plans
# that the device makes. A part that fails or takes too long does not stop the others; its log says why. Exits with 1
# where anything failed.
set -uo pipefail
results=${1:?a folder for logs and results}
mkdir -p "$results"; results=$(cd "$results" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
here=$PWD/benchmarks:$PWD/examples:$PWD/plugins/attn-flashinfer/benchmarks
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
failed=0 begun=$SECONDS

part() { # seconds, name, command...: its log in RESULTS
  local limit=$1 name=$2 rc; shift 2
  timeout -k 5 "$limit" "$python" -P "$@" >"$results/$name.log" 2>&1; rc=$?
  echo "$((SECONDS - begun)) s, $name: exit code $rc; $(tail -n 1 "$results/$name.log" | cut -c1-160)"
  return $rc
}

# All that can be mistyped, first: a second each.
part 60 imports -c "import attncore, torch, builder_insides, gpu_ahead, launch_floor, tail_floor, sanitized_nodes; \
import attn_flashinfer.plan_kernel, plan_floor, plan_branch, ragged_tiles, device_plan; print(torch.cuda.get_device_name())" \
  || part 60 imports_of_core -c "import attncore, torch, gpu_ahead, launch_floor, tail_floor; print(torch.cuda.get_device_name())" || exit 1
part 60 plan_floor plugins/attn-flashinfer/benchmarks/plan_floor.py --save "$results/plan_floor.json" || failed=1
part 40 plan_branch plugins/attn-flashinfer/benchmarks/plan_branch.py --save "$results/plan_branch.json" || failed=1
part 40 ragged_tiles plugins/attn-flashinfer/benchmarks/ragged_tiles.py --save "$results/ragged_tiles.json" || failed=1
part 50 launch_floor benchmarks/launch_floor.py --save "$results/launch_floor.json" || failed=1
part 60 tail_floor benchmarks/tail_floor.py --backends flash,flashinfer --steps 1000 --save "$results/tail_floor.json" || failed=1
part 45 ahead_times benchmarks/gpu_ahead.py --steps 0 --rounds 150 --save "$results/ahead_times.json" || failed=1
part 210 sanitized benchmarks/sanitized_nodes.py --limit 95 --save "$results/sanitized.json" & beside=$!
part 220 tests -m pytest -m gpu -q -p no:cacheprovider plugins/attn-flashinfer/tests/test_device_plan_gpu.py & tests=$!
part 220 gpu_ahead benchmarks/gpu_ahead.py --steps "${STEPS:-100000}" --rounds 0 --save "$results/gpu_ahead.json" || failed=1
wait $beside; case $? in 0 | 3) ;; *) failed=1 ;; esac
wait $tests || failed=1
left=$((530 - SECONDS + begun))
export FLASHINFER_DISABLE_JIT=1  # settings whose modules are not built are left out
[ $left -lt 25 ] || part $left device_plan plugins/attn-flashinfer/benchmarks/device_plan.py --seconds $((left - 20)) \
  --save "$results/device_plan.json" || failed=1
exit $failed
