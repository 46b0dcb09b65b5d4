#!/usr/bin/env python3
"""Makes cmake features, groups and stages of BUILD_TOPOLOGY.toml."""

import argparse
import pathlib
import tomllib


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    topology = tomllib.loads(arguments.topology.read_text())

    def feature(name):
        return topology["artifacts"][name].get("feature_name", name.upper().replace("-", "_"))

    lines = [f"set(THEROCK_TOPOLOGY_ARTIFACTS {' '.join(topology['artifacts'])})"]
    for name, artifact in topology["artifacts"].items():
        group = artifact.get("feature_group", "ALL")
        requires = " ".join(feature(other) for other in artifact.get("artifact_deps", []))
        lines.append(f"therock_add_feature({feature(name)} GROUP {group} REQUIRES {requires})")
        lines.append(f"set(THEROCK_TOPOLOGY_GROUP_{name} {artifact['artifact_group']})")
    for name in topology["artifact_groups"]:
        lines.append(f"add_custom_target(artifact-group-{name})")
    for name, stage in topology["build_stages"].items():
        lines.append(f"add_custom_target(stage-{name})")
        for group in stage["artifact_groups"]:
            lines.append(f"add_dependencies(stage-{name} artifact-group-{group})")
    # Host math libraries that upstream has and nothing here needs.
    for name in ("HOST_SUITE_SPARSE", "FFTW3"):
        lines.append(f"therock_add_feature({name} GROUP HOST_MATH)")
    arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
