#!/usr/bin/env python3
"""Hands artifacts from one build directory to another, by way of a directory: STAGING/RUN/NAME_COMPONENT_generic.

Upstream has a bucket where this has --local-staging-dir, which it knows too.
"""

import argparse
import os
import pathlib
import shutil
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def groups(topology, stage):
    return topology["build_stages"][stage]["artifact_groups"]


def inbound(topology, stage):
    """The artifacts that a stage needs of others."""
    own = set(groups(topology, stage))
    left, seen = list(own), set()
    while left:
        group = left.pop()
        if group not in seen:
            seen.add(group)
            left += topology["artifact_groups"][group].get("artifact_group_deps", [])
    return {name for name, artifact in topology["artifacts"].items() if artifact["artifact_group"] in seen - own}


def push(arguments, topology):
    made = [name for name, one in topology["artifacts"].items() if one["artifact_group"] in groups(topology, arguments.stage)]
    for directory in sorted((arguments.build_dir / "artifacts").glob("*_generic")):
        if directory.name.rsplit("_", 2)[0] in made:
            shutil.copytree(directory, arguments.local_staging_dir / arguments.run_id / directory.name)


def fetch(arguments, topology):
    assert arguments.generic_only and arguments.bootstrap
    wanted = inbound(topology, arguments.stage)
    for directory in sorted((arguments.local_staging_dir / arguments.run_id).glob("*_generic")):
        if directory.name.rsplit("_", 2)[0] in wanted:
            for prefix in (directory / "artifact_manifest.txt").read_text().split():
                shutil.copytree(directory / prefix, arguments.output_dir / prefix, dirs_exist_ok=True)
                (arguments.output_dir / f"{prefix}.prebuilt").touch()
                print(f"bootstrapped {prefix}")


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for run in (push, fetch):
        command = commands.add_parser(run.__name__)
        command.add_argument("--stage", required=True)
        command.add_argument("--run-id", default=os.environ.get("THEROCK_RUN_ID", "local"))
        command.add_argument("--generic-only", action="store_true")
        command.add_argument("--local-staging-dir", type=pathlib.Path, default=os.environ.get("THEROCK_LOCAL_STAGING_DIR"))
        command.set_defaults(run=run)
        if run is push:
            command.add_argument("--build-dir", type=pathlib.Path, required=True)
        else:
            command.add_argument("--output-dir", type=pathlib.Path, required=True)
            command.add_argument("--bootstrap", action="store_true")
    arguments = parser.parse_args()
    arguments.run(arguments, tomllib.loads((ROOT / "BUILD_TOPOLOGY.toml").read_text()))


if __name__ == "__main__":
    main()
