#!/usr/bin/env python3
"""Makes wheels and the `rocm` source package of artifacts."""

import argparse
import base64
import hashlib
import io
import json
import pathlib
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = {"host-blas", "rccl", "blas", "miopen", "prim"}


class Artifacts:
    """artifacts/NAME_COMPONENT_SLICE/PREFIX/..., by the prefixes in each manifest."""

    def __init__(self, directory):
        self.found = []
        for made in sorted(directory.glob("*/artifact_manifest.txt")):
            name, component, slice_ = made.parent.name.rsplit("_", 2)
            self.found.append((name, component, slice_, made.parent, made.read_text().split()))

    def files(self, chosen):
        """Pairs of the path in the installed tree, and the file."""
        files = {}
        for name, component, slice_, directory, prefixes in self.found:
            if chosen(name, component, slice_):
                for prefix in prefixes:
                    for path in sorted((directory / prefix).rglob("*")):
                        if path.is_file():
                            files[str(path.relative_to(directory / prefix))] = path.read_bytes()
        return files


def wheel(dist, name, version, files, requires=(), scripts=()):
    """Writes a wheel; `files` are by path in site-packages."""
    info = f"{name}-{version}.dist-info"
    tag = "py3-none-linux_x86_64"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    files = dict(files)
    files[f"{info}/METADATA"] = (metadata + "".join(f"Requires-Dist: {each}\n" for each in requires)).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    if scripts:
        files[f"{info}/entry_points.txt"] = ("[console_scripts]\n" + "".join(f"{each}\n" for each in scripts)).encode()
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    dist.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(dist / f"{name}-{version}-{tag}.whl", "w") as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path)
            executable = "/bin/" in path or "/libexec/" in path
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(entry, content)


def source_package(dist, version, targets, devices):
    """`rocm`: what it needs is decided where it is installed."""
    extras = {"libraries": "rocm-sdk-libraries", "devel": "rocm-sdk-devel"}
    # As upstream: a target has an extra of its own only beside others.
    if len(devices) > 1:
        extras |= {f"device-{target}": f"rocm-sdk-device-{target}" for target in devices}
    setup = (
        "import os\nfrom setuptools import setup\n"
        # As upstream: without being told, it would ask the machine.
        "assert os.environ.get('ROCM_SDK_TARGET_FAMILY'), 'no GPU to ask'\n"
        f"setup(name='rocm', version={version!r}, package_dir={{'': 'src'}}, packages=['rocm_sdk'],\n"
        f"      install_requires=['rocm-sdk-core=={version}'],\n"
        f"      extras_require={ {key: [f'{name}=={version}'] for key, name in extras.items()}!r}\n"
        f"      | {{'device': [f'rocm-sdk-device-{{os.environ[\"ROCM_SDK_TARGET_FAMILY\"]}}=={version}']}},\n"
        "      entry_points={'console_scripts': ['rocm-sdk = rocm_sdk.__main__:main']})\n"
    )
    files = {"setup.py": setup.encode(), "pyproject.toml": b"[build-system]\nrequires = ['setuptools']\n"}
    for path in (ROOT / "build_tools/packaging/rocm_sdk").glob("*.py"):
        files[f"src/rocm_sdk/{path.name}"] = path.read_bytes()
    files["src/rocm_sdk/_dist_info.py"] = f"__version__ = {version!r}\nTARGETS = {targets!r}\n".encode()
    files["PKG-INFO"] = f"Metadata-Version: 2.1\nName: rocm\nVersion: {version}\n".encode()
    with tarfile.open(dist / f"rocm-{version}.tar.gz", "w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"rocm-{version}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifact-dir", type=pathlib.Path, required=True)
    parser.add_argument("--dest-dir", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    base = arguments.artifact_dir / "base_lib_generic/base/aux-overlay/stage/share/therock/therock_manifest.json"
    if not base.exists():
        raise FileNotFoundError(f"therock_manifest.json not found at {base}. Is base_lib_generic present?")
    assert json.loads(base.read_text())["flags"]["KPACK_SPLIT_ARTIFACTS"]

    version = json.loads((ROOT / "version.json").read_text())["rocm-version"] + ".dev0"
    dist = arguments.dest_dir / "dist"
    artifacts = Artifacts(arguments.artifact_dir)
    if not any(name == "rocprofiler-compute" for name, *_ in artifacts.found):
        raise RuntimeError("No profiler artifacts found; refusing to build an empty rocm-profiler package")

    def package(name, chosen, **more):
        files = artifacts.files(chosen)
        module = f"_{name}" if not name.startswith("rocm_sdk_device") else "_rocm_sdk_libraries"
        files = {f"{module}/{path}": content for path, content in files.items()}
        files.setdefault(f"{module}/{name}.txt", b"")
        wheel(dist, name, version, files, **more)

    runtime = ("lib", "run")
    package("rocm_sdk_core", lambda name, part, target: name not in LIBRARIES and part in runtime)
    package("rocm_sdk_libraries", lambda name, part, target: name in LIBRARIES and part in runtime and target == "generic")
    targets = sorted({target for _, _, target, *_ in artifacts.found if target != "generic"})
    for target in targets:
        package(f"rocm_sdk_device_{target}", lambda name, part, slice_: slice_ == target)
    package("rocm_sdk_devel", lambda name, part, target: part == "dev")
    package("rocm_profiler", lambda name, part, target: name == "rocprofiler-compute")
    known = sorted({*targets, *dist_targets(arguments.artifact_dir)})
    # RCCL's code is split as well, and it is built for more targets than the others.
    devices = known if any(name == "rccl" for name, *_ in artifacts.found) else targets
    source_package(dist, version, known, devices)
    print(f"::: Finished building packages at '{arguments.dest_dir}' with version '{version}'")


def dist_targets(artifact_dir):
    text = (artifact_dir.parent / "therock_dist_targets.txt").read_text().strip()
    return text.split(";")


if __name__ == "__main__":
    main()
