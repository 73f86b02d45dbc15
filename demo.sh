#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'TEXT'
./demo.sh [--dir DIR] [FLAG…]

Sets up and builds what it needs, then trains a small GPT for two minutes on text that this machine
has, with its parameters, gradients and optimizer state on disk in DIR (default: the build folder) and
less memory for them than a quarter of its parameters. Then it repeats the first steps in memory, shows
that the numbers are the same, where each byte lived and what overlapped, and lets the model write.
It takes 200 MB of disk and leaves nothing.

Other flags go to the program: './demo.sh --steps 20' for a short one, 'build/bin/tiny_gpt --help' for all.
TEXT
}

directory=build flags=()
while (( $# )); do
  case $1 in
    --dir) [[ $# -ge 2 ]] || { echo 'demo.sh: --dir needs a directory' >&2; exit 2; }
           directory=$2; shift 2 ;;
    --dir=*) directory=${1#--dir=}; shift ;;
    -h|--help) usage; exit 0 ;;
    *) flags+=("$1"); shift ;;
  esac
done
# Before the set-up, which may take minutes. The build folder need not be there yet.
[[ $directory == build || ( -d $directory && -w $directory ) ]] ||
  { printf "demo.sh: '%s' is not a directory that can be written\n" "$directory" >&2; exit 2; }

scripts/bootstrap.sh release:tiny_gpt
exec build/bin/tiny_gpt --dir "$directory" ${flags[@]+"${flags[@]}"}
