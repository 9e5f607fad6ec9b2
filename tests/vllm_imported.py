"""Imported once, in the process from which the tests' vLLM processes are forked."""

import vllm  # noqa: F401
from vllm import LLM, SamplingParams  # noqa: F401
