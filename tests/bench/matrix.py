"""Owns the section `matrix`: three targets of the miniature TheRock (tests/therock) in one command, compared with one target alone."""

import contextlib
import functools
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pull
from measure import ROCKENV, ROOT, TOOLS, WORK, loop, rockenv, row, run, settled

TARGETS = ["gfx1100", "gfx1103", "gfx1201"]
PROFILE = "double"
# Packages for a build of TheRock's shape, as in tests/support/rootfs.rs.
PACKAGES = ["ca-certificates", "ccache", "cmake", "g++", "git", "make", "ninja-build", "python3", "python3-venv"]
PIP = "[global]\nindex-url = file:///nowhere\nfind-links = /usr/share/python-wheels\n"


def image():
    """Builds the miniature's base tree and writes its image recipe."""
    tree = WORK / "builder"
    if not tree.exists():
        part = WORK / "builder.part"
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
                        "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
                        "trixie", part], check=True)
        part.rename(tree)
    (tree / "etc/pip.conf").write_text(PIP)
    Path("images/builder.toml").write_text(f'schema = 1\nprovider = "directory"\n[directory]\npath = "{tree}"\n')


def offer(work):
    """Puts pytest, which runs the miniature's smoke tests, where pip finds the miniature's packages."""
    wheels = TOOLS / "pytest"
    if not wheels.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary=:all:",
                        "-r", ROOT / "tests/therock/pytest.txt", "-d", wheels], check=True)
    with open(work / "links.html", "a") as links:
        for wheel in wheels.iterdir():
            shutil.copy(wheel, work)
            links.write(f'<a href="{wheel.name}">{wheel.name}</a>\n')


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def upstream(work):
    """Makes the miniature's repositories and serves them on loopback. Returns the superproject's URL and commit."""
    shutil.rmtree(work, ignore_errors=True)
    files = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=work))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    git = f"127.0.0.1:{pull.free_port()}"
    commit = run([ROOT / "tests/therock/make", work, f"git://{git}", f"http://127.0.0.1:{files.server_port}"]).strip()
    offer(work)
    # Started directly: stopping a `git` wrapper would leave the daemon running.
    program = Path(run(["git", "--exec-path"]).strip()) / "git-daemon"
    url = f"git://{git}/TheRock"

    def ready():
        return subprocess.run(["git", "ls-remote", url], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    argv = [program, "--export-all", "--reuseaddr", "--listen=127.0.0.1", f"--port={git.split(':')[1]}", f"--base-path={work}"]
    child = pull.start(argv, ready, WORK / "git-daemon.log")
    try:
        if child is None:
            sys.exit(f"git's daemon does not start: {WORK}/git-daemon.log")
        yield url, commit
    finally:
        if child:
            pull.stop(child)
        files.shutdown()
        files.server_close()
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def settings(url, commit):
    """Writes the profile, changed as users change it for another upstream, and the machine's targets."""
    profile = Path(f"profiles/{PROFILE}.toml")
    profile.write_text(f'schema = 1\nextends = "therock"\nimage = "builder"\n'
                       f'[params]\ntherock-url = "{url}"\ntherock-rev = "{commit}"\n'
                       f'[resources]\ndisk = "1G"\n[[step]]\nname = "math-libs"\nmemory = "1G"\n')
    machine = Path("rockenv.toml")
    machine.write_text(f"targets = {json.dumps(TARGETS)}\n")
    try:
        yield
    finally:
        machine.unlink()
        profile.unlink()


class Ground:
    """A separate store on a fresh btrfs, which can freeze build volumes. Measures the time and disk space of commands there."""

    def __init__(self):
        self.top = WORK / "matrix"
        self.top.mkdir(exist_ok=True)
        loop(self.top, ["mkfs.btrfs", "-q", "-f"], 16 << 30)
        self.store = self.top / "store"
        run([ROCKENV, "image", "build", "builder"], self.store)
        self.used = self.now()

    def now(self):
        """Returns the bytes in use, after everything is synced and the trash is empty."""
        settled(self.store)
        run(["btrfs", "subvolume", "sync", self.top])
        run(["btrfs", "filesystem", "sync", self.top])
        file_system = os.statvfs(self.top)
        return (file_system.f_blocks - file_system.f_bfree) * file_system.f_frsize

    def took(self, *arguments):
        """Returns the milliseconds, and the growth of disk usage in MiB."""
        time = rockenv(self.store, *arguments)
        before, self.used = self.used, self.now()
        return time, (self.used - before) / (1 << 20)

    def keys(self, target):
        """Returns the steps of an env that have snapshots, with their keys."""
        record = json.loads((self.store / f"envs/{PROFILE}-{target}/record.json").read_text())
        return [(step["name"], step["key"]) for step in record["steps"]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", self.top], check=True)


def in_common(ground):
    """Returns the last step that all targets share."""
    envs = [ground.keys(target) for target in TARGETS]
    last = None
    for same in zip(*envs):
        if len(set(same)) != 1:
            break
        last = same[0][0]
    if last is None:
        sys.exit("the targets of the double share no step")
    return last


def bench(stores, runs):
    if "btrfs" not in stores:
        print("needs the store on btrfs: the others cannot freeze build volumes", flush=True)
        return
    image()
    last, all_three, prefix, own = None, [], [], []
    with upstream(WORK / "upstream") as (url, commit), settings(url, commit):
        for _ in range(runs):
            with Ground() as ground:
                all_three.append(ground.took("matrix", "up", "--profile", PROFILE, *TARGETS))
                last = in_common(ground)
            with Ground() as ground:
                up = ["up", PROFILE, "--target", TARGETS[0]]
                prefix.append(ground.took(*up, "--until", last))
                own.append(ground.took(*up))
    for index, what in enumerate(["time", "disk in MiB"]):
        values = [[pair[index] for pair in pairs] for pairs in (prefix, own, all_three)]
        limits = [before + 3 * rest for before, rest in zip(*values[:2])]
        ratio = statistics.median(values[2]) / statistics.median(limits)
        row("matrix", f"`up` of one target, up to `{last}`, which all share: {what}", values[0])
        row("matrix", f"`up` of it, the rest: {what}", values[1])
        row("matrix", f"`matrix up` of three: {what}, {ratio:.2f} of (shared + 3 x the rest)", values[2], "1.1 of it", ratio <= 1.1)
