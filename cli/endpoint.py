"""A running server as an option of several commands."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparksmith.verify.endpoint import Endpoint, ServerFacts

SERVER_PANEL = "Server"
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="A running server as the target: http://HOST:PORT.",
        rich_help_panel=SERVER_PANEL,
    ),
]
EndpointModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Its name of the model, if it serves several.",
        rich_help_panel=SERVER_PANEL,
    ),
]


@dataclass(frozen=True, kw_only=True)
class EndpointChoice:
    """The options above, as given."""

    url: str
    model: str | None = None
    timeout: float = 600.0


def open_endpoint(choice: EndpointChoice, stack: ExitStack) -> "tuple[Endpoint, ServerFacts]":
    """The server, asked what it is, and closed with the stack; UserError where it does not
    answer."""
    from sparksmith.verify.endpoint import Endpoint

    server = Endpoint(choice.url, model=choice.model, timeout=choice.timeout)
    stack.callback(server.close)
    return server, server.describe()
