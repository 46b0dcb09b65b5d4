"""Owns running and timing commands for the benchmarks, and the rows of their tables."""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROCKENV = Path(os.environ.get("ROCKENV", ROOT / "target/x86_64-unknown-linux-gnu/release/rockenv")).resolve()
WORK = ROOT / "target/bench"
TOOLS = ROOT / "target/bench-tools"
NSPAWN = ["systemd-nspawn", "--register=no", "--keep-unit", "-q", "-D"]

# The measured rows: section, text, the runs, limit, and whether it was met.
rows = []
# The directory for the file system images that `loop` makes; main may change it.
ground = {"images": WORK}


def env(store):
    return {
        "PATH": f"{TOOLS}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(WORK / "user"),
        "ROCKENV_HOME": str(store),
        "ROCKENV_TRUSTED_DIRS": str(Path.cwd()),
        "ROCKENV_BUILD_USER": "1000:1000",
        "ROCKENV_NINJA": str(TOOLS / "bin/ninja"),
        "LC_ALL": "C",
        **{name: os.environ[name] for name in ["DOCKER_HOST", "ROCKENV_REGISTRY"] if name in os.environ},
    }


def run(argv, store=WORK):
    done = subprocess.run([str(a) for a in argv], env=env(store), text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def clock(argv, store=WORK):
    """Returns the milliseconds of one run, from just before its start to its end."""
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]
    argv = [str(a) for a in argv]
    variables = env(store)
    program = shutil.which(argv[0], path=variables["PATH"])
    start = time.perf_counter()
    pid = os.posix_spawn(program, argv, variables, file_actions=actions)
    try:
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    took = (time.perf_counter() - start) * 1000
    os.close(null)
    if status:
        sys.exit(f"{argv} ended with {status}")
    return took


def in_turns(count, jobs, warm=True):
    """Runs the callables in turns, `count` times, after one uncounted warm-up round."""
    for job in jobs.values() if warm else ():
        job()
    times = {name: [] for name in jobs}
    for _ in range(count):
        for name, job in jobs.items():
            times[name].append(job())
    return times


def spread(times):
    ordered = sorted(times)
    return statistics.median(ordered), ordered[0], ordered[int(len(ordered) * 0.9 - 0.01)], ordered[-1], len(ordered)


def row(section, what, times, limit="", met=None):
    rows.append({"section": section, "what": what, "times": times, "limit": limit, "met": met})
    median, low, _, high, _ = spread(times)
    mark = {None: "", True: "met", False: "missed"}[met]
    print(f"{section:8} {what:52} median {median:9.1f}  from {low:9.1f} to {high:9.1f}  {limit} {mark}", flush=True)


def settled(store):
    """Waits until the trash is empty and everything is on disk."""
    for _ in range(3000):
        if [name for name in os.listdir(store / "trash") if name != "lock"]:
            time.sleep(0.02)
        else:
            break
    os.sync()


def rockenv(store, *arguments):
    return clock([ROCKENV, *arguments], store)


def loop(directory, make, size):
    """Mounts a fresh file system and unlinks its image, which only the mount keeps."""
    image = ground["images"] / f"rockenv-bench-{directory.name}.image"
    with open(image, "wb") as file:
        file.truncate(size)
    subprocess.run([*make, image], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    image.unlink()


def watched(argv, store):
    """Runs rockenv and returns the peak resident memory of each of its processes, in MiB."""
    child = subprocess.Popen([str(a) for a in argv], env=env(store), stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peaks = {}
    while child.poll() is None:
        for pid, name in ours(child.pid):
            peaks[name] = max(peaks.get(name, 0), status(pid, "VmHWM:") / 1024)
        time.sleep(0.02)
    if child.returncode:
        sys.exit(f"{argv} ended with {child.returncode}")
    return peaks


def status(pid, field):
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return 0


def ours(top):
    """Returns the rockenv processes below `top` and their roles."""
    found, left = [], [top]
    while left:
        pid = left.pop()
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            left += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except (OSError, ValueError):
            continue
        if words[0].endswith(b"/rockenv") and len(words) > 1:
            found.append((pid, {b"up": "`up`", b"__hold": "its holder", b"__agent": "its agent inside",
                                b"image": "`image`"}.get(words[1], "other")))
    return found
