import ctypes
import pathlib

import rocm_sdk

from . import _rocm_init, cuda

rocm_sdk.preload_libraries(*_rocm_init.PRELOADS)
_library = ctypes.CDLL(str(pathlib.Path(__file__).parent / "lib/libtorch_hip.so"))
_library.torch_targets.restype = ctypes.c_char_p


def targets():
    return _library.torch_targets().decode()
