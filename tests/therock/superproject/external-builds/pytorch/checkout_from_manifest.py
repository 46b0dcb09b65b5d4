#!/usr/bin/env python3
"""Checks projects out at the commits of a manifest."""

import argparse
import json
import pathlib
import subprocess


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", type=pathlib.Path, required=True)
    parser.add_argument("--checkout-root", type=pathlib.Path, required=True)
    parser.add_argument("--projects", default="")
    arguments = parser.parse_args()
    manifest = json.loads(arguments.manifest.read_text())
    for project in arguments.projects.replace(";", " ").split() or [each for each in manifest if each != "schema_version"]:
        source = manifest[project]
        directory = arguments.checkout_root / project
        directory.mkdir(parents=True, exist_ok=True)
        for words in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth=1", source["repo"], source["commit"]],
            ["checkout", "--quiet", "--force", source["commit"]],
        ):
            subprocess.run(["git", *words], cwd=directory, check=True)
        print(f"{project}: {source['repo']} @ {source['commit']}")


if __name__ == "__main__":
    main()
