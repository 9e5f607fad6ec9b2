"""A target and its tokenizer from a folder or the Hugging Face Hub, and prompts for it.

Weights come from safetensors only, and code from a checkpoint runs only if its user says so.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparksmith.draft.errors import UserError
from sparksmith.verify.findings import TargetFacts
from sparksmith.verify.packing import pack_linears
from sparksmith.verify.target import TransformersTarget

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_target(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    taps: Sequence[int] = (),
    trust_remote_code: bool = False,
    device: str = "cpu",
    stream: str | None = None,
) -> tuple[TransformersTarget, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to decode.

    `dtype` "auto" is bfloat16 where the device multiplies it natively, else float32. On a CPU the
    layers are packed and fused (`pack_linears`), which holds the weights twice. Raises UserError
    for what cannot be found, read or served exactly: no such folder or repository, no safetensors
    weights, missing or misshapen weights, code that was not trusted, an unknown architecture, a
    tokenizer that does not fit, states that do not come back after rejected tokens.
    """
    name = str(name_or_path)
    torch_dtype = _dtype(dtype, _device(device))
    _check_folder(Path(name))
    config = _config(name, trust_remote_code)
    model = _model(name, config, torch_dtype, trust_remote_code).to(device)
    tokenizer = _tokenizer(name, trust_remote_code)
    if device == "cpu":
        pack_linears(model, fused=True)
    target = TransformersTarget(model, taps, stream)
    if len(tokenizer) > target.vocab_size:
        raise UserError(
            "target",
            name,
            f"has a tokenizer of {len(tokenizer)} words and a head of {target.vocab_size}",
            "Use the tokenizer that belongs to the weights.",
        )
    target.check_rewind()
    return target, tokenizer


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """A target's depth, width and vocabulary: what a draft must fit."""

    num_layers: int
    hidden_size: int
    vocab_size: int


def target_sizes(name_or_path: str | Path, trust_remote_code: bool = False) -> TargetSizes:
    """The target's sizes, from its configuration alone; UserError as `load_target`."""
    name = str(name_or_path)
    _check_folder(Path(name))
    config = _config(name, trust_remote_code).get_text_config(decoder=True)
    return TargetSizes(
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
    )


def text_facts(
    name_or_path: str | Path,
    called: str,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
) -> TargetFacts:
    """What checks compare a draft with: sizes of the configuration, words of the tokenizer."""
    name = str(name_or_path)
    config = _config(name, trust_remote_code)
    text = config.get_text_config(decoder=True)
    special = {
        what: token
        for what in ("bos", "eos", "pad")
        if (token := getattr(tokenizer, f"{what}_token_id")) is not None
    }
    reserved = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return TargetFacts(
        name=called,
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_length=int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        is_k3=str(getattr(config, "model_type", "")) in ("kimi_k3", "k3_mini"),
        special_tokens=special,
        words=frozenset(tokenizer.get_vocab().values()) - reserved,
        revision=getattr(config, "_commit_hash", None),
        **text_identity(tokenizer),
    )


def read_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A checkpoint's configuration; UserError as `load_target`."""
    _check_folder(Path(name))
    return _config(name, trust_remote_code)


def read_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer; UserError as `load_target`."""
    return _tokenizer(name, trust_remote_code)


def read_dtype(dtype: str, device: str) -> torch.dtype:
    """What `load_target` makes of its `dtype` on a device; UserError as there."""
    return _dtype(dtype, _device(device))


def text_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """SHA-256 of the tokenizer (its vocabulary and rules) and of the chat template, if any.

    Text rendered otherwise than in training lowers acceptance, and nothing else shows it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = (
        json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    )
    template = tokenizer.chat_template
    rendered = template if template is None or isinstance(template, str) else json.dumps(template)
    return {
        "tokenizer_sha256": _sha256(words),
        "chat_template_sha256": None if rendered is None else _sha256(rendered),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Token ids of a conversation, up to where the target's answer begins.

    `messages` are {"role", "content"} (see `verify.prompts`). With a chat template: its rendering
    with the generation prompt. Without one: the contents joined by blank lines, with a warning.
    Raises UserError where the template does not take such a conversation.
    """
    if tokenizer.chat_template is None:
        warnings.warn(
            "the tokenizer has no chat template: the messages are joined as plain text",
            UserWarning,
            stacklevel=2,
        )
        text = "\n\n".join(message["content"] for message in messages)
        return list(tokenizer(text)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, ValueError) as error:
        raise UserError(
            "messages",
            [message["role"] for message in messages],
            f"are not a conversation the target's chat template takes ({error})",
            "Use the roles and the order that its model card shows.",
        ) from None
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _device(device: str) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise UserError("device", device, "is not a device", 'Use "cpu" or "cuda".') from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device", device, "is not there, as torch sees it", 'Use "cpu".')
    return parsed


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype not in DTYPES:
        raise UserError("dtype", dtype, "is not known", f"Use one of {', '.join(DTYPES)}.")
    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    # A CPU without bfloat16 products converts every weight on every pass.
    native = device.type != "cpu" or (
        hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    return torch.bfloat16 if native else torch.float32


def _check_folder(folder: Path) -> None:
    """What can be said of a local checkpoint before it is read; other names are the Hub's."""
    name = str(folder)
    if not folder.exists():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError("target", name, "does not exist", "Check the path.")
        return
    if not (folder / "config.json").is_file():
        raise UserError(
            "target",
            name,
            "holds no config.json",
            "Give the folder of a transformers checkpoint.",
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "target",
            name,
            "holds no *.safetensors weights; pickled weights are not loaded",
            "Convert it: load it with transformers and save_pretrained it.",
        )


def _config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    _know_k3_mini(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise _not_found(name, error) from None
    except ValueError as error:
        # transformers names both cases in its first sentence: code, or an unknown architecture.
        if "trust_remote_code" in str(error):
            raise UserError(
                "target",
                name,
                "needs code from its own repository",
                "Read that code, then allow it with trust_remote_code.",
            ) from None
        raise UserError(
            "target",
            name,
            f"is not a model this transformers knows ({_first_line(error)})",
            "Upgrade transformers, or use another model.",
        ) from None


def _know_k3_mini(name: str) -> None:
    """Register our own architecture where a checkpoint needs it; others do without the import."""
    path = Path(name) / "config.json"
    if not path.is_file() or '"k3_mini"' not in path.read_text(encoding="utf-8"):
        return
    try:
        import sparksmith.verify.k3_mini  # noqa: F401
    except ImportError as error:
        raise UserError(
            "target",
            name,
            f"needs transformers' Kimi-Linear, which is not in this version ({error})",
            "Upgrade transformers.",
        ) from None


def _model(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            # Not ignored, but named below.
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise _not_found(name, error) from None
    except ValueError as error:
        raise UserError(
            "target",
            name,
            f"is not a causal language model ({_first_line(error)})",
            "Use a decoder-only language model.",
        ) from None
    # transformers would fill these with random numbers.
    bad: list[Any] = [*info["missing_keys"], *info["mismatched_keys"]]
    if bad:
        raise UserError(
            "target",
            name,
            f"lacks weights, or has them in another shape: {', '.join(map(str, bad[:3]))}",
            "Fetch the checkpoint again.",
        )
    return model


def _tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    problem = "its files are missing"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        # For some architectures transformers makes an empty tokenizer up.
        if tokenizer("Hello, world", add_special_tokens=False)["input_ids"]:
            return tokenizer
    except (OSError, ValueError) as error:
        problem = _first_line(error)
    raise UserError(
        "target",
        name,
        f"has no tokenizer that can be read ({problem})",
        "Put the tokenizer's files beside the weights.",
    )


def _not_found(name: str, error: OSError) -> UserError:
    return UserError(
        "target",
        name,
        f"is neither a folder here nor given by the Hugging Face Hub ({_first_line(error)})",
        "Check the spelling, the network and, for a gated model, your login.",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
