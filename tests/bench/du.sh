#!/bin/bash
# Times `rockenv du` against du, diskus, dua and pdu on a tree of small files, and prints a Markdown table.
#
#   tests/bench/du.sh [FILES [RUNS]]
#
# OURS   the command to time; the tree's path is added      (default: target's release rockenv, `du --raw`)
# TREE   where the tree is made, and kept if it is set      (default: a temporary directory beside target/)
#
# The runs take turns, so that a machine with other work to do is unfair to all of them alike. The page cache is
# warm. The last column says whether the total is the one of GNU du; ours has to be, or the script fails. pdu is given
# the options that make it count blocks and hard links once; dua is given none and may differ.
set -euo pipefail
export LC_ALL=C

files=${1:-200000}
runs=${2:-10}
here=$(cd "$(dirname "$0")/../.." && pwd)
ours=${OURS:-$here/target/x86_64-unknown-linux-gnu/release/rockenv du --raw}

make_tree() {
  local tree=$1 dirs=$((files / 40)) i f dir
  for ((i = 0; i < dirs; i++)); do
    echo "$tree/$((i / 400))/$((i / 20 % 20))/$((i % 20))"
  done | xargs mkdir -p
  for ((i = 0; i < dirs; i++)); do
    dir=$tree/$((i / 400))/$((i / 20 % 20))/$((i % 20))
    # Every hundredth directory holds hard links to its neighbour, as an install tree does.
    if ((i % 100 == 1)); then
      cp -al "$last/." "$dir"
    else
      for ((f = 0; f < 40; f++)); do echo "$f" >"$dir/file-$f.o"; done
    fi
    last=$dir
  done
}

if [[ -n ${TREE:-} ]]; then
  tree=$TREE
  [[ -d $tree ]] || make_tree "$tree"
else
  tree=$(mktemp -d "$here/target/bench-du.XXXXXX")
  trap 'rm -rf "$tree"' EXIT
  make_tree "$tree"
fi

names=() commands=()
add() {
  # shellcheck disable=SC2086
  set -- "$1" $2
  if type -P "$2" >/dev/null; then
    names+=("$1")
    commands+=("${*:2}")
  else
    echo "not installed, left out: $1" >&2
  fi
}
add "rockenv du" "$ours"
if ((${#names[@]} == 0)); then
  echo "error: nothing to measure: build with \`cargo build --release\`, or set OURS" >&2
  exit 1
fi
add "GNU du" "du -s --block-size=1"
add "diskus" "diskus"
add "dua" "dua --format bytes aggregate"
add "pdu" "pdu --quantity=block-size --bytes-format=plain --max-depth=1 --deduplicate-hardlinks"

# Milliseconds of one run, in `took`.
clock() {
  local from=${EPOCHREALTIME/./}
  $1 "$tree" >"$out" 2>/dev/null
  took=$(((${EPOCHREALTIME/./} - from) / 100))
}

out=$(mktemp)
expected=$(du -s --block-size=1 "$tree" | cut -f1)
status=0
declare -a totals times
for at in "${!commands[@]}"; do
  clock "${commands[at]}" # warms the cache, and is not counted
  totals[at]=same
  if ! tr -d ', ' <"$out" | grep -q "$expected"; then
    totals[at]=differs
    [[ ${names[at]} == "rockenv du" ]] && status=1
  fi
done
for ((run = 0; run < runs; run++)); do
  for at in "${!commands[@]}"; do
    clock "${commands[at]}"
    times[at]+=" $took"
  done
done
rm -f "$out"

echo "$files files, $(nproc) processors, $runs runs in turns, warm cache, milliseconds"
echo
echo "| command | median | fastest | slowest | total |"
echo "| --- | ---: | ---: | ---: | --- |"
for at in "${!commands[@]}"; do
  # shellcheck disable=SC2086
  printf '%s\n' ${times[at]} | sort -n | awk -v name="${names[at]}" -v total="${totals[at]}" '
    { t[NR] = $1 / 10 }
    END {
      median = NR % 2 ? t[(NR + 1) / 2] : (t[NR / 2] + t[NR / 2 + 1]) / 2
      printf "| %s | %.0f | %.0f | %.0f | %s |\n", name, median, t[1], t[NR], total
    }'
done
exit "$status"
