"""`lockstep explain` explains an error from the page of errors, without a network."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click

from lockstep.errors import ConfigError, code_in

_SECTION = re.compile(r"^## (\w+)\n+(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (`.*?`) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^]]*)\]\((?!http|\.\.)([^)]*)\)")
_PLACEHOLDERS = re.compile(r"'[^']*'|[^\s,;:]*[\d/][^\s,;:]*|\.\.\.")
"""Names, numbers and paths, which differ from case to case, and parts that are left out."""


@click.command()
@click.argument("error", nargs=-1, metavar="[ERROR]")
def explain(error: tuple[str, ...]) -> None:
    """Explain an error, and say what to do.

    ERROR is the name of a class of lockstep.errors, a message, or a hint at the end of a call. Without ERROR,
    the command lists the classes.
    """
    click.echo(explanation(_page(), " ".join(error)), nl=False)


def explanation(page: str, error: str) -> str:
    """Return the text of a page of errors about a class or a message, or a list of its classes.

    A message with the name of a class is looked up among the messages of this class. If none is similar, the
    whole text about the class is returned.

    Args:
        page: the page, in Markdown.
        error: the class or the message; empty for the list.

    Raises:
        ConfigError: the page does not describe the error.
    """
    sections = {name: _LINK.sub(_named_page, text).strip() for name, text in _SECTION.findall(page)}
    if not error:
        width = max(map(len, sections))
        return "".join(f"{name:{width}}  {_first_sentence(text)}\n" for name, text in sections.items())
    for name, text in sections.items():
        if name.lower() == error.lower().removeprefix("lockstep.errors."):
            return f"{name}\n\n{text}\n"
    code = code_in(error)
    best = _closest({code: sections[code]} if code else sections, error)
    if best is None and code:
        return explanation(page, code)
    if best is None:
        raise ConfigError(
            "no message like this is known: `lockstep explain` without a message lists the classes of "
            'errors, and the page "From symptom to command" in the documentation begins with symptoms'
        )
    name, message, advice = best
    return f"{name}: {_first_sentence(sections[name])}\n\n{message}\n\n{advice}\n"


def _closest(sections: dict[str, str], message: str) -> tuple[str, str, str] | None:
    """Return the page's row whose message shares most with `message`, if at least half; else None."""
    wanted = _phrases(message)
    best, most = None, (1, 0.0)
    for candidate in _messages(sections):
        phrases = _phrases(candidate[1])
        shared = len(phrases & wanted)
        share = shared / max(1, len(phrases))
        if share >= 0.5 and (shared, share) > most:
            best, most = candidate, (shared, share)
    return best


def _messages(sections: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield each class with a message that it may have, and the advice."""
    for name, text in sections.items():
        for message, advice in _ROW.findall(text):
            yield name, message.strip("`"), advice


def _phrases(message: str) -> set[tuple[str, str]]:
    """Return the pairs of neighbouring words of a message, without words that change from case to case."""
    parts = re.split(r"[,;:()]", _PLACEHOLDERS.sub(";", message.lower()))
    return {pair for part in parts for pair in pairwise(part.split())}


def _named_page(link: re.Match[str]) -> str:
    """Return a link to another page as text, because an installed package has no pages."""
    text, page = link[1], link[2].partition(".md")[0]
    return f"{text} (see '{page}' in the documentation)" if page else text


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"(?<=\.)\s", text, maxsplit=1)[0].split())


def _page() -> str:
    """Return the page of errors, which the wheel contains as a copy."""
    packed = Path(__file__).with_name("errors.md")
    page = packed if packed.exists() else Path(__file__).parents[3] / "docs" / "errors.md"
    return page.read_text()
