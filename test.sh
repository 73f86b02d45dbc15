#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'TEXT'
./test.sh            set up, build, run the fixed selection of tests, also under sanitizers
./test.sh --all      everything, the slow tests included
./test.sh --quick    the release build only, without the tests that take longest: some minutes

Tests whose hardware is absent are counted and named with the reason.
TEXT
}

all=false quick=false presets=(tsan asan release)
for flag in "$@"; do
  case $flag in
    --all) all=true ;;
    --quick) quick=true presets=(release) ;;
    -h|--help) usage; exit 0 ;;
    *) printf 'test.sh: unknown flag %s\n\n' "$flag" >&2; usage >&2; exit 2 ;;
  esac
done

. scripts/working_isa.sh
# Most tests wait for others at times, so twice as many run as there are cores; torch's threads must not
# spin then.
export OMP_WAIT_POLICY=passive
jobs=$(( 2 * $(nproc) ))
say() { printf '== %s\n' "$*"; }
have_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L > /dev/null 2>&1; }

results=$(mktemp -d)
tests=  # the process group of the tests that run in the background
trap '[[ -z $tests ]] || kill -- "-$tests" 2> /dev/null || true; rm -rf "$results"' EXIT

# What is left out, and why: label → reason.
left_out=()
$quick && left_out+=("long: run by ./test.sh")
$all || left_out+=("slow: run by ./test.sh --all")
have_gpu || left_out+=("cuda: there is no NVIDIA GPU here")

run_tests() {
  local preset=$1 passed=true entry arguments=() labels=() skipped=(${left_out[@]+"${left_out[@]}"})
  if $all && [[ $preset != release ]]; then skipped+=("slow: run in the release build only"); fi
  for entry in ${skipped[@]+"${skipped[@]}"}; do labels+=("^${entry%%:*}$"); done
  (( ${#labels[@]} )) && arguments+=(-LE "$(IFS='|'; echo "${labels[*]}")")
  ctest --preset "$preset" -j "$jobs" --output-junit "$results/$preset.xml" \
    ${arguments[@]+"${arguments[@]}"} > "$results/$preset.log" 2>&1 || passed=false
  for entry in ${skipped[@]+"${skipped[@]}"}; do
    ctest --preset "$preset" -N -L "^${entry%%:*}$" > "$results/$preset.${entry%%:*}" 2> /dev/null
    printf '%s\n' "${entry#*: }" >> "$results/$preset.${entry%%:*}"
  done
  $passed
}

# Tests wait for timers, disks and each other: the next preset is built beside them. Their own process
# group, so that they end with this script.
start_tests() {
  say "testing $1"
  set -m
  run_tests "$1" &
  tests=$!
  set +m
}
finish_tests() {
  [[ -n $tests ]] || return 0
  wait "$tests" || failed=true
  tests=
}

failed=false
started=$SECONDS
# The thread sanitizer sees the layers below torch: torch is installed while they are built.
scripts/bootstrap.sh packages
scripts/bootstrap.sh environment &
environment=$!
for preset in "${presets[@]}"; do
  if [[ $preset != tsan && -n $environment ]]; then
    wait "$environment"
    environment=
    limit_to_working_isa
  fi
  scripts/bootstrap.sh "$preset"
  finish_tests
  start_tests "$preset"
done
finish_tests
.venv/bin/python scripts/test_summary.py "$results" || failed=true
printf 'took %d min %02d s\n' $(( (SECONDS - started) / 60 )) $(( (SECONDS - started) % 60 ))
! $failed
