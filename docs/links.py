"""Checks a folder of HTML: each link and picture within it, and each heading that a link names, must exist."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and what it points to."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.update(attributes[name] for name in ("id", "name") if attributes.get(name))
        self.targets += [attributes[name] for name in ("href", "src") if attributes.get(name)]


folder = Path(sys.argv[1]).resolve()
# The page for printing has all pages again, and the page of errors has the address of a site.
files = [file for file in sorted(folder.rglob("*.html")) if file.name not in ("print.html", "404.html", "toc.html")]
pages = {file: Page(file.read_text(encoding="utf-8")) for file in files}
wrong, count = [], 0
for file, page in pages.items():
    for target in page.targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        count += 1
        path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            wrong.append(f"{file.relative_to(folder)}: {target}: no such file")
        elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].ids:
            wrong.append(f"{file.relative_to(folder)}: {target}: no such heading")
print("\n".join(sorted(set(wrong))) or f"docs: {count} links of {len(pages)} pages exist")
sys.exit(bool(wrong) or not count)
