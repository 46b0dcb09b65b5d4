# Builds the wheels of PyTorch in the directory of TheRock's scripts for it: torch.sh JOBS 'TARGET;TARGET' NAME=VALUE...

set -eu
jobs=$1 targets=$2
shift 2
sh /opt/rockenv/empty.sh /therock/out/torch
# Where the sources are, in the words of this release.
python=/home/builder/venv/bin/python
where=$(sh /opt/rockenv/flags.sh "$python -B build_prod_wheels.py build" --root-checkout-dir 2>/tmp/flags) || {
    cat /tmp/flags >&2
    exit 1
}
if [ -n "$where" ]; then
    where="$where /therock/torch"
else
    where="--pytorch-dir /therock/torch/pytorch --pytorch-audio-dir /therock/torch/pytorch_audio
        --pytorch-vision-dir /therock/torch/pytorch_vision --triton-dir /therock/torch/triton"
fi
env MAX_JOBS="$jobs" "$@" python3 /opt/rockenv/pip.py --around "$python" -B build_prod_wheels.py build \
    --pytorch-rocm-arch "$(echo "$targets" | tr ';' ',')" $where \
    --use-ccache --pip-cache-dir /cache/pip --output-dir /therock/out/torch
