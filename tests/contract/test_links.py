"""Links between pages lead somewhere, and the commands that pages show exist with their options."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from bf16kit.converter.cli import command as convert
from bf16kit.service.cli import main as serve

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, click.Group] = {"bf16-convert": convert, "bf16-serve": serve}
_HISTORY = ("CHANGELOG.md", "tests/")  # what they say was true once
_CODE = re.compile(r"^```.*?^```|^    bf16.*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"(?:^ {,4}|`|&& |[A-Z_]=\S+ )(bf16-convert|bf16-serve|make)(?=[ `])([^\n`|;&#]*)", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages of the repository that are kept true."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split() if not name.startswith(_HISTORY) and (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def dead_links(page: Path) -> Iterator[str]:
    """Yield each relative link of a page that leads to no file, or to no heading of one."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield f"{page.name}: {link}"


def test_each_link_leads_to_a_file_and_a_heading() -> None:
    assert [link for page in pages() for link in dead_links(page)] == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Some `code`, here\n[a](#some-code-here) [b](#some-code) [c](page.md) [d](gone.md) [e](https://x/y.md)"
    )
    assert list(dead_links(page)) == ["page.md: #some-code", "page.md: gone.md"]


def test_each_decision_that_is_named_exists() -> None:
    listed = subprocess.run(
        ["git", "grep", "-hoE", r"decisions/[0-9]{4}", "--", ":!CHANGELOG.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    decisions = {page.name[:4] for page in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert {name[-4:] for name in listed.split()} <= decisions


def test_each_page_that_a_message_or_a_comment_names_exists() -> None:
    listed = subprocess.run(
        ["git", "grep", "-hoE", r"docs/[a-z0-9/-]+\.md", "--", ":!CHANGELOG.md", ":!docs/decisions"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert sorted(name for name in set(listed.split()) if not (ROOT / name).exists()) == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index] == ["index.md"]


def wrong_calls(text: str) -> Iterator[str]:
    """Yield each option, command and target in the code of ``text`` that its program does not have."""
    for code in _CODE.findall(text.replace("\\\n", " ")):
        for program, rest in _CALL.findall(code):
            words = rest.split()
            if program == "make":
                yield from (
                    f"make {word}" for word in words[:1] if re.fullmatch(r"[a-z][a-z-]+", word) and word not in TARGETS
                )
                continue
            group = PROGRAMS[program]
            command: click.Command | None = group
            if words and re.fullmatch(r"[a-z]+", words[0]):
                command = group.get_command(click.Context(group), words[0])
            if command is None:
                if code.startswith("```"):
                    yield f"{program} {words[0]}"
                continue
            known = {
                "--help",
                "--version",
                *(name for each in command.params for name in each.opts + each.secondary_opts),
            }
            options = (word.strip("[](),.").partition("=")[0] for word in words if word.lstrip("[(").startswith("--"))
            yield from (f"{program} {command.name}: {option}" for option in options if option not in known)


TARGETS = {
    *re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE),
    *(f"test-{name}" for name in re.findall(r"^suite-([a-z]+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)),
}


def test_each_command_exists_with_its_options() -> None:
    assert [(page.name, call) for page in pages() for call in wrong_calls(page.read_text("utf-8"))] == []


def test_a_wrong_option_command_or_target_is_found() -> None:
    text = (
        "```\nbf16-serve --port 1 --repository r\nbf16-convert chekpoint x\n```\n`bf16-serve check --gpu` `make demoo`"
    )
    assert list(wrong_calls(text)) == [
        "bf16-serve main: --port",
        "bf16-convert chekpoint",
        "bf16-serve check: --gpu",
        "make demoo",
    ]
