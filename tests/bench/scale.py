"""Owns the section `scale`: how the time of commands grows with the number of snapshots and envs, of files, and of keys in a registry."""

import http.client
import json
import os
import shutil
import statistics
from pathlib import Path

import pull
from measure import ROCKENV, WORK, in_turns, rockenv, row, run, settled

STEPS = 100
# Numbers of envs with STEPS steps each: 100, 1,000 and 10,000 snapshots.
ENVS = [1, 10, 100]
FILES = [50_000, 500_000, 5_000_000]
KEYS = [1_000, 10_000, 100_000]


def bench(stores, runs):
    method, store = next(iter(stores.items()))
    snapshots(method, store, runs)
    files(method, store, runs)
    registry(method, store, runs)


def growth(counts, times):
    """Returns the marginal cost per item in microseconds: between the first two numbers, and between the last two."""
    points = [(count, statistics.median(times[count])) for count in counts]
    each = [1000 * (after - before) / (more - less) for (less, before), (more, after) in zip(points, points[1:])]
    return ", then ".join(f"{max(one, 0):.3g}" for one in each)


def rows_of(section, what, counts, unit, times):
    for count in counts:
        each = f"; each more: {growth(counts, times)} µs" if count == counts[-1] else ""
        row(section, f"{what}, {count:,} {unit}{each}", times[count])


def snapshots(method, store, runs):
    """The first step differs in each env, so the envs share no snapshot."""
    step = "\n".join(f'[[step]]\nname = "s{n:03}"\nrun = "echo ${{which}}-{n} > $HOME/step"' for n in range(STEPS))
    Path("profiles/scale.toml").write_text(f'schema = 1\nimage = "mini"\n[params]\nwhich = "0"\n{step}\n')
    up = ["up", "scale", "--name"]
    commands = {
        "`ls`": ["ls"],
        "`status ENV`": ["status", "many-0"],
        "`plan` of one env": ["plan", "scale", "--param", "which=0", "--name", "many-0"],
        "`up` of one env with nothing to do": [*up, "many-0", "--param", "which=0"],
        "`snapshot ls` of one env": ["snapshot", "ls", "many-0"],
        "`gc --dry-run`": ["gc", "--dry-run", "--preset", "ci", "--free", "1T"],
        "`du`": ["du"],
    }
    found, made = {what: {} for what in commands}, 0
    for count in ENVS:
        for number in range(made, count):
            run([ROCKENV, *up, f"many-{number}", "--param", f"which={number}"], store)
        made = count
        settled(store)
        times = in_turns(runs, {what: lambda command=command: rockenv(store, *command) for what, command in commands.items()})
        for what, values in times.items():
            found[what][count * STEPS] = values
    counts = [count * STEPS for count in ENVS]
    for what, times in found.items():
        rows_of("scale", what, counts, "snapshots", times)
    for number in range(made):
        run([ROCKENV, "--yes", "rm", f"many-{number}"], store)
    run([ROCKENV, "--yes", "gc"], store)
    settled(store)


def files(method, store, runs):
    run([ROCKENV, "up", "ten", "--name", "files"], store)
    script = "for $d ($ARGV[0] .. $ARGV[1] - 1) { mkdir \"/opt/$d\"; for $f (1..1000) { open F, '>', \"/opt/$d/$f\" or die } }"
    found, made = {"`du`": {}, "`snapshot create`": {}}, 0
    for count in FILES:
        run([ROCKENV, "exec", "--root", "files", "--", "perl", "-e", script, str(made // 1000), str(count // 1000)], store)
        run([ROCKENV, "down", "files"], store)
        made = count
        settled(store)
        found["`du`"][count] = in_turns(min(runs, 3), {"du": lambda: rockenv(store, "du")})["du"]
        found["`snapshot create`"][count] = [rockenv(store, "snapshot", "create", "files", f"with-{count}")]
    for what, times in found.items():
        rows_of("scale", what, FILES, f"files in the store, {method}", times)
    run([ROCKENV, "--yes", "rm", "files"], store)
    settled(store)


def registry(method, store, runs):
    """Times `up --pull`, which looks up its keys in a repository with that many tags of other snapshots."""
    server, host = pull.registry(WORK / "scale-registry")
    where = f"{host}/bench/scale"
    empty = store.parent / "scale-pulled"
    try:
        run([ROCKENV, "up", "ten", "--name", "one"], store)
        run([ROCKENV, "push", "one", where], store)
        os.environ["ROCKENV_REGISTRY"] = where
        found, made = {}, 0
        for count in KEYS:
            tags(host, "bench/scale", made, count)
            made = count

            def up():
                shutil.rmtree(empty, ignore_errors=True)
                run([ROCKENV, "image", "build", "mini"], empty)
                return rockenv(empty, "up", "ten", "--pull")

            found[count] = in_turns(min(runs, 5), {"up": up})["up"]
        if not list(empty.glob("layers/*/shared.json")):
            raise SystemExit("`up --pull` built instead of pulling")
        rows_of("scale", "`up --pull` of 10 steps, image there", KEYS, "keys in the registry", found)
    finally:
        os.environ.pop("ROCKENV_REGISTRY", None)
        pull.stop(server)
        for directory in (WORK / "scale-registry", empty):
            shutil.rmtree(directory, ignore_errors=True)


def tags(host, name, first, last):
    """Adds tags to the first manifest of the repository, each as long as a key."""
    connection = http.client.HTTPConnection(host)

    def ask(method, path, body=None, headers=None):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    tag = json.loads(ask("GET", f"/v2/{name}/tags/list")[2])["tags"][0]
    kinds = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
    _, headers, manifest = ask("GET", f"/v2/{name}/manifests/{tag}", headers={"Accept": kinds})
    for number in range(first, last):
        status, _, body = ask("PUT", f"/v2/{name}/manifests/other-{number:058}", manifest, {"Content-Type": headers["Content-Type"]})
        if status != 201:
            raise SystemExit(f"the registry takes no tag: {status} {body}")
