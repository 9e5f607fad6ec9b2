"""k3-mini on disk: a random model, a byte tokenizer and a chat template, in the user's cache."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparksmith.verify.embedded import cache_folder
from sparksmith.verify.k3_mini import k3_mini

_END, _MASK = 256, 257
_WORDS = 258
_VERSION = 1
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def k3_mini_folder() -> Path:
    """The folder of the model, written first if it is not in the cache; the same for everyone."""
    folder = cache_folder() / f"k3-mini-{_VERSION}"
    if (folder / "config.json").is_file():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    save_k3_mini(partial)
    partial.rename(folder)
    return folder


def save_k3_mini(folder: Path, *, seed: int = 0) -> Path:
    """Write a random k3-mini with its tokenizer, every byte of text a token."""
    folder.mkdir(parents=True, exist_ok=True)
    model = k3_mini(seed=seed, vocab_size=_WORDS)
    # A reserved word that is never said: what a draft takes for its mask.
    model.lm_head.weight.data[_MASK] = 0.0
    model.generation_config.eos_token_id = _END
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)} | {"<end>": _END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=_TEMPLATE
    )
