"""Owns the section `smoke`: `up hip-smoke`, compared with a Dockerfile of the same steps."""

import itertools
import os
import shutil
import statistics
import subprocess
from pathlib import Path

import pull
from measure import ROCKENV, ROOT, clock, in_turns, rockenv, row, run, settled

TARGET = "gfx1103"
NAME = "smoke"
BASE = "smoke-base"
COMPILE = f"hipcc --offload-arch={TARGET} -O3 -Wall -o /home/builder/result/saxpy_sum saxpy_sum.hip"
DOCKERFILE = f"""FROM {BASE}
RUN apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends hipcc
COPY hip-smoke/saxpy_sum.hip code-objects/check_isa.py /home/builder/hip-smoke/
WORKDIR /home/builder/hip-smoke
RUN mkdir /home/builder/result && {COMPILE}
RUN python3 check_isa.py --extract /home/builder/result /home/builder/result/saxpy_sum {TARGET}
"""


def bench(stores, runs):
    method, store = next(iter(stores.items()))
    # Everything on the store's file system.
    work = store.parent / "smoke"
    daemon = pull.docker(store.parent / "docker")
    try:
        context(work)
        if daemon:
            tree = next((work / "image/images").glob("*/root"))
            pull.imported(daemon[1], BASE, ["tar", "-C", tree, "--numeric-owner", "-cf", "-", "."])
        cold(work, method, daemon, runs)
        changed(work, method, daemon, 3 * runs)
    finally:
        if daemon:
            pull.stop(daemon[0])
        for directory in (store.parent / "docker", work):
            pull.clear(directory)


def context(work):
    """Makes a store that holds the base image only, and a copy of the profile whose source can be edited."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in ("hip-smoke", "code-objects"):
        shutil.copytree(ROOT / "profiles" / name, Path("profiles") / name, dirs_exist_ok=True)
    # Under the name of a built-in profile, it would not be used.
    shutil.copy(ROOT / "profiles/hip-smoke.toml", f"profiles/{NAME}.toml")
    (Path("profiles") / "Dockerfile").write_text(DOCKERFILE)
    run([ROCKENV, "image", "build", "debian-forky"], work / "image")


def fresh(work):
    """Returns a store with the image and nothing else, in place of the last one."""
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    subprocess.run(["cp", "-a", work / "image", store], check=True)
    os.sync()
    return store


def build(talk, *options):
    return clock([*talk, "build", "--quiet", "--network", "host", "--tag", NAME, *options, "profiles"])


def cold(work, method, daemon, runs):
    jobs = {"rockenv": lambda: rockenv(fresh(work), "up", NAME, "--target", TARGET)}
    if daemon:
        jobs["docker"] = lambda: build(daemon[1], "--no-cache")
    times = in_turns(runs, jobs, warm=False)
    ratio, met = "", None
    if daemon:
        version = run([*daemon[1], "version", "--format", "{{.Server.Version}}"]).strip()
        row("smoke", f"`docker build --no-cache` of the steps, Docker {version}", times["docker"])
        ratio = statistics.median(times["rockenv"]) / statistics.median(times["docker"])
        ratio, met = f": {ratio:.2f} of it", ratio <= 0.65
    row("smoke", f"`rockenv up hip-smoke` with nothing but the image, {method}{ratio}", times["rockenv"], "0.65 of it", met)


def changed(work, method, daemon, runs):
    store, numbers = work / "store", itertools.count()
    source = Path("profiles/hip-smoke/saxpy_sum.hip")
    text = source.read_text()

    def edited(job):
        source.write_text(f"{text}// {next(numbers)}\n")
        settled(store)
        return job()

    compiled = ["exec", f"{NAME}-{TARGET}", "--", "sh", "-c", f"cd /home/builder/hip-smoke && {COMPILE}"]
    jobs = {
        "compiler": lambda: rockenv(store, *compiled),
        "rockenv": lambda: edited(lambda: rockenv(store, "up", NAME, "--target", TARGET)),
    }
    if daemon:
        jobs["docker"] = lambda: edited(lambda: build(daemon[1]))
    times = in_turns(runs, jobs)
    row("smoke", "`hipcc` of the one file, by `rockenv exec` in a container that waits", times["compiler"])
    if daemon:
        row("smoke", "`docker build` after one changed line", times["docker"])
    ratio = statistics.median(times["rockenv"]) / statistics.median(times["compiler"])
    row("smoke", f"`rockenv up` after one changed line, {method}: {ratio:.2f} of the compiler", times["rockenv"],
        "1.05 of the compiler", ratio <= 1.05)
