#!/usr/bin/env python3
"""Makes PyTorch's wheels with the ROCm wheels of the environment that it runs in.

As upstream, in short: `build_prod_wheels.py install-rocm --index-url HTTP_URL/whl-multi-arch/ --rocm-extras device-gfx942`, then
`build`.
"""

import argparse
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "build_tools"))
from build_python_packages import wheel

# What `import torch` loads.
LINUX_LIBRARY_PRELOADS = [
    "amdhip64",
    "rocm-openblas",
    "rocprofiler-sdk",
    "rccl",
    "hipfile",
    "hipblaslt",
    "miopen",
]


def do_build(arguments):
    import rocm_sdk

    version = subprocess.run([sys.executable, "-m", "rocm_sdk", "version"], check=True, stdout=subprocess.PIPE, text=True)
    sources = arguments.root_checkout_dir
    # As upstream, into the environment that it runs in.
    pip = [sys.executable, "-m", "pip", "install", "-r", str(sources / "pytorch/requirements.txt")]
    subprocess.run(pip, check=True)
    import tokens_double

    print("built with", tokens_double.VERSION, flush=True)
    suffix = f"+devrocm{version.stdout.strip()}"
    archs = arguments.pytorch_rocm_arch.split(",")
    compiler = rocm_sdk.SITE / "_rocm_sdk_core/lib/llvm/bin/amdclang++"
    scratch = pathlib.Path(os.environ.get("TMPDIR", "/tmp"))
    library = scratch / "libtorch_hip.so"
    command = ["ccache"] if arguments.use_ccache else []
    command += [compiler, "-x", "hip", *(f"--offload-arch={arch}" for arch in archs), "-fPIC", "-c"]
    subprocess.run([*command, "-o", scratch / "torch_hip.o", sources / "pytorch/torch_hip.hip"], check=True)
    subprocess.run([compiler, "-shared", "-o", library, scratch / "torch_hip.o"], check=True)
    use_nccl = os.environ.get("USE_NCCL", "1") != "0"
    if use_nccl and "rccl" not in LINUX_LIBRARY_PRELOADS:
        sys.exit("torch would link librccl and not load it")
    init = f"PRELOADS = {LINUX_LIBRARY_PRELOADS!r}\nUSE_NCCL = {use_nccl}\nMAX_JOBS = {os.environ['MAX_JOBS']!r}\n"
    torch = (sources / "pytorch/version.txt").read_text().strip() + suffix
    files = {
        "torch/__init__.py": (sources / "pytorch/torch/__init__.py").read_bytes(),
        "torch/_rocm_init.py": init.encode(),
        "torch/cuda.py": (sources / "pytorch/torch/cuda.py").read_bytes(),
        "torch/lib/libtorch_hip.so": library.read_bytes(),
    }
    wheel(arguments.output_dir, "torch", torch, files, requires=[f"rocm[libraries]=={version.stdout.strip()}"])
    for project, name in (("triton", "triton"), ("pytorch_audio", "torchaudio"), ("pytorch_vision", "torchvision")):
        if (sources / project).exists():
            own = (sources / project / "version.txt").read_text().strip() + suffix
            requires = [] if name == "triton" else [f"torch=={torch}"]
            wheel(arguments.output_dir, name, own, {f"{name}/__init__.py": b""}, requires=requires)


def main(argv):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("--install-rocm", action=argparse.BooleanOptionalAction)
    build.add_argument("--pip-cache-dir", type=pathlib.Path)
    build.add_argument("--output-dir", type=pathlib.Path, required=True)
    build.add_argument("--use-ccache", action=argparse.BooleanOptionalAction, default=False)
    build.add_argument("--root-checkout-dir", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
    build.add_argument("--pytorch-rocm-arch", required=True)
    do_build(parser.parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
