# Prints those of the flags that a script of this checkout takes, by its own --help: flags.sh COMMAND FLAG...

set -eu
command=$1
shift
help=$($command --help)
for flag in "$@"; do
    # A flag ends where its name does: `--dir` is not in `--dir-mode`.
    if printf '%s\n' "$help" | grep -q -E -e "(^|[^a-z-])$flag([^a-z-]|\$)"; then
        echo "$flag"
    else
        echo "left out, because this release does not have it: $command $flag" >&2
    fi
done
