#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up everything a build needs and builds: Debian packages that are missing, a virtual
# environment with the pinned torch, CMake, Ninja. Each part is skipped when nothing changed, so a
# second run takes seconds. ./test.sh and ./demo.sh call it; it may be called alone:
#
#   scripts/bootstrap.sh [PRESET[:TARGET]…]
#                                       presets to build: release (default), asan, tsan; all of
#                                       each, or one target
#   scripts/bootstrap.sh packages       the Debian packages only
#   scripts/bootstrap.sh environment    …and the virtual environment, which release and asan need
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '== %s\n' "$*"; }
fail() { printf 'pagoda: %s\n' "$*" >&2; exit 1; }

# Debian packages whose file or command is missing; nothing missing, no apt call.
install_packages() {
  local missing=() package needs
  while IFS=': ' read -r package needs; do
    [[ -z $package || $package == \#* ]] && continue
    if [[ $needs == /* ]]; then
      [[ -e $needs ]] || missing+=("$package")
    else
      command -v "$needs" > /dev/null || missing+=("$package")
    fi
  done < scripts/packages.txt
  local python=${PYTHON:-python3}
  if [[ ! -x .venv/bin/python ]]; then
    command -v "$python" > /dev/null || missing+=(python3)
    "$python" -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
  fi
  (( ${#missing[@]} )) || return 0

  local as_root=()
  if (( EUID != 0 )); then
    command -v sudo > /dev/null ||
      fail "missing packages and no root: run 'apt-get install ${missing[*]}' as root, then again"
    as_root=(sudo)
  fi
  command -v apt-get > /dev/null ||
    fail "missing and not a Debian system: install what Debian calls ${missing[*]}, then again"
  say "installing ${missing[*]}"
  local log
  log=$(mktemp)
  # A third-party source that does not answer fails the update, yet may not be needed: the install
  # decides.
  "${as_root[@]}" apt-get update > "$log" 2>&1 || true
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}" >> "$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "packages could not be installed: run '${as_root[*]:+sudo }apt-get install ${missing[*]}'"
  fi
  rm -f "$log"
}

# A virtual environment with what requirements.txt pins; made anew when that file changes.
make_environment() {
  local stamp=.venv/.requirements
  cmp -s requirements.txt "$stamp" && return 0
  local python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $("$python" --version 2>&1) found: set PYTHON to one"
  say "virtual environment .venv: $(grep -v '^#' requirements.txt | paste -sd' ')"
  [[ -x .venv/bin/python ]] || "$python" -m venv .venv ||
    fail "no virtual environment: run 'apt-get install python3-venv'"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
    fail "Python packages are missing: run '.venv/bin/python -m pip install -r requirements.txt'"
  cp requirements.txt "$stamp"
}

build() {
  local preset=${1%%:*} target=() directory=build
  [[ $1 == *:* ]] && target=("${1#*:}")
  [[ $preset == release ]] || directory=build-$preset
  if [[ ! -f $directory/build.ninja ]]; then
    say "configuring $preset"
    cmake --preset "$preset" > "$directory.configure.log" 2>&1 ||
      { tail -n 30 "$directory.configure.log" >&2; fail "cmake --preset $preset failed"; }
    mv "$directory.configure.log" "$directory/configure.log"
  fi
  say "building ${target[*]:-$preset}"
  ninja -C "$directory" --quiet ${target[@]+"${target[@]}"} || fail "ninja -C $directory failed"
}

install_packages
(( $# )) || set -- release
for preset in "$@"; do
  case $preset in
    packages) ;;
    environment) make_environment ;;
    tsan) build "$preset" ;;
    *) make_environment; build "$preset" ;;
  esac
done
