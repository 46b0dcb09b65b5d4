#!/usr/bin/env python3
"""Directories made of hard links to others.

    fileset_tool.py copy DEST SOURCE...
    fileset_tool.py artifact --root-dir BUILD --name NAME --slices 'generic;TARGET' STAGE...

`copy` merges directories. `artifact` sorts what was staged into components, in artifacts-unsplit/; from there the device code
of each target goes to a slice of its own in artifacts/, as new files.
"""

import argparse
import os
import pathlib
import shutil


def link(source, dest):
    dest.parent.mkdir(parents=True, exist_ok=True)
    dest.unlink(missing_ok=True)
    os.link(source, dest, follow_symlinks=False)


def files(root):
    for parent, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            yield (pathlib.Path(parent) / name).relative_to(root)


def copy(arguments):
    for source in arguments.source:
        for path in files(source):
            link(source / path, arguments.dest / path)


def component(path):
    match path.parts[0]:
        case "include":
            return "dev"
        case "bin" | "libexec":
            return "run"
        case _:
            return "lib"


def artifact(arguments):
    root = arguments.root_dir
    slices = arguments.slices.split(";")
    for directory in ("artifacts-unsplit", "artifacts"):
        for old in (root / directory).glob(f"{arguments.name}_*"):
            if old.is_dir():
                shutil.rmtree(old)
    for stage in arguments.stage:
        for path in files(root / stage):
            unsplit = root / "artifacts-unsplit" / f"{arguments.name}_{component(path)}_generic" / stage / path
            link(root / stage / path, unsplit)
            target = next((one for one in slices if path.name.endswith(f"_{one}.co")), "generic")
            split = root / "artifacts" / f"{arguments.name}_{component(path)}_{target}"
            (split / stage / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(unsplit, split / stage / path)
    for made in (root / "artifacts").glob(f"{arguments.name}_*"):
        if made.is_dir():
            prefixes = sorted({stage for stage in arguments.stage if (made / stage).exists()})
            (made / "artifact_manifest.txt").write_text("".join(f"{prefix}\n" for prefix in prefixes))


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    copier = commands.add_parser("copy")
    copier.add_argument("dest", type=pathlib.Path)
    copier.add_argument("source", type=pathlib.Path, nargs="+")
    copier.set_defaults(run=copy)
    maker = commands.add_parser("artifact")
    maker.add_argument("--root-dir", type=pathlib.Path, required=True)
    maker.add_argument("--name", required=True)
    maker.add_argument("--slices", required=True)
    maker.add_argument("stage", type=pathlib.Path, nargs="+")
    maker.set_defaults(run=artifact)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
