"""The real vLLM, in processes of its own.

Each call runs in a child of one process that has imported vLLM, so that an engine starts in
seconds and leaves nothing behind. The environment is that of a machine without a GPU: Triton's
kernels are interpreted (tools/vllm_cpu), the engine runs in the child itself, on one thread.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
TOOLS = str(ROOT / "tools" / "vllm_cpu")
CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
DSPARK = {
    **CPU,
    "PYTHONPATH": os.pathsep.join([TOOLS, str(ROOT / "tests")]),
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
}


class RefusedError(Exception):
    """What vLLM says when it does not start."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response: its tokens, and the drafted tokens that each step accepted."""

    tokens: list[int]
    accepted: list[int]


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What vLLM's configuration classes make of a draft and a speculative config."""

    method: str
    architecture: str
    num_tokens: int
    captured: list[int]
    """Ids of the states captured for the draft: 0 is the embedding."""
    mask_token: int
    theta: float
    causal: bool
    max_length: int
    target_length: int


@cache
def _server() -> ForkServerContext:
    """A process with vLLM imported, from which each call's own is forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_imported"])
    before = dict(os.environ)
    os.environ.update(DSPARK)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def in_vllm(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """`function`'s result, from a new process; RefusedError for what it raised there."""
    with ProcessPoolExecutor(1, mp_context=_server(), max_tasks_per_child=1) as pool:
        return pool.submit(_guarded, function, arguments, options).result(timeout=400)


def _guarded(function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    # The new process has the path of the one that asked, where vLLM would not find the plugin.
    if TOOLS not in sys.path:
        sys.path.insert(0, TOOLS)
    try:
        return function(*arguments, **options)
    except Exception as error:
        # vLLM's own exceptions do not all survive the way between processes.
        raise RefusedError(f"{type(error).__name__}: {error}") from None


def answers(
    target: Path,
    speculative: Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> list[Answer]:
    """vLLM's greedy responses, with a draft or, for None, without."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(target),
        per_request_spec_decode_metrics="detailed",
        disable_log_stats=False,
        speculative_config=None if speculative is None else dict(speculative),
        **{**ENGINE, **options},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    made = []
    for output in engine.generate(requests, sampling, use_tqdm=False):
        (completion,) = output.outputs
        metrics = completion.spec_decode_metrics
        steps = [] if metrics is None else metrics.to_dict().get("per_step_accepted", [])
        made.append(Answer(tokens=list(completion.token_ids), accepted=list(steps)))
    return made


def configured(target: Path, speculative: Mapping[str, Any], **options: Any) -> Configured:
    """What vLLM makes of them before it loads a weight."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"skip_tokenizer_init": True, **ENGINE, **options}
    made = EngineArgs(
        model=str(target), speculative_config=dict(speculative), **arguments
    ).create_engine_config()
    return _configured(made)


def parsed(command: Sequence[str]) -> tuple[Configured, dict[str, Any]]:
    """A whole `vllm serve` command through vLLM's own parser, and its speculative config through
    the configuration classes, with those options that a machine without a GPU can take; also all
    values that differ from vLLM's defaults."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    read = vars(parser.parse_args(list(command)))
    lengths = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
    made = configured(
        Path(read["model_tag"]),
        read["speculative_config"],
        dtype="auto",
        **{name: read[name] for name in lengths},
    )
    given = {name: value for name, value in read.items() if value != parser.get_default(name)}
    return made, given


def configured_by(
    environment: Mapping[str, str], target: Path, speculative: Mapping[str, Any]
) -> Configured:
    """The same under other environment variables."""
    os.environ.update(environment)
    return configured(target, speculative)


def served_alone(draft: Path) -> None:
    """What `vllm serve DRAFT` starts with: a draft that names its target."""
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model=str(draft), skip_tokenizer_init=True, **ENGINE).create_engine_config()


def attempts(
    target: Path, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[Configured | str]:
    """`configured` for every (speculative config, options), or what vLLM says in refusing it."""
    made: list[Configured | str] = []
    for speculative, options in cases:
        try:
            made.append(configured(target, speculative, **options))
        except Exception as error:
            made.append(f"{type(error).__name__}: {error}")
    return made


def _configured(made: Any) -> Configured:
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
        get_eagle3_aux_layers_from_config,
    )
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    found = made.speculative_config
    draft = found.draft_model_config
    config = draft.hf_config
    return Configured(
        method=found.method,
        architecture=draft.architecture,
        num_tokens=found.num_speculative_tokens,
        captured=list(get_eagle3_aux_layers_from_config(found) or ()),
        mask_token=get_parallel_drafting_token_id(config),
        theta=float(config.rope_parameters["rope_theta"]),
        causal=not dflash_has_any_non_causal(config),
        max_length=draft.max_model_len,
        target_length=made.model_config.max_model_len,
    )
