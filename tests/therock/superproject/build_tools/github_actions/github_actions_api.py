"""Answers for GitHub: a run has its commit in its name."""


def gha_query_workflow_run_by_id(repository, run):
    assert repository == "ROCm/TheRock"
    return {"head_sha": run.removeprefix("run-of-")}
