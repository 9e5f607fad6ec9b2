"""Loading a target: what is there works at once, what is not there is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify import loading
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.loading import load_target, render_prompt, text_identity

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}w1 {{ m.content }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)


def make_tokenizer(count: int = VOCABULARY, template: str | None = TEMPLATE):
    vocabulary = {f"w{i}": i for i in range(count)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", chat_template=template)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "target"))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name: object, **options) -> UserError:
    with pytest.raises(UserError) as error:
        load_target(name, **options)
    return error.value


def test_a_checkpoint_decodes(checkpoint):
    target, tokenizer = load_target(checkpoint, dtype="float32", taps=(0, 2))
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "w9 w8"}])
    result = decode(
        target, None, prompt, DecodeSettings(sampling=Sampling(temperature=0.0), max_new_tokens=9)
    )
    expected = tiny_model("qwen3").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=9,
    )
    assert [*prompt, *result.token_ids] == expected[0].tolist()
    assert target.taps == (0, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_as_asked(checkpoint, dtype):
    assert load_target(checkpoint, dtype=dtype)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(checkpoint, monkeypatch, native):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    # A processor that is only said to have such products has no packed layers for them.
    monkeypatch.setattr(loading, "pack_linears", lambda model, fused: None)
    target, _ = load_target(checkpoint)
    assert target.dtype == (torch.bfloat16 if native else torch.float32)


def test_no_such_folder(tmp_path):
    error = refused(tmp_path / "nothing")
    assert (error.field, error.value) == ("target", str(tmp_path / "nothing"))
    assert "does not exist" in str(error)


def test_no_such_folder_and_no_hub():
    assert "neither a folder here nor given by the Hugging Face Hub" in str(refused("nobody/none"))


def test_not_a_checkpoint(tmp_path):
    assert "config.json" in str(refused(tmp_path))


def test_pickled_weights_are_not_loaded(copied):
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"never read")
    assert "pickled weights are not loaded" in str(refused(copied))


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_weights_that_do_not_fit_are_named(copied, change):
    path = copied / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, path, metadata={"format": "pt"})
    assert name in str(refused(copied))


def test_code_from_the_checkpoint_runs_only_if_allowed(copied):
    edit_config(copied, model_type="homemade", auto_map={"AutoConfig": "homemade.HomemadeConfig"})
    (copied / "homemade.py").write_text("raise SystemExit('code was run')\n")
    assert "trust_remote_code" in str(refused(copied))


def test_unknown_architecture(copied):
    edit_config(copied, model_type="homemade")
    assert "Upgrade transformers" in str(refused(copied))


def test_no_tokenizer(copied):
    for path in copied.glob("*token*"):
        path.unlink()
    assert "tokenizer" in str(refused(copied))


def test_a_tokenizer_of_another_model(copied):
    make_tokenizer(VOCABULARY + 5).save_pretrained(copied)
    error = refused(copied)
    assert "72 words and a head of 67" in str(error)


@pytest.mark.parametrize(
    ("option", "value"), [("dtype", "int3"), ("device", "abacus"), ("device", "cuda")]
)
def test_options_that_are_not_there(checkpoint, option, value):
    if value == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert refused(checkpoint, **{option: value}).field == option


def test_prompt_by_the_chat_template():
    messages = ({"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"})
    assert render_prompt(make_tokenizer(), messages) == [1, 5, 2, 1, 6, 2, 3]


def test_prompt_without_a_chat_template():
    messages = [{"role": "system", "content": "w4"}, {"role": "user", "content": "w5"}]
    with pytest.warns(UserWarning, match="no chat template"):
        assert render_prompt(make_tokenizer(template=None), messages) == [4, 5]


def test_a_conversation_that_the_template_refuses():
    with pytest.raises(UserError, match="no system") as error:
        render_prompt(make_tokenizer(), [{"role": "system", "content": "w4"}])
    assert error.value.value == ["system"]


def test_the_identity_of_text_is_its_words_and_its_template() -> None:
    one = text_identity(make_tokenizer())
    assert one == text_identity(make_tokenizer())
    other_words = text_identity(make_tokenizer(VOCABULARY - 1))
    assert other_words["tokenizer_sha256"] != one["tokenizer_sha256"]
    assert other_words["chat_template_sha256"] == one["chat_template_sha256"]
    other_template = text_identity(make_tokenizer(template=TEMPLATE + " "))
    assert other_template["chat_template_sha256"] != one["chat_template_sha256"]
    assert text_identity(make_tokenizer(template=None))["chat_template_sha256"] is None
