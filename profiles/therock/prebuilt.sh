# Takes what math-libs needs from a run of TheRock's CI: prebuilt.sh RUN, or '' for the one that built this commit.
#
# Nothing in TheRock says whether artifacts belong to a checkout, so their commit has to be this one.

set -eu
# Before 7.13, TheRock's CI built no release in stages, and this module had another name.
[ -e build_tools/github_actions/github_actions_api.py ] || {
    echo "this release of TheRock cannot find what its CI built: --release 7.13 or newer, or --from source" >&2
    exit 1
}
commit=$(git rev-parse HEAD)
# By functions, because the scripts of releases before 10.1 have no options for this.
run=$(PYTHONPATH=build_tools python3 -B - "$commit" "$1" <<'END'
import sys

from find_artifacts_for_commit import find_artifacts_for_commit
from github_actions.github_actions_api import gha_query_workflow_run_by_id

sys.stdout = sys.stderr
commit, run = sys.argv[1:]
if run:
    built = gha_query_workflow_run_by_id("ROCm/TheRock", run)["head_sha"]
    if built != commit:
        sys.exit(f"run {run} built {built}, and the checkout is {commit}")
elif found := find_artifacts_for_commit(commit, ["generic"]):
    run = found[0].workflow_run_id
else:
    sys.exit(f"TheRock's CI has no artifacts of {commit}")
print(run, file=sys.__stdout__)
END
)
compiler=/therock/build/compiler/amd-llvm/stage.prebuilt
rm -f "$compiler"
python3 build_tools/artifact_manager.py fetch --stage math-libs --generic-only --run-id "$run" --output-dir /therock/build --bootstrap
# A run whose artifacts are gone or not there yet is no error to that script, and the compiler would be built here.
[ -e "$compiler" ] || {
    echo "run $run of TheRock's CI has no compiler: --param ci-run=ID for another run, or --from source" >&2
    exit 1
}
