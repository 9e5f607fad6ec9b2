"""The compiler half of the backend, which compiles nothing."""

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    """Known to Triton under the target name `cpu`; any call to compile is an error."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu-interpreter-1.0"

    def parse_options(self, options):
        return options

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}

    def add_stages(self, stages, options, language):
        raise RuntimeError("This backend compiles nothing. Set TRITON_INTERPRET=1.")
