#!/bin/bash
# usage: ./submit.sh SOURCE DATASET [PARTS]    on a file system that all nodes see
set -euo pipefail
export SOURCE="$1" DATASET="$2"
parts="${3:-8}"
folder="$(dirname "$0")"
array="$(sbatch --parsable --export=ALL --array="0-$((parts - 1))" "$folder/build.sbatch")"
# afterany: a part that failed for good is built by the job that joins them.
sbatch --export=ALL --dependency="afterany:${array%%;*}" "$folder/join.sbatch"
