"""Checkpoints: bit-exact both ways, complete, and refused by name when they are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import MLA, VOCABULARY, tiny_draft
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparksmith.draft.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    export_draft,
    load_draft,
    open_draft,
    own_shapes,
    save_draft,
    shipped_head,
)
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling

KINDS: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn", "is_causal": True},
    {"markov_rank": 0, "enable_confidence_head": False},
    {"draft_vocab_size": 20},
]


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_round_trip_is_bit_exact(changes: dict[str, Any], tmp_path: Path) -> None:
    draft = tiny_draft(**changes)
    save_draft(draft, tmp_path / "new" / "folder")
    loaded = load_draft(tmp_path / "new" / "folder")
    assert loaded.config == draft.config
    assert torch.equal(loaded.target_ids, draft.target_ids)
    saved = draft.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        CONFIG_FILE,
        WEIGHTS_FILE,
    ]


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_training_checkpoint_holds_no_embedding_and_no_head(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    draft = tiny_draft(**changes)
    save_draft(draft, tmp_path)
    expected = set(draft.state_dict()) | ({"d2t"} if "draft_vocab_size" in changes else set())
    assert set(load_file(tmp_path / WEIGHTS_FILE)) == expected
    assert not {"embed_tokens.weight", "lm_head.weight"} & expected


def test_a_loaded_draft_drafts_the_same(tmp_path: Path) -> None:
    draft = tiny_draft(draft_vocab_size=20)
    save_draft(draft, tmp_path)
    loaded = load_draft(tmp_path)
    loaded.bind(draft.bound.embed, draft.bound.head)
    drafted = []
    for one in (draft, loaded):
        drafter = DSparkDrafter(one, Sampling(temperature=0.0), None)
        drafter.update(torch.arange(3), torch.ones(3, 40))
        drafted.append(drafter.propose(4, 4).tokens.tolist())
    assert drafted[0] == drafted[1]


def test_the_files_are_those_of_the_layout(tmp_path: Path) -> None:
    draft = tiny_draft(draft_vocab_size=20)
    save_draft(draft, tmp_path, dtype=torch.bfloat16)
    with safe_open(tmp_path / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    d2t = tensors.pop("d2t")
    assert d2t.dtype == torch.int64
    assert (torch.arange(20) + d2t).tolist() == draft.target_ids.tolist()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["draft_vocab_size"] == 20
    assert config["sample_from_anchor"] is True
    assert load_draft(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_draft(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_export_of_a_reduced_vocabulary_ships_the_heads_rows(tmp_path: Path) -> None:
    draft = tiny_draft(draft_vocab_size=20)
    export_draft(draft, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert torch.equal(tensors["lm_head.weight"], draft.bound.head)
    assert "embed_tokens.weight" not in tensors
    # From a full head, the same rows.
    head = torch.randn(VOCABULARY, 24)
    export_draft(draft, tmp_path, embed=draft.bound.embed, head=head)
    rows = shipped_head(tmp_path)
    assert rows is not None
    assert torch.equal(rows, head[draft.target_ids])
    assert torch.equal(load_file(tmp_path / WEIGHTS_FILE)["embed_tokens.weight"], draft.bound.embed)
    assert load_draft(tmp_path).state_dict().keys() == draft.state_dict().keys()


def test_export_of_a_full_vocabulary_ships_what_is_given(tmp_path: Path) -> None:
    draft = tiny_draft()
    export_draft(draft, tmp_path)
    assert shipped_head(tmp_path) is None
    # One tensor for both, as a tied target has it.
    tied = draft.bound.embed
    export_draft(draft, tmp_path, embed=tied, head=tied)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert torch.equal(tensors["lm_head.weight"], tied)
    assert torch.equal(tensors["embed_tokens.weight"], tied)
    load_draft(tmp_path)
    with pytest.raises(UserError, match="head"):
        export_draft(draft, tmp_path, head=torch.zeros(3, 24))


def change(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS_FILE)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    save_draft(tiny_draft(), tmp_path)
    change(
        tmp_path,
        fc__weight=None,
        markov_head__markov_w2__weight=None,
        norm__weight=torch.zeros(25),
        rotary__frequencies=torch.zeros(4),
    )
    with pytest.raises(UserError) as caught:
        load_draft(tmp_path)
    message = str(caught.value)
    assert "missing fc.weight, markov_head.markov_w2.weight" in message
    assert "unknown rotary.frequencies" in message
    assert "norm.weight is [25] but must be [24]" in message


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_each_missing_tensor_is_noticed(changes: dict[str, Any], tmp_path: Path) -> None:
    save_draft(tiny_draft(**changes), tmp_path)
    whole = load_file(tmp_path / WEIGHTS_FILE)
    for name in whole:
        save_file({k: v for k, v in whole.items() if k != name}, tmp_path / WEIGHTS_FILE)
        with pytest.raises(UserError, match=name):
            load_draft(tmp_path)


def test_a_misshapen_shipped_head_is_noticed(tmp_path: Path) -> None:
    draft = tiny_draft()
    export_draft(draft, tmp_path, head=draft.bound.head)
    change(tmp_path, lm_head__weight=torch.zeros(49, 24))
    with pytest.raises(UserError, match=r"lm_head\.weight is \[49, 24\]"):
        load_draft(tmp_path)


def test_offsets_that_mean_no_vocabulary_are_refused(tmp_path: Path) -> None:
    save_draft(tiny_draft(draft_vocab_size=20), tmp_path)
    change(tmp_path, d2t=torch.full((20,), 31))
    with pytest.raises(UserError, match="vocabulary"):
        load_draft(tmp_path)


def test_a_folder_without_a_draft_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_draft(tmp_path)
    save_draft(tiny_draft(), tmp_path)
    weights = (tmp_path / WEIGHTS_FILE).read_bytes()
    (tmp_path / WEIGHTS_FILE).write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_draft(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_draft(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_draft(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        load_draft(tmp_path)


def test_saving_again_replaces_whole_files(tmp_path: Path) -> None:
    save_draft(tiny_draft(seed=1), tmp_path)
    second = tiny_draft(seed=2)
    save_draft(second, tmp_path)
    assert torch.equal(load_draft(tmp_path).fc.weight, second.fc.weight)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({}, "weight_map"),
        ({"weight_map": ["model.safetensors"]}, "weight_map"),
        ({"weight_map": {"fc.weight": 3}}, "weight_map"),
        ({"weight_map": {"fc.weight": "../model.safetensors"}}, r"weight_map\.fc\.weight"),
        ({"weight_map": {"fc.weight": "/etc/passwd"}}, r"weight_map\.fc\.weight"),
        ({"weight_map": {"fc.weight": ".."}}, r"weight_map\.fc\.weight"),
        ({"weight_map": {"fc.weight": "lost.safetensors"}}, "the index names it"),
    ],
)
def test_an_index_that_points_nowhere(index: object, named: str, tmp_path: Path) -> None:
    save_draft(tiny_draft(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=named):
        open_draft(tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_draft(tiny_draft(), tmp_path)

    def denied(*_arguments: object, **_named: object) -> object:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("sparksmith.draft.checkpoint.safe_open", denied)
        with pytest.raises(UserError, match=r"model\.safetensors.*Permission denied"):
            open_draft(tmp_path)
    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UserError, match=r"config\.json.*Permission denied"):
        open_draft(tmp_path)


def test_shapes_follow_from_the_configuration_alone() -> None:
    for changes in ({}, MLA, {"draft_vocab_size": 20}, {"markov_head_type": "rnn"}):
        draft = tiny_draft(num_hidden_layers=3, **changes)
        wanted = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
        assert own_shapes(draft.config) == wanted
