"""Fails unless a file is a JobSet or an Argo Workflow with only known fields, and with pods that Kubernetes accepts."""

import sys

import kubernetes_validate
from ruamel.yaml import YAML


def check(api, kind, spec):
    document = {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(document, "1.37", strict=True)


def same(document, model, path="$"):
    """Fails on fields that the model does not know, because the model drops them."""
    if isinstance(document, dict):
        for key, value in document.items():
            assert key in model, f"{path}.{key} is unknown"
            same(value, model[key], f"{path}.{key}")
    elif isinstance(document, list):
        for number, value in enumerate(document):
            same(value, model[number], f"{path}[{number}]")
    else:
        assert str(document) == str(model), f"{path}: {document} != {model}"


document = YAML(typ="safe", pure=True).load(open(sys.argv[1]))
spec = document["spec"]
# Importing either model takes a second.
if document["kind"] == "JobSet":
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    same(document, JobsetV1alpha2JobSet.from_dict(document).to_dict())
    for job in spec["replicatedJobs"]:
        check("batch/v1", "Job", job["template"]["spec"])
        # The webhook counts the object's name, the job's, two numbers and five random characters.
        longest = f"{document['metadata']['name']}-{job['name']}-0-{job['template']['spec']['completions']}-abcde"
        assert len(longest) <= 63, longest
else:
    from hera.workflows.models import Workflow

    assert document["apiVersion"] == "argoproj.io/v1alpha1"
    same(document, Workflow.model_validate(document).model_dump(by_alias=True, exclude_none=True, mode="json"))
    for template in spec["templates"]:
        if "container" in template:
            pod = {name: spec[name] for name in ("nodeSelector", "volumes", "imagePullSecrets") if name in spec}
            check("v1", "Pod", {"containers": [{"name": "main", **template["container"]}], **pod})
