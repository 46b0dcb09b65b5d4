import os
import pathlib


def device_count():
    """How many GPUs there are; a test may say that it has some."""
    return int(os.environ.get("DOUBLE_GPUS", pathlib.Path("/dev/kfd").exists()))
