"""Owns the section `registry`: pushing a 2 GB snapshot to a registry on loopback and pulling it, compared with other tools and the same tree."""

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pull
from measure import ROCKENV, clock, env, in_turns, rockenv, row, run, settled, watched

SIZE = 2_000_000_000
NAME = "shared"
# Half programs and texts, as in an image, and half random bytes, which do not compress.
PROFILE = f"""schema = 1
image = "mini"
[[step]]
name = "tree"
run = '''
mkdir -p ~/tree; cd ~/tree
for copy in $(seq {SIZE // 2 // 100_000_000}); do
    mkdir copy-$copy; tar -C /usr -cf - . 2>/dev/null | head -c 100000000 | tar -C copy-$copy -xf - 2>/dev/null || true
done
head -c $(({SIZE} - $(du -sb . | cut -f1))) /dev/urandom | split -b 16M - random-
'''
"""


class Registries:
    """Provides an empty registry on request, in place of the previous one."""

    def __init__(self, work):
        self.work, self.child = work, None

    def fresh(self):
        self.stop()
        self.child, host = pull.registry(self.work)
        # Flushes what the previous run wrote.
        os.sync()
        return host

    def stop(self):
        if self.child:
            pull.stop(self.child)
        self.child = None
        shutil.rmtree(self.work, ignore_errors=True)


def bench(stores, runs):
    method, store = next(iter(stores.items()))
    # Everything on the store's file system.
    work = store.parent
    registries = Registries(work / "registry")
    daemon = pull.docker(work / "docker")
    try:
        Path(f"profiles/{NAME}.toml").write_text(PROFILE)
        run([ROCKENV, "up", NAME], store)
        settled(store)
        push(store, method, registries, daemon, runs)
        fetch(store, method, registries, daemon, work / "pulled", runs)
        run([ROCKENV, "--yes", "rm", NAME], store)
        settled(store)
    finally:
        registries.stop()
        if daemon:
            pull.stop(daemon[0])
        for name in ("docker", "pulled"):
            pull.clear(work / name)


def repository(host):
    return f"{host}/bench/{NAME}"


def push(store, method, registries, daemon, runs):
    # Each run uses a new registry address, so neither program remembers what is there.
    jobs = {"rockenv": lambda: rockenv(store, "push", NAME, repository(registries.fresh()))}
    if daemon:
        talk = daemon[1]
        # With its base image.
        tar = ["exec", "--root", NAME, "--", "tar", "-C", "/", "--one-file-system", "--numeric-owner", "-cf", "-", "."]
        pull.imported(talk, NAME, [ROCKENV, *tar], env(store))

        def theirs():
            reference = f"{repository(registries.fresh())}:latest"
            run([*talk, "tag", NAME, reference])
            took = clock([*talk, "push", "--quiet", reference])
            run([*talk, "rmi", reference])
            return took

        jobs["docker"] = theirs
    else:
        print("no Docker daemon starts here: nothing to compare with", flush=True)
    times = in_turns(runs, jobs, warm=False)
    met = None
    if daemon:
        version = run([*talk, "version", "--format", "{{.Server.Version}}"]).strip()
        size = int(run([*talk, "image", "inspect", "--format", "{{.Size}}", NAME]))
        row("registry", f"`docker push`, Docker {version}, {size / 1e9:.1f} GB in one layer", times["docker"])
        met = statistics.median(times["rockenv"]) <= statistics.median(times["docker"])
    row("registry", f"`rockenv push` of the same tree, {method}", times["rockenv"], "`docker push`", met)
    peak(["push", NAME, repository(registries.fresh())], store)


def fetch(store, method, registries, daemon, empty, runs):
    where = repository(registries.fresh())
    run([ROCKENV, "push", NAME, f"{where}:latest"], store)
    theirs = f"{where}-docker:latest"

    def clean():
        # Podman's and umoci's files have their own owners, and Podman mounts its store.
        subprocess.run(["umount", "--quiet", empty / "graph/overlay"], stderr=subprocess.DEVNULL)
        shutil.rmtree(empty, ignore_errors=True)
        if daemon:
            # Removes all tags, because any remaining one would keep the layers.
            subprocess.run([*daemon[1], "image", "prune", "--all", "--force"], check=True, capture_output=True)
        os.sync()
        empty.mkdir()

    def timed(*commands):
        clean()
        return sum(clock(command, store) for command in commands)

    def pulled():
        clean()
        return rockenv(empty, "pull", f"{where}:latest")

    def up():
        clean()
        return rockenv(empty, "up", NAME, "--pull")

    jobs, peers = {"pull": pulled, "up": up}, {}
    if daemon:
        talk = daemon[1]
        run([*talk, "tag", NAME, theirs])
        run([*talk, "push", "--quiet", theirs])
        peers["`docker pull` of the same tree"] = [[*talk, "pull", "--quiet", theirs]]
        podman = ["podman", "--root", empty / "graph", "--runroot", empty / "run", "--storage-driver", "overlay"]
        peers["`podman pull` of it"] = [[*podman, "pull", "--quiet", "--tls-verify=false", theirs]]
        peers["`skopeo copy` and `umoci unpack` of it"] = [
            ["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{theirs}", f"oci:{empty}/layout:latest"],
            ["umoci", "unpack", "--image", f"{empty}/layout:latest", empty / "bundle"],
        ]
    for what, commands in peers.items():
        jobs[what] = lambda commands=commands: timed(*commands)
    os.environ["ROCKENV_REGISTRY"] = where
    try:
        times = in_turns(runs, jobs)
        clean()
        rockenv(empty, "up", NAME, "--pull")
        # Only snapshots from a registry have this file.
        if not list(empty.glob("layers/*/shared.json")):
            sys.exit("`up --pull` built instead of pulling")
        for what in peers:
            row("registry", what, times[what])
        met = statistics.median(times["pull"]) <= min(statistics.median(times[what]) for what in peers) if peers else None
        row("registry", f"`rockenv pull` into an empty store, {method}", times["pull"], "the fastest of them", met)
        ratio = statistics.median(times["up"]) / statistics.median(times["pull"])
        row("registry", f"`rockenv up --pull` with an empty store, {method}: {ratio:.2f} of it", times["up"], "1.2 of it", ratio <= 1.2)
        clean()
        peak(["pull", f"{where}:latest"], empty)
    finally:
        del os.environ["ROCKENV_REGISTRY"]
        clean()


def peak(arguments, store):
    peaks = list(watched([ROCKENV, *arguments], store).values())
    row("registry", f"`rockenv {arguments[0]}`, peak memory in MiB", [max(peaks)], "40 MiB", max(peaks) <= 40)
