# Makes /home/builder/venv with ROCm's wheels for the targets: install.sh 'TARGET;TARGET' --find-links|--index-url WHERE

set -eu
targets=$1
shift
ROCM_SDK_TARGET_FAMILY=$(sh /opt/rockenv/family.sh "$targets" "$2")
export ROCM_SDK_TARGET_FAMILY
# `device` is that target. A package for one target has no other extra for it, and pip only warns of one that is not there.
extras=libraries,devel,$(echo "$targets" | sed 's/^[^;]*/device/; s/;/,device-/g')
version=
if [ "$1" = --find-links ]; then
    # What was built, also where pip's own index has a newer one.
    version=$(basename "$2"/rocm-*.tar.gz .tar.gz)
    version="==${version#rocm-}"
    # Releases before 7.13 have the code for a target in the libraries' own wheel.
    ls "$2"/rocm_sdk_device_* >/dev/null 2>&1 || extras=libraries,devel
elif [ ! -e /run/rockenv/pins/locked ]; then
    # An index has the versions of several releases, and the newest may be of a later one than the checkout.
    release=$(sed -n 's/.*"rocm-version": *"\([0-9]*[.][0-9]*\)[.].*/\1/p' /therock/src/version.json)
    versions=$(python3 -m pip index versions --pre --index-url "$2" rocm)
    case $versions in
    *" $release."*) version="==$release.*" ;;
    *) echo "the index has no ROCm $release, so its newest version is installed" >&2 ;;
    esac
fi
python3 -m venv --clear /home/builder/venv
# What building PyTorch needs; before 7.12 it was in TheRock's own list.
requirements=/therock/src/external-builds/pytorch/requirements-ci.txt
[ -e "$requirements" ] || requirements=/therock/src/requirements.txt
python3 /opt/rockenv/pip.py /home/builder/venv --requirement "$requirements"
# `rocm` is a source package that decides at installation what it needs. In a cache that all envs share, pip would find the
# wheel that it made for another target.
python3 /opt/rockenv/pip.py /home/builder/venv --no-cache-dir --pre "$@" "rocm[$extras]$version"
/home/builder/venv/bin/rocm-sdk version
/home/builder/venv/bin/rocm-sdk targets
/home/builder/venv/bin/rocm-sdk path --root
