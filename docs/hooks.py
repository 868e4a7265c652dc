"""Adds the documents outside docs/ to the site. mkdocs calls these functions, as mkdocs.yml says.

README.md and others stand at the root of the repository, where readers look for them. Links follow the tree
of the repository: `docs/api.md` from the root, `../ARCHITECTURE.md` from a page. In the site docs/ is the
root, so the links are rewritten while the site is built.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

OUTSIDE = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/goldens/README.md",
    "Dockerfile",
    "benchmarks/results/card.json",
)
"""Files outside docs/ that pages link to: paths from the root of the repository, and in the site."""

_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: "Files", *, config: "MkDocsConfig") -> None:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    for path in OUTSIDE:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Rewrite the links of a page."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, place: str) -> str:
    """The text of a page with the links of the site.

    Arguments:
    - `markdown`: the text of the page in the repository.
    - `place`: the path of the page in the site.
    """
    in_repository = posixpath.dirname(place if place in OUTSIDE else f"docs/{place}")

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, link[1]))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(place) or ".")

    return _LINK.sub(in_site, markdown)
