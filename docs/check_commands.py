"""Run the shell commands of README.md and the tutorials in a fresh clone: `make check-docs`, or of
single pages: `python docs/check_commands.py docs/tutorials/t5.md`.

Every ```sh block runs, page by page. One after `<!-- not run: REASON -->` does not;
its reason is printed.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^(?:<!-- not run: (.*?) -->\n)?```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    """The commands of a page, each block after its name."""
    text = page.read_text()
    lines = ["set -eo pipefail", "[ ! -f .venv/bin/activate ] || . .venv/bin/activate"]
    for block in BLOCK.finditer(text):
        reason, code = block.groups()
        name = f"{page.relative_to(ROOT)}:{text[: block.start()].count(chr(10)) + 1}"
        if reason:
            lines.append(f"echo {shlex.quote(f'== {name}: not run, {reason}')}")
        else:
            lines.append(f"echo {shlex.quote(f'== {name}')}")
            lines += ["set -x", code, "{ set +x; } 2> /dev/null"]
    return "\n".join(lines)


def main() -> int:
    pages = [ROOT / name for name in sys.argv[1:]]
    pages = pages or [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
    for page in pages:
        if not page.is_file():
            print(f"{page} is not a file; expected a page, such as README.md.", file=sys.stderr)
            return 2
    clone = Path(tempfile.mkdtemp(prefix="check-docs-"))
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    failed = []
    for page in pages:
        began = time.monotonic()
        done = subprocess.run(["bash", "-c", script(page)], cwd=clone, stderr=subprocess.STDOUT)
        print(f"== {page.relative_to(ROOT)}: {time.monotonic() - began:.0f} s", flush=True)
        failed += [page.name] * (done.returncode != 0)
    if failed:
        print(f"Failed: {', '.join(failed)}; see {clone}", file=sys.stderr)
        return 1
    shutil.rmtree(clone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
