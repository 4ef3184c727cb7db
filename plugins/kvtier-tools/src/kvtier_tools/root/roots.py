"""Arguments and checks that the commands for a file tier's root share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.errors import TierError
from kvtier_tools.fs import ledger
from kvtier_tools.root.contents import RootView

RootArgument = Annotated[Path, typer.Argument(metavar="ROOT", help="The root_dir of a file tier.")]
NamespaceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this cache; `kvtier ls` lists the names.")
]

_FILE_SYSTEM_ENTRIES: Final = {"lost+found"}


def require_root(path: Path) -> None:
    """Raise TierError if a directory is not a root: a command would find no problem in it."""
    with RootView(path) as root:
        if root.namespaces() or not set(root.others()) - _FILE_SYSTEM_ENTRIES:
            return
    above = (one for one in path.absolute().parents if (one / ledger.FOLDER).is_dir())
    hint = f"; did you mean {root_above}?" if (root_above := next(above, None)) else ""
    raise TierError(f"{path} is not the root of an fs tier: it contains other files, and no cache{hint}")
