#!/usr/bin/env -S python3 -B
"""Simulates a farm of 200 environments, 20 machines of different sizes and one registry. Prints the tables of docs/explanation/farm.md.

    tests/bench/farm.py ROWS.jsonl LAYOUT...

ROWS.jsonl is what `rockenv up --metrics` wrote when it built rocm-libs and hip-smoke for one target: the processor time and memory of
each step. A LAYOUT is what `rockenv export --snapshots DIR` wrote of such an environment: its compressed layers are those of `push`.
The keys, and with them what environments share, come from `rockenv plan` for each of the 200, with ROCKENV=PROGRAM. Nothing is built.

A step takes its processor time, divided by the machine's cores if it is a step of PARALLEL. A layer travels at the slower of the
machine's link and its share of the registry's.
"""

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROCKENV = os.environ.get("ROCKENV", "rockenv")
ENVS = 200
# Cores and GiB of memory: desktops, workstations and two servers.
MACHINES = [(4, 16)] * 6 + [(8, 32)] * 6 + [(16, 64)] * 4 + [(32, 128)] * 2 + [(64, 256)] * 2
REGISTRY = 10e9 / 8  # bytes a second, for all machines together
LINK = 1e9 / 8  # for one machine
REQUEST = 0.02  # seconds
NOTHING = (0, 0, 0, 0)
# The components of an environment with rocm-libs: all of them, and subsets. Steps in PARALLEL run a job per core.
ALL = "rocprim hipcub rocthrust hipblas-common rocrand rocfft hipfft rocblas rocsparse hipsparse rocsolver hipsolver".split()
COMPONENTS = [ALL[:3], ALL[:5], [*ALL[:4], "rocfft", "hipfft"], ALL[:7], [*ALL[:4], "rocblas"], [*ALL[:4], *ALL[7:]], ALL]
PARALLEL = {*ALL[4:], "rocprim-test"}


@dataclass(frozen=True)
class Step:
    name: str
    key: str
    serial: float
    parallel: float
    memory: int
    size: int

    def seconds(self, cores):
        return self.serial + self.parallel / cores


@dataclass
class Env:
    # The same for all envs of one `matrix` call: a profile with its parameters.
    call: tuple
    steps: list

    def work(self):
        return sum(step.serial + step.parallel for step in self.steps)


def recorded(rows, layouts):
    """Returns {(profile, step): (serial, parallel, memory, bytes)}."""
    layers = {}
    for layout in layouts:
        read = lambda blob: json.loads((layout / "blobs/sha256" / blob["digest"].removeprefix("sha256:")).read_text())
        manifest = read(json.loads((layout / "index.json").read_text())["manifests"][0])
        for step in read(manifest["config"])["rockenv"]["steps"]:
            volumes = [state["layer"] for state in step["volumes"].values() if isinstance(state, dict)]
            sizes = [manifest["layers"][at]["size"] for at in [step["layer"], *volumes]]
            layers[manifest["annotations"]["rockenv.profile"], step["name"]] = sum(sizes)
    steps = {}
    for row in map(json.loads, rows.read_text().splitlines()):
        if row["outcome"] == "done":
            name, work = (row["profile"], row["step"]), row["cpu_ms"] / 1000
            parallel = work * (name[1] in PARALLEL)
            steps[name] = (work - parallel, parallel, row["peak_memory"], layers.get(name, 0))
    return steps


def planned(arguments, home):
    command = [ROCKENV, "--home", home, "plan", *arguments, "--json", "--gpu", "none"]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr}")
    return [(step["name"], step["key"]) for step in json.loads(done.stdout)["plan"]["steps"] if step["action"] != "skip"]


def envs(steps):
    """Returns 200 environments: every target with each variant of the profiles, with the keys from `plan`."""
    targets = [line.split()[0] for line in subprocess.run([ROCKENV, "target", "ls"], text=True, check=True, capture_output=True)
               .stdout.splitlines()[1:]]
    asked = [("rocm-libs", target, parts) for parts in COMPONENTS for target in targets]
    asked += [("hip-smoke", target, ()) for target in targets]
    asked = asked[:ENVS]
    if len(asked) < ENVS:
        sys.exit(f"{len(asked)} environments: {ENVS} are wanted")
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(2) as pool:
        params = lambda parts: ["-p", "components=" + " ".join(parts)] if parts else []
        plans = pool.map(lambda env: planned([env[0], "--target", env[1], *params(env[2])], f"{home}/store"), asked)
        found = []
        for (profile, _, parts), plan in zip(asked, plans, strict=True):
            left_out = {*ALL} - {*parts}
            cost = lambda name: steps.get((profile, name), NOTHING) if name not in left_out else NOTHING
            found.append(Env((profile, *parts), [Step(name, key, *cost(name)) for name, key in plan]))
    return found


# --- the farm

@dataclass
class Result:
    makespan: float = 0
    busy: float = 0
    built: int = 0
    again: int = 0
    up: int = 0
    down: int = 0
    requests: int = 0
    peak: int = 0


class Farm:
    """Machines that take jobs in order as they become free, and a registry whose bandwidth all current transfers share."""

    def __init__(self, registry, present=()):
        self.registry, self.present, self.result = registry, set(present), Result()
        self.now, self.events, self.count = 0.0, [], 0
        self.idle = sorted(MACHINES, reverse=True)
        self.transfers, self.ever = 0, set(present)

    def after(self, seconds, action):
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, action))

    def run(self, jobs):
        """Runs jobs. Each is (environment, number of its steps, jobs that must end first)."""
        self.waiting, self.over = list(enumerate(jobs)), set()
        self.start()
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            next_event = next(action, None)
            if next_event is not None:
                self.after(next_event, action)
            self.start()
        self.result.makespan = self.now
        return self.result

    def start(self):
        for entry in list(self.waiting):
            number, (env, until, needs) = entry
            if not self.idle:
                return
            if needs <= self.over:
                memory = max(step.memory for step in env.steps)
                machine = next((machine for machine in self.idle if machine[1] * 2**30 >= memory), None)
                if machine:
                    self.idle.remove(machine)
                    self.waiting.remove(entry)
                    self.after(0, self.job(number, machine, env, until))

    def job(self, number, machine, env, until):
        """Yields the durations of the phases of one job on a machine."""
        began, steps = self.now, env.steps[:until]
        there = 0
        if self.registry:
            there = max((at + 1 for at, step in enumerate(steps) if step.key in self.present), default=0)
            self.result.requests += len(steps) - there + 1 + 2 * there
            yield REQUEST * (len(steps) - there + 1)
            yield from self.transfer(sum(step.size for step in steps[:there]), "down")
        for step in steps[there:]:
            yield step.seconds(machine[0])
            self.result.built += 1
            self.result.again += step.key in self.ever
            self.ever.add(step.key)
            if self.registry:
                self.result.requests += 4
                yield from self.transfer(step.size, "up")
                self.present.add(step.key)
        self.result.busy += (self.now - began) * machine[0]
        self.idle = sorted([*self.idle, machine], reverse=True)
        self.over.add(number)

    def transfer(self, size, way):
        if not size:
            return
        setattr(self.result, way, getattr(self.result, way) + size)
        self.transfers += 1
        self.result.peak = max(self.result.peak, self.transfers)
        # A transfer keeps the share of the bandwidth that it starts with.
        yield size / min(LINK, REGISTRY / self.transfers)
        self.transfers -= 1


def shared(found):
    """Returns the leading steps that all environments of a call share, as `matrix` finds them."""
    calls = defaultdict(list)
    for number, env in enumerate(found):
        calls[env.call].append(number)
    for members in calls.values():
        count = 0
        for keys in zip(*([step.key for step in found[number].steps] for number in members)):
            if len(set(keys)) > 1:
                break
            count += 1
        yield members, count


def as_written(found, order=None):
    """Returns the jobs that `matrix slurm` writes: for each call, one that builds the common steps, then one per environment."""
    jobs, numbers = [], []
    for members, count in shared(found):
        needs = set()
        if count and len(members) > 1:
            jobs.append((found[members[0]], count, set()))
            needs = {len(jobs) - 1}
        numbers += [(number, needs) for number in members]
    numbers.sort(key=lambda entry: order(found[entry[0]]) if order else 0)
    return jobs + [(found[number], len(found[number].steps), needs) for number, needs in numbers]


def bound(found):
    """Returns a lower bound: all distinct work spread evenly over all cores, or the longest environment on the largest machine."""
    distinct = {step.key: step for env in found for step in env.steps}
    even = sum(step.serial + step.parallel for step in distinct.values()) / sum(cores for cores, _ in MACHINES)
    return max(even, max(sum(step.seconds(MACHINES[-1][0]) for step in env.steps) for env in found))


def minutes(seconds):
    return f"{seconds / 60:.1f}"


def line(what, result, least):
    print(f"| {what} | {minutes(result.makespan)} | {result.makespan / least:.2f} | {result.built} | {result.again} | "
          f"{result.up / 1e9:.1f} | {result.down / 1e9:.1f} | {result.requests} | {result.peak} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("layouts", type=Path, nargs="+", metavar="LAYOUT")
    options = parser.parse_args()
    steps = recorded(options.rows, options.layouts)
    found = envs(steps)
    keys = {step.key for env in found for step in env.steps}
    least = bound(found)
    longest = lambda env: -env.work()
    print(f"{len(found)} environments, {sum(len(env.steps) for env in found)} steps with {len(keys)} keys, "
          f"{sum(env.work() for env in found) / 3600:.1f} core hours; lower bound {minutes(least)} min\n")
    head = "| | minutes | of the bound | steps built | built again | GB pushed | GB pulled | requests | transfers at once |\n" + "| --- |" + " ---: |" * 8
    print(head)
    alone = [(env, len(env.steps), set()) for env in found]
    line("no registry: each environment builds everything", Farm(False).run(alone), least)
    line("registry, no shared job: environments race", Farm(True).run(alone), least)
    line("as `matrix slurm` writes it without recorded times", Farm(True).run(as_written(found)), least)
    line("with recorded times: longest environments first", Farm(True).run(as_written(found, longest)), least)
    print("\nThe next day, nothing changed, and a part of the keys is missing in the registry:\n\n" + head)
    for missing in [0, 0.05, 0.2, 1]:
        draw = random.Random(1)
        present = {key for key in sorted(keys) if draw.random() >= missing}
        line(f"{missing:.0%} missing", Farm(True, present).run(as_written(found)), least)
    print("\nA step of rocm-libs changes, so it and all after it have new keys:\n\n" + head)
    for changed in ["export", "rocsolver", "rocblas", "rocrand", "packages"]:
        names = [[step.name for step in env.steps] for env in found]
        kept = [steps.index(changed) if env.call[0] == "rocm-libs" else len(steps) for env, steps in zip(found, names, strict=True)]
        present = {step.key for env, count in zip(found, kept, strict=True) for step in env.steps[:count]}
        line(f"`{changed}`", Farm(True, present).run(as_written(found)), least)


if __name__ == "__main__":
    main()
