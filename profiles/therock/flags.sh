# Prints those of the flags that a script of this checkout takes, by its own --help, each with its values: flags.sh COMMAND WORD...

set -eu
command=$1
shift
help=$($command --help)
taken=
for word in "$@"; do
    case $word in
    -*)
        flag=${word%%=*}
        # A flag ends where its name does: `--dir` is not in `--dir-mode`.
        if printf '%s\n' "$help" | grep -q -E -e "(^|[^a-z-])$flag([^a-z-]|\$)"; then taken=1; else taken=; fi
        [ -n "$taken" ] || echo "left out, because this release does not have it: $command $flag" >&2
        ;;
    esac
    # What is no flag is a value of the one before.
    if [ -n "$taken" ]; then echo "$word"; fi
done
