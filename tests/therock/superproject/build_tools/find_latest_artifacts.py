#!/usr/bin/env python3
"""Finds the run that has artifacts of a commit: here the directory of that name in THEROCK_LOCAL_STAGING_DIR."""

import argparse
import json
import os
import pathlib
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifact-group", nargs="+", required=True)
    parser.add_argument("--require-single-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    selector = parser.add_mutually_exclusive_group()
    selector.add_argument("--ref")
    selector.add_argument("--run-id")
    arguments = parser.parse_args()
    runs = pathlib.Path(os.environ["THEROCK_LOCAL_STAGING_DIR"])
    name = arguments.run_id or arguments.ref
    if not (runs / name).exists():
        print(f"No matching artifacts found for {name}", file=sys.stderr)
        return 1
    found = {"git_commit_sha": name.removeprefix("run-of-"), "workflow_run_id": name, "artifact_group": "generic"}
    print(json.dumps({"status": "found", "results": [found]}, indent=2, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
