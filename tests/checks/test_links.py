"""Every relative link of the Markdown files leads to a file, and to a heading of it if it has an anchor."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *(```+)[^\n]*\n.*?^ *\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\(\s*([^)\s#]*)(?:#([^)\s]*))?\s*\)")


@cache
def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings: a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for name, anchor in LINK.findall(CODE.sub("", prose(page))):
            target = (page.parent / name).resolve() if name else page
            inside = target.is_file() and target.is_relative_to(ROOT)
            if ":" not in name and not (inside and (not anchor or anchor in anchors(target))):
                wrong.append(f"{page.name}: {name}#{anchor}")
    assert wrong == []


def test_the_pages_link_to_one_another() -> None:
    """Otherwise the test above would find nothing."""
    found = [link for page in PAGES for link in LINK.findall(CODE.sub("", prose(page)))]
    assert len(found) > 100
    assert sum(1 for _, anchor in found if anchor) > 20


def test_the_navigation_of_the_site_has_every_page() -> None:
    navigation = (ROOT / "docs" / "site" / "conf.py").read_text()
    home = ROOT / "README.md"
    names = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES if page != home}
    assert {name for name in names if f'"{name}"' not in navigation} == set()
