"""sparksmith.json: what it holds, what is assumed without it, and that it belongs to its draft."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_models import MLA, tiny_draft

from sparksmith.draft.errors import UserError
from sparksmith.draft.manifest import (
    MANIFEST_FILE,
    Figure,
    Manifest,
    TargetIdentity,
    for_target,
    read_manifest,
    vocabulary_hash,
    write_manifest,
)
from sparksmith.draft.rotary import Yarn

KNOWN: dict[str, Any] = {
    "target": TargetIdentity(name="org/target", revision="abc", chat_template_sha256="12"),
    "stream": "prefix_sum",
    "trained_length": 4096,
    "thinking_modes": ("on", "off"),
    "calibration": (1.1, 0.9, 1.0, 1.2),
    "figures": (Figure(what="acceptance length", value=2.61, on="creative writing"),),
}
SHAPES = [
    {},
    {"draft_vocab_size": 20},
    {**MLA, "yarn": Yarn(factor=4.0, original_max_position_embeddings=32)},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    draft = tiny_draft(**changes)
    manifest = Manifest.of(draft.config, draft.target_ids, **KNOWN)
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path, draft.config, draft.target_ids) == manifest
    stored = json.loads((tmp_path / MANIFEST_FILE).read_text(encoding="utf-8"))
    assert stored["taps"] == {
        "layers": [0, 3],
        "convention": "output_of_layer",
        "stream": "prefix_sum",
    }
    assert stored["layout"] == ("K3DSparkModel" if "mla" in changes else "Qwen3DSparkModel")


def test_without_one_it_says_what_is_assumed(tmp_path: Path) -> None:
    draft = tiny_draft()
    manifest = read_manifest(tmp_path, draft.config, draft.target_ids)
    assert (manifest.taps, manifest.block_size, manifest.stream) == ((0, 3), 4, "residual")
    assert manifest.target.name is None
    assert {"target", "taps.stream"} <= set(manifest.assumed)


def test_the_vocabularys_words_matter_not_only_their_number() -> None:
    draft = tiny_draft(draft_vocab_size=20)
    moved = draft.target_ids.clone()
    moved[0] -= 1
    assert vocabulary_hash(moved) != vocabulary_hash(draft.target_ids)


@pytest.mark.parametrize(
    "other",
    [{"block_size": 5}, {"is_causal": True}, {"target_layer_ids": (0, 4)}, {"rope_theta": 1e6}],
)
def test_a_manifest_of_another_draft_is_named(other: dict[str, Any], tmp_path: Path) -> None:
    draft = tiny_draft()
    write_manifest(Manifest.of(replace(draft.config, **other), None), tmp_path)
    with pytest.raises(UserError, match="is not what the draft beside it has"):
        read_manifest(tmp_path, draft.config, draft.target_ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": 9}, "format_version"),
        ({"taps": {"layers": [0, 3], "convention": "input_of_layer"}}, "taps.convention"),
        ({"taps": {"layers": [0, 3], "convention": "output_of_layer", "stream": "sum"}}, "stream"),
        ({"taps": None}, "taps"),
        ({"blok_size": 4}, "blok_size"),
        ({"target": {"nmae": "x"}}, "incomplete"),
        ({"target": ["x"]}, "target"),
        ({"target": {"name": 3}}, "target"),
        ({"taps": {"layers": ["a"], "convention": "output_of_layer"}}, "taps"),
        ({"block_size": "4"}, "block_size"),
        ({"is_causal": 0}, "is_causal"),
        ({"rope": []}, "rope"),
        ({"trained_length": 0.5}, "trained_length"),
        ({"thinking_modes": "on"}, "thinking_modes"),
        ({"calibration": ["a"]}, "calibration"),
        ({"figures": [{"what": "x"}]}, "figures"),
        ({"assumed": [1]}, "assumed"),
    ],
)
def test_what_is_broken_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    draft = tiny_draft()
    values = Manifest.of(draft.config, None).to_json_dict() | change
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=named):
        read_manifest(tmp_path, draft.config, draft.target_ids)


def test_what_was_assumed_stays_so_until_it_is_known(tmp_path: Path) -> None:
    draft = tiny_draft()
    first = read_manifest(tmp_path, draft.config, draft.target_ids)
    write_manifest(first, tmp_path)
    again = read_manifest(tmp_path, draft.config, draft.target_ids)
    assert again == first
    named = for_target(again, "org/target")
    assert named.target.name == "org/target"
    assert set(again.assumed) - set(named.assumed) == {"target"}
    assert for_target(named, "org/other") == named


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    draft = tiny_draft()
    (tmp_path / MANIFEST_FILE).write_text('{"format_version": 1, "ta', encoding="utf-8")
    with pytest.raises(UserError, match="not JSON"):
        read_manifest(tmp_path, draft.config, draft.target_ids)
