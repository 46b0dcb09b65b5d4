#!/usr/bin/env python3
"""Checks submodules out: those of a stage, or all but what is switched off."""

import argparse
import pathlib
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = {
    "system-projects": ["half", "rocm-cmake"],
    "compilers": ["HIPIFY", "llvm-project"],
    "rocm-libraries": ["rocm-libraries"],
    "rocm-systems": ["rocm-systems"],
    "debug-tools": ["rocgdb"],
    "media-libs": ["amd-mesa"],
    "ml-frameworks": [],
    "math-libraries": [],
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--reference-dir", type=pathlib.Path)
    for group in GROUPS:
        parser.add_argument(f"--include-{group}", default=True, action=argparse.BooleanOptionalAction)
    arguments = parser.parse_args()

    if arguments.stage:
        topology = tomllib.loads((ROOT / "BUILD_TOPOLOGY.toml").read_text())
        groups = topology["build_stages"][arguments.stage]["artifact_groups"]
        sets = {name for group in groups for name in topology["artifact_groups"][group].get("source_sets", [])}
        wanted = {module for name in sets for module in topology["source_sets"][name]["submodules"]}
    else:
        wanted = {
            module
            for group, modules in GROUPS.items()
            if getattr(arguments, "include_" + group.replace("-", "_"))
            for module in modules
        }
    paths = []
    for line in git("config", "--file", ".gitmodules", "--get-regexp", r"\.path$").splitlines():
        key, path = line.split()
        if key.removeprefix("submodule.").removesuffix(".path") in wanted:
            paths.append(path)
    options = [f"--depth={arguments.depth}"] if arguments.depth else []
    options += [f"--jobs={arguments.jobs}"] if arguments.jobs else []
    options += [f"--reference={arguments.reference_dir}"] if arguments.reference_dir else []
    git("submodule", "update", "--init", *options, "--", *paths)
    for path in sorted(paths):
        print(f"{path} at {git('-C', path, 'rev-parse', 'HEAD').strip()}")


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
