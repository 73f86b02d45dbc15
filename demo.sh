#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'TEXT'
./demo.sh [--dir DIR]

Sets up and builds if need be, then runs what exists of Pagoda on this machine, each figure beside
the machine's own limit, measured in the same run: the swap path to disk, and the optimizer kernels.
It takes about two minutes, two GiB of disk in DIR (default: the build folder) and leaves nothing.
TEXT
}

directory=build
while (( $# )); do
  case $1 in
    --dir) [[ $# -ge 2 ]] || { echo 'demo.sh: --dir needs a directory' >&2; exit 2; }
           directory=$2; shift 2 ;;
    -h|--help) usage; exit 0 ;;
    *) printf 'demo.sh: unknown flag %s\n\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
done

scripts/bootstrap.sh release
[[ -d $directory && -w $directory ]] ||
  { printf "demo.sh: '%s' is not a directory that can be written\n" "$directory" >&2; exit 2; }

printf '\nPagoda moves model states between the accelerator, host memory and disk, and updates them\n'
printf 'on the way. These are the two parts that decide how fast that can be.\n\n'
build/bin/pagoda bench io --dir "$directory" --size 2GiB
echo
build/bin/pagoda bench adam --rounds 5
cat <<'TEXT'

The first table is the way to disk: every byte was written to a private file, read back and, where
it says so, checked. The second is the AdamW step that runs on the host cores. A ratio near 100 %
means that the machine, not Pagoda, is the limit.
TEXT
