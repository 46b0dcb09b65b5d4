# Takes what math-libs needs from a run of TheRock's CI: prebuilt.sh RUN, or '' for the one that built this commit.
#
# Nothing in TheRock says whether artifacts belong to a checkout, so their commit has to be this one.

set -eu
[ -e build_tools/find_latest_artifacts.py ] || {
    echo "this release of TheRock cannot find what its CI built: --release 7.12 or newer, or --from source" >&2
    exit 1
}
commit=$(git rev-parse HEAD)
if [ -n "$1" ]; then set -- --run-id "$1"; else set -- --ref "$commit" --require-single-run; fi
python3 build_tools/find_latest_artifacts.py --artifact-group generic --json "$@" >/tmp/found.json || {
    echo "TheRock's CI has no artifacts of $commit" >&2
    exit 1
}
run=$(python3 - "$commit" /tmp/found.json <<'END'
import json, sys

found = json.load(open(sys.argv[2]))["results"][0]
if found["git_commit_sha"] != sys.argv[1]:
    sys.exit(f"run {found['workflow_run_id']} built {found['git_commit_sha']}, and the checkout is {sys.argv[1]}")
print(found["workflow_run_id"])
END
)
python3 build_tools/artifact_manager.py fetch --stage math-libs --generic-only --run-id "$run" --output-dir /therock/build --bootstrap
