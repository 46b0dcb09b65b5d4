"""Finds and loads the libraries of the installed packages."""

import ctypes
import pathlib

SITE = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = {
    "amdhip64": "_rocm_sdk_core/lib/libamdhip64.so",
    "rocprofiler-sdk": "_rocm_sdk_core/lib/librocprofiler-sdk.so",
    "hipfile": "_rocm_sdk_core/lib/libhipfile.so",
    "rocdecode": "_rocm_sdk_core/lib/librocdecode.so",
    "rocjpeg": "_rocm_sdk_core/lib/librocjpeg.so",
    "rocm-openblas": "_rocm_sdk_libraries/lib/host-math/lib/librocm-openblas.so",
    "rocblas": "_rocm_sdk_libraries/lib/librocblas.so",
    "hipblaslt": "_rocm_sdk_libraries/lib/libhipblaslt.so",
    "miopen": "_rocm_sdk_libraries/lib/libMIOpen.so",
    "rccl": "_rocm_sdk_libraries/lib/librccl.so",
    "rpp": "_rocm_sdk_libraries/lib/librpp.so",
}


def preload_libraries(*names):
    for name in names:
        path = SITE / LIBRARIES[name]
        if not path.exists():
            raise FileNotFoundError(f"rocm library `{name}` is not there: {path}")
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
