# Checks out PyTorch and what belongs to it: torch_sources.sh MANIFEST BRANCH PROJECTS
#
# The manifest says which commits, in releases that read one. Before, it is a branch of ROCm's PyTorch, which names the
# commits of the others.

set -eu
sh /opt/rockenv/own.sh /therock/out/torch
manifest=$1 branch=$2 projects=$3
git config --global user.name builder
git config --global user.email builder@localhost
if [ -n "$manifest" ]; then
    python3 checkout_from_manifest.py --manifest "$manifest" --checkout-root /therock/torch --projects "$projects"
    exit
fi
[ -n "$branch" ] || { echo "neither a manifest nor a branch of PyTorch: --param torch-manifest=FILE or torch-branch=NAME" >&2; exit 1; }
for project in $projects; do
    case $project in
    pytorch) set -- torch --gitrepo-origin https://github.com/ROCm/pytorch.git --repo-hashtag "$branch" ;;
    pytorch_audio) set -- audio --torch-dir /therock/torch/pytorch --require-related-commit ;;
    pytorch_vision) set -- vision --torch-dir /therock/torch/pytorch --require-related-commit ;;
    triton) set -- triton --torch-dir /therock/torch/pytorch ;;
    *) echo "project $project needs a manifest, which this release does not read" >&2; exit 1 ;;
    esac
    script=pytorch_$1_repo.py
    shift
    python3 "$script" checkout --checkout-dir "/therock/torch/$project" "$@"
done
