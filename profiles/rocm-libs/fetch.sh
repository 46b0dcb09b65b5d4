#!/bin/sh
# fetch.sh COMPONENT...: unpack the archive of each as /src/COMPONENT.
#
# From the mirror that the image's packages came from, then from upstream. apt fetches, with its proxies and authorities, and
# checks the digest, so it does not matter which server answers. A volume at /src/COMPONENT is the user's and stays as it is.
set -eu
mirror=$(sed -n 's/^deb \(\[[^]]*\] *\)\{0,1\}\([^ ]*\).*/\2/p; s/^URIs: *\([^ ]*\).*/\1/p' \
  $(ls /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null) | head -1)
mkdir -p /src
for component in "$@"; do
  if [ -e "/src/$component" ]; then
    echo "not fetched: /src/$component is there"
    continue
  fi
  read -r pool digest upstream <<END
$(sed -n "s/^$component //p" /opt/rocm-libs/sources.txt)
END
  test -n "$digest" || { echo "no component $component: see /opt/rocm-libs/sources.txt"; exit 1; }
  file=/tmp/$component.tar
  /usr/lib/apt/apt-helper download-file "${mirror%/}/pool/main/$pool" "$file" "SHA256:$digest" ||
    { test "$upstream" != - &&
      /usr/lib/apt/apt-helper download-file "https://github.com/ROCm/$upstream" "$file" "SHA256:$digest"; } ||
    { echo "no archive of $component: build without it by --param components='...'"; exit 1; }
  mkdir "/src/$component"
  tar -C "/src/$component" --strip-components=1 --no-same-owner -xf "$file"
  rm "$file"
  # Root's, and read by the build: so this snapshot is the same for every user of the machine.
  chmod -R a+rX "/src/$component"
done
