"""Tiny targets on disk, as a user would give them: weights, tokenizer and chat template."""

from pathlib import Path

import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256
# Beyond the tokenizer's words, as many vocabularies are padded: what a draft takes for its mask.
MASK = 257
VOCABULARY = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so that a character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def save_tiny_target(folder: Path, kind: str = "qwen3", **sizes: int) -> Path:
    """Write a random model of `kind` that ends some of its answers."""
    model = tiny_model(kind, vocab_size=VOCABULARY, **sizes)
    with torch.no_grad():
        # Other logits are of order six, so this word is never said.
        model.get_output_embeddings().weight[MASK] = 0.0
    # Three words of 258: answers end after eighty tokens or so, or at the cap.
    model.generation_config.eos_token_id = [EOS, 7, 77]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
