"""Owns the surroundings of the `pull` benchmark: a 1 GB image, a registry on loopback that serves it, and a Docker daemon."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

LAYERS = 4
FILES = 1200
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def layer(number, size):
    """Returns a layer as `docker push` sends it: a few large files and many small ones that compress to half their size."""
    source = random.Random(number)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        left = size
        for n in range(FILES):
            length = min(left, source.choice([4 << 10] * 7 + [64 << 10] * 2 + [2 << 20]) if n < FILES - 1 else left)
            left -= length
            entry = tarfile.TarInfo(f"opt/layer{number}/d{n % 40}/f{n}")
            entry.size, entry.mode, entry.mtime = length, 0o644, 1_700_000_000
            archive.addfile(entry, io.BytesIO(source.randbytes(length // 2 + 1).hex().encode()[:length]))
    plain = plain.getvalue()
    return hashlib.sha256(plain).hexdigest(), gzip.compress(plain, 6, mtime=0)


def request(method, url, data=None, **headers):
    call = urllib.request.Request(url, data=data, method=method, headers=headers)
    return urllib.request.urlopen(call)


def push(host, name, gigabytes=1.0):
    """Uploads the image and returns its reference and its uncompressed size."""
    base = f"http://{host}/v2/{name}"

    def upload(data):
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        place = request("POST", f"{base}/blobs/uploads/", b"").headers["Location"]
        request("PUT", f"{place}&digest={digest}", data, **{"Content-Type": "application/octet-stream"})
        return {"digest": digest, "size": len(data)}

    size = int(gigabytes * 1e9)
    ids, described = [], []
    for number in range(LAYERS):
        plain, packed = layer(number, size // LAYERS)
        ids.append(f"sha256:{plain}")
        described.append({"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", **upload(packed)})
    config = {"os": "linux", "architecture": "amd64", "config": {}, "rootfs": {"type": "layers", "diff_ids": ids}}
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", **upload(json.dumps(config).encode())}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": described}
    manifest = json.dumps(manifest).encode()
    request("PUT", f"{base}/manifests/1", manifest, **{"Content-Type": MANIFEST})
    return f"{host}/{name}@sha256:{hashlib.sha256(manifest).hexdigest()}", size


def imported(talk, name, tar, variables=None):
    """Imports what the command `tar` writes into Docker, as an image of one layer."""
    sender = subprocess.Popen(tar, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    taken = subprocess.run([*talk, "import", "-", name], stdin=sender.stdout, stdout=subprocess.DEVNULL)
    sender.stdout.close()
    if sender.wait() or taken.returncode:
        sys.exit(f"Docker cannot import {name}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(argv, ready, log):
    """Starts a daemon that ends with this process."""
    with open(log, "w") as output:
        child = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *argv], stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=output)
    for _ in range(300):
        if ready():
            return child
        if child.poll() is not None:
            break
        time.sleep(0.1)
    stop(child)
    return None


def stop(child):
    child.terminate()
    child.wait()


def clear(work):
    """Removes a daemon's directory, including the network namespace that Docker leaves mounted there."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        at = Path(line.split()[1])
        if work in at.parents:
            subprocess.run(["umount", at], check=True)
    shutil.rmtree(work, ignore_errors=True)


def registry(work):
    """Starts Debian's docker-registry with its data below `work`; returns it and its address."""
    host = f"127.0.0.1:{free_port()}"
    clear(work)
    work.mkdir()
    config = work / "config.yml"
    config.write_text(f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{host}', secret: x}}\n"
                      f"storage: {{filesystem: {{rootdirectory: {work}/data}}}}\n")

    def ready():
        try:
            return request("GET", f"http://{host}/v2/").status == 200
        except OSError:
            return False

    child = start(["docker-registry", "serve", config], ready, work / "log")
    if child is None:
        sys.exit(f"the registry does not start: {work}/log")
    return child, host


def docker(work):
    """Starts a separate Docker daemon. Returns it and the client command, or `None` without Docker."""
    program = shutil.which("dockerd", path="/usr/sbin:/usr/bin:/sbin:/bin")
    client = shutil.which("docker", path="/usr/bin:/bin:/usr/local/bin")
    if not program or not client:
        return None
    clear(work)
    work.mkdir()
    address = f"unix://{work}/socket"
    talk = [client, "--host", address]

    def ready():
        return subprocess.run([*talk, "version"], capture_output=True).returncode == 0

    child = start([program, "--host", address, "--data-root", work / "data", "--exec-root", work / "exec",
                   "--pidfile", work / "pid", "--bridge", "none", "--iptables=false", "--ip6tables=false"],
                  ready, work / "log")
    return child and (child, talk)
