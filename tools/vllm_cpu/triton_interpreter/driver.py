"""The driver half of the backend: one device, the CPU."""

import os

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Active when kernels are interpreted, which is the one way in which they run here."""

    def __init__(self):
        # Nothing is loaded: the base class would look for a GPU's library.
        pass

    @staticmethod
    def is_active():
        return os.environ.get("TRITON_INTERPRET") == "1"

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        raise RuntimeError("The interpreter's times say nothing about a kernel.")
