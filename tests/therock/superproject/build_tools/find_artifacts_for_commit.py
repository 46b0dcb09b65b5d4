"""Finds the run that has artifacts of a commit: here the directory of that name in THEROCK_LOCAL_STAGING_DIR."""

import os
import pathlib
import types


def find_artifacts_for_commit(commit, artifact_groups):
    print("looking for", *artifact_groups)
    there = (pathlib.Path(os.environ["THEROCK_LOCAL_STAGING_DIR"]) / commit).exists()
    return [types.SimpleNamespace(workflow_run_id=commit)] if there else []
