"""A Triton backend named `cpu`, so that vLLM's kernels run where there is no GPU.

With TRITON_INTERPRET=1 Triton runs a kernel as numpy operations and compiles nothing; all that is
missing on such a machine is a backend that says it is the active one. Put this package's parent
folder on PYTHONPATH for the processes that need it (DSpark in vLLM does) and for those alone:
once vLLM sees Triton it leaves the C++ kernels of its V1 runner. `norms` is a plugin of vLLM that
comes with it.
"""
