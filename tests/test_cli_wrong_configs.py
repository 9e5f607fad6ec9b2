"""A wrong value at any key of any layout's files is named: never a traceback, never a hang."""

import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import MLA, tiny_draft

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import save_draft
from sparksmith.draft.convert import TargetRows, convert_draft
from sparksmith.draft.layouts import LAYOUTS
from sparksmith.draft.manifest import Manifest, TargetIdentity, write_manifest
from sparksmith.draft.rotary import Yarn

WRONG: list[Any] = [
    None,
    "a",
    True,
    -1,
    0.5,
    float("inf"),
    10**30,
    100_000,
    [],
    ["a"],
    [1, None],
    [[1], {}],
    {"a": 1},
]
EVERY = int(os.environ.get("SPARKSMITH_FUZZ_EVERY", "10"))
"""Of all values at all keys, one in so many is tried."""
SECONDS = 5.0
"""More than any command takes, on a slow machine: building what a config.json asks for would."""


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound draft of every layout, with YaRN or a window, and its manifest."""
    folder = tmp_path_factory.mktemp("drafts")
    yarn = Yarn(factor=4.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=1.0)
    for layout in LAYOUTS:
        windowed = layout in ("vllm", "speculators")
        sizes: dict[str, Any] = {"hidden_size": 20, "yarn": yarn}
        sizes |= {"sliding_window": 6} if windowed else MLA if layout == "k3" else {}
        draft = tiny_draft(**sizes)
        save_draft(draft, folder / f"own-{layout}", dtype=torch.bfloat16)
        known = Manifest.of(
            draft.config,
            draft.target_ids,
            target=TargetIdentity(name="org/target"),
            trained_length=64,
            calibration=(1.0,),
        )
        write_manifest(known, folder / f"own-{layout}")
        rows = TargetRows(embed=torch.zeros(50, 20), head=torch.zeros(50, 20))
        convert_draft(folder / f"own-{layout}", folder / layout, layout, rows=rows)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON value anything is, but for the whole."""
    inner = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))[:1]
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def put(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(values)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def problem(capsys: pytest.CaptureFixture[str], *arguments: str) -> str | None:
    """What went wrong in a way that no user can put right."""
    started = time.monotonic()
    code = main([*arguments])
    seconds = time.monotonic() - started
    caught = capsys.readouterr()
    # How an exception that nobody foresaw is reported.
    if code not in (0, 1, 2) or "--debug" in caught.err:
        return f"{code} {caught.err}"
    return f"{seconds:.1f} s" if seconds > SECONDS else None


# Files of sparksmith's own are alike beside every layout.
FILES = [*((layout, "config.json") for layout in LAYOUTS), ("vllm", "sparksmith.json")]


@pytest.mark.parametrize(("layout", "file"), FILES)
def test_wrong_values_everywhere(
    layout: str, file: str, drafts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drafts / layout
    path = folder / file
    sound = json.loads(path.read_text(encoding="utf-8"))
    added = {} if file == "sparksmith.json" else {"dflash_config": {}, "rope_scaling": {}}
    problems = {}
    try:
        for number, place in enumerate([*places(sound), *((key,) for key in added)]):
            for other, wrong in enumerate(WRONG):
                # Each key meets some of the values, and each value some of the keys.
                turn = (number * 5 + other) % EVERY
                if turn:
                    continue
                changed = put({**added, **sound} if place[0] in added else sound, place, wrong)
                path.write_text(json.dumps(changed), encoding="utf-8")
                out = tmp_path / f"{number}-{other}"
                for arguments in (
                    ["check", str(folder), "--no-probe"],
                    ["convert", str(folder), str(out), "--to", layout],
                    ["vllm", str(folder), "--target", "org/t", "--context", "64"],
                ):
                    found = problem(capsys, *arguments)
                    if found is not None:
                        problems[(arguments[0], place, repr(wrong))] = found
    finally:
        path.write_text(json.dumps(sound), encoding="utf-8")
    assert problems == {}
    assert problem(capsys, "check", str(folder), "--no-probe") is None
