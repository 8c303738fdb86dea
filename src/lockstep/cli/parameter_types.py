"""Types of options and arguments of commands."""

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from lockstep.errors import ConfigError
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths, is_recorded
from lockstep.system.prose import printable

MOST_PARTS = 4096
"""The most workers or replicas of a job."""
PARTS = click.IntRange(min=1, max=MOST_PARTS)
"""The range of the number of workers or replicas."""
SEEDS = click.IntRange(min=0, max=2**63 - 1)
"""The range of seeds."""
LARGEST_LIMIT = 10**9
"""The largest number of seconds, or of times, that an option takes."""

_LONGEST_TAG = 100


class RealNumber(click.FloatRange):
    """A number; rejects `nan`, which click accepts in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Folder(click.Path):
    """A folder of this machine; rejects the empty path, which would mean the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail."""
        if not os.fspath(value):
            self.fail("the path is empty; name a folder, such as ./folder.", param, ctx)
        if "://" in os.fsdecode(value):
            self.fail(f"{os.fsdecode(value)} is not a folder of this machine.", param, ctx)
        return super().convert(value, param, ctx)


class FolderOrUrl(Folder):
    """A folder of this machine, or the URL of a prefix in an object store, as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path or the URL, or fail."""
        from lockstep.checkpoint.object_store import is_url, parse_url

        if not is_url(value):
            return super().convert(value, param, ctx)
        try:
            return parse_url(os.fsdecode(value))
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


class Run(click.types.StringParamType):
    """A run of this machine, or the URL of one in an object store, which is fetched for the command."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text, or the path of the folder in which the run is until the command ends."""
        from lockstep.checkpoint.object_store import is_url, parse_url
        from lockstep.checkpoint.run_upload import fetch_run
        from lockstep.observability.run_lines import happening

        text = super().convert(value, param, ctx)
        if not is_url(text) or ctx is None or ctx.resilient_parsing:
            return text
        url = parse_url(text)
        name = url.rpartition("/")[2]
        if name in ("", ".", ".."):
            raise ConfigError(f"there is no run in {url}")
        above = ctx.with_resource(tempfile.TemporaryDirectory(prefix="lockstep-run-"))
        folder = Path(above, name)
        folder.mkdir()
        fetch_run(url, folder, is_recorded)
        last = happening(RunPaths(folder).events.read_bytes().rstrip(b"\n").rpartition(b"\n")[2])
        if last is None or last.event != "finished":
            note(f"the end of the run is not in {url}: it is shown as it was uploaded last")
        return str(folder)


class Tag(click.types.StringParamType):
    """A word for a run; rejects characters that a table cannot show."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the tag, or fail."""
        tag = super().convert(value, param, ctx)
        if not tag.strip() or len(tag) > _LONGEST_TAG or not tag.isprintable() or "," in tag:
            self.fail(
                f"{printable(tag)!r}: give 1 to {_LONGEST_TAG} printable characters without a comma.",
                param,
                ctx,
            )
        return tag
