"""Responses that `sparksmith generate` wrote, with the settings they were sampled under."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.target import OpenEnds, OpenTarget
    from sparksmith.distill.generation import Response
    from sparksmith.draft.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Responses, their sampling, the target's record, and what identifies them in a later run's
    record."""

    responses: "list[Response]"
    sampling: "Sampling"
    record: dict[str, Any]
    target: dict[str, Any]


def read_generated(folder: Path) -> Generated:
    """Read a folder of responses, finished or not.

    Raises UserError when it holds none or is not a run of `generate`.
    """
    from sparksmith.distill.generation import Response
    from sparksmith.distill.shards import read_responses, shard_paths
    from sparksmith.draft.files import sha256_of
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.run_record import read_record

    record = read_record(folder)
    if record["command"] != "generate":
        raise UserError(
            "--responses",
            str(folder),
            f"is a run of {record['command']!r}",
            "Give the folder that `sparksmith generate` wrote.",
        )
    settings = record["settings"]
    responses = [
        Response(
            request_id=row.request_id,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            finish_reason=row.finish_reason,
        )
        for row in read_responses(folder)
    ]
    return Generated(
        responses=responses,
        sampling=Sampling(
            temperature=settings["temperature"], top_k=settings["top_k"], top_p=settings["top_p"]
        ),
        record={
            "responses": len(responses),
            "sha256": _together(sha256_of(path) for path in shard_paths(folder)),
            "thinking": thinking_modes(settings.get("extra", {})),
        },
        target=record["inputs"]["target"],
    )


def thinking_modes(extra: Mapping[str, Any]) -> list[str]:
    """The mode that a server was asked to think in, as `generate --thinking` names it."""
    asked = extra.get("chat_template_kwargs")
    if not isinstance(asked, Mapping) or "thinking" not in asked:
        return []
    if not asked["thinking"]:
        return ["off"]
    return [str(asked.get("thinking_effort", "on"))]


def check_answered_by(generated: Generated, opened: "OpenTarget | OpenEnds") -> None:
    """UserError unless `opened` is the target that gave the responses."""
    check_target_of(generated.target, opened, "the responses", "generate")


def check_target_of(
    theirs: Mapping[str, Any], opened: "OpenTarget | OpenEnds", what: str, command: str
) -> None:
    """UserError unless `opened` is the target that gave `what` under `command`.

    Its dtype may be another: that changes rounding and nothing else. Of a server only the name
    that it gave its model is known, which is no path and no hash: that is said, and let pass.
    """
    own = opened.record
    if "name" not in theirs:
        print(
            f"{what} are of a server's model {theirs.get('model')}; whether that is {own['name']} "
            "cannot be told from here",
            file=sys.stderr,
        )
        return
    # A converted model's files tell the versions that converted it; the wheel tells the model.
    keys = [key for key in ("wheel_sha256", "sha256", "commit") if theirs.get(key) and own.get(key)]
    key = keys[0] if keys else "name"
    if theirs[key] == own[key]:
        return
    if theirs["name"] == own["name"]:
        problem = f"has changed since it gave {what}"
        remedy = f"Give --target the files that it had, or {command} again."
    else:
        problem = f"did not give {what}: {theirs['name']} did"
        remedy = f"Use --target {theirs['name']}, or {command} again with this one."
    raise UserError("--target", own["name"], problem, remedy)


def _together(hashes: Any) -> str:
    import hashlib

    return hashlib.sha256("".join(hashes).encode()).hexdigest()
