"""`kvctl install-files`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvctl.cli.man import man_pages, plain_page
from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError, NotPermitted
from kvctl.views.output import show
from kvctl.views.setting_up.install_files import InstalledFile, InstalledFiles
from kvd.installed import own_version
from kvd.shipped import shipped

if TYPE_CHECKING:
    from kvctl.cli.loading import LazyGroup

SECTION = "Set up"
EXAMPLES = (
    "kvctl install-files --dry-run -o wide",
    "kvctl install-files",
)
PREFIX = Path("/usr/local")
COMPLETIONS = {
    "kvctl.bash": "share/bash-completion/completions/kvctl",
    "_kvctl": "share/zsh/site-functions/_kvctl",
    "kvctl.fish": "share/fish/vendor_completions.d/kvctl.fish",
}
"""Scripts of completion, and where shells look for them below a prefix."""


def install_files(
    settings: Settings,
    context: typer.Context,
    *,
    prefix: Annotated[
        Path, typer.Option("--prefix", metavar="DIR", help=f"Where they go. [{PREFIX}]", show_default=False)
    ] = PREFIX,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="Put all below DIR, as a package is built.")
    ] = None,
    programs: Annotated[
        Path | None,
        typer.Option("--programs", metavar="DIR", help="Where kvd and kvctl are. [where this kvctl is]"),
    ] = None,
) -> None:
    """Put unit, man pages, completions and documentation where the host looks for them.

    pip leaves them inside of the package. Links to kvd and kvctl are made in PREFIX/bin. A file that is there already
    is replaced, a program that is no link is left alone. For user, keys and settings there is `kvd init`.
    """
    where = programs or Path(sys.executable).parent
    base = Path(root, *prefix.absolute().parts[1:]) if root else prefix
    group = cast("LazyGroup", context.find_root().command)
    files = [_written(base / place, text, dry_run) for place, text in _files(group, where)]
    if where != prefix / "bin":
        files += [_linked(base / "bin" / name, where / name, dry_run) for name in ("kvctl", "kvd")]
    show(InstalledFiles(prefix=str(prefix), dry_run=dry_run, files=tuple(files)), settings)


def _files(group: LazyGroup, programs: Path) -> Iterator[tuple[str, str]]:
    """Each file's place below the prefix, and what stands in it."""
    version = own_version()
    for name, page in man_pages(group, version).items():
        yield f"share/man/man1/{name}", page
    yield "share/man/man8/kvd.8", _page_of_kvd(version)
    for name, place in COMPLETIONS.items():
        yield place, (shipped("completions") / name).read_text(encoding="utf-8")
    docs = shipped("docs")
    for path in sorted(docs.rglob("*.md")):
        yield f"share/doc/kvctl/{path.relative_to(docs)}", path.read_text(encoding="utf-8")
    yield "share/doc/kvctl/examples/kvd.yaml", shipped("kvd.yaml").read_text(encoding="utf-8")
    unit = (shipped("systemd") / "kvd.service").read_text(encoding="utf-8")
    yield (
        "lib/systemd/system/kvd.service",
        unit.replace("\nExecStart=/usr/bin/env kvd\n", f"\nExecStart={programs}/kvd\n"),
    )


def _page_of_kvd(version: str) -> str:
    """What kvd tells of its flags itself: kvctl does not import it."""

    def told(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvd.service", *words, "--help"],
            env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise KvctlError(f"kvd --help failed: {done.stderr.strip()}", "install kvd anew")
        return done.stdout

    return plain_page(
        "kvd", 8, "control plane of KV cache transfer between vLLM engines", version,
        [("kvd", told()), ("kvd init", told("init"))],
    )  # fmt: skip


def _written(path: Path, text: str, dry_run: bool) -> InstalledFile:
    try:
        before = path.read_bytes() if path.is_file() else None
        data = text.encode()
        if before == data:
            return InstalledFile(path=str(path), state="unchanged")
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            # What reads it meanwhile, systemd for one, sees the old one or the new one.
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), 0o644)
            Path(name).replace(path)
    except OSError as error:
        raise _failed(path, error) from None
    return InstalledFile(path=str(path), state="made" if before is None else "replaced")


def _linked(path: Path, target: Path, dry_run: bool) -> InstalledFile:
    try:
        if path.is_symlink():
            if path.readlink() == target:
                return InstalledFile(path=str(path), state="unchanged")
        elif path.exists():
            return InstalledFile(
                path=str(path), state="left", reason=f"it is no link, {target} was to be there"
            )
        before = path.is_symlink()
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(target)
    except OSError as error:
        raise _failed(path, error) from None
    return InstalledFile(path=str(path), state="replaced" if before else "made")


def _failed(path: Path, error: OSError) -> KvctlError:
    kind = NotPermitted if isinstance(error, PermissionError) else KvctlError
    return kind(f"cannot write {path}: {error.strerror}", "be root, or give a --prefix that is yours")
