"""The built assets match their sources, with or without Node."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polyhead.inspection.vocabulary.role_names import ROLE_ORDER

ROOT = Path(__file__).resolve().parents[2]
FRONTEND = ROOT / "frontend"
ASSETS = ROOT / "src" / "polyhead" / "report" / "assets"
CONFIGURATION = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")
LARGEST_SCRIPT = 600_000

pytestmark = pytest.mark.skipif(not FRONTEND.is_dir(), reason="the front end's sources are in a checkout only")


def sources_of(bundle: str) -> list[Path]:
    """Return all files that a bundle can depend on: configuration, shared sources and its own folder."""
    source = FRONTEND / "src"
    found = [*source.glob("*"), *(source / "parts").rglob("*"), *(source / bundle).rglob("*")]
    return [*(FRONTEND / name for name in CONFIGURATION), *(path for path in found if path.is_file())]


def digest_of(bundle: str) -> str:
    """Return the digest that build.mjs writes at the top of a bundle."""
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(FRONTEND).as_posix() for path in sources_of(bundle)):
        content = (FRONTEND / name).read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def bundles() -> list[str]:
    """Return the script and the style sheet of each folder of src/ with a main.tsx."""
    return sorted(f"{main.parent.name}{end}" for main in FRONTEND.glob("src/*/main.tsx") for end in (".js", ".css"))


def test_page_bundle_exists():
    assert {"page.js", "page.css"} <= set(bundles())


@pytest.mark.parametrize("name", bundles())
def test_assets_were_built_from_these_sources(name):
    banner = (ASSETS / name).read_text(encoding="utf-8").split("\n", 1)[0]
    found = re.search(r"built by \"make frontend\" from sources ([0-9a-f]{64})", banner)
    assert found, f"{name} must begin with the digest of its sources, got {banner[:100]!r}"
    assert found[1] == digest_of(Path(name).stem), f"{name} is older than its sources; `make frontend` builds it"


def test_every_role_has_two_colours_of_its_own():
    text = (FRONTEND / "src" / "parts" / "colour.ts").read_text(encoding="utf-8")
    colours = re.findall(r'^  "?([\w-]+)"?: \["(#\w{6})", "(#\w{6})"\],$', text, re.MULTILINE)
    assert tuple(name for name, _, _ in colours) == ROLE_ORDER
    for shades in list(zip(*colours, strict=True))[1:]:
        assert len(set(shades)) == len(ROLE_ORDER)


@pytest.mark.parametrize("name", bundles())
def test_assets_can_be_inlined(name):
    """They contain nothing that ends their element, uses the network, or evaluates text."""
    text = (ASSETS / name).read_text(encoding="utf-8")
    assert len(text) < LARGEST_SCRIPT
    for markup in ("</script", "</style", "<!--", "\r", "\0"):
        assert markup not in text.lower()
    if name.endswith(".js"):
        assert not re.search(r"\beval\(|\bFunction\(|\bimport\(|sourceMappingURL", text)
    else:
        assert "@import" not in text
        assert "url(" not in text
        assert "http" not in text


def test_licences_of_bundled_packages_are_listed():
    package = json.loads((FRONTEND / "package.json").read_text(encoding="utf-8"))
    sources = {path for name in bundles() for path in sources_of(Path(name).stem) if path.suffix in (".ts", ".tsx")}
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    text = (ASSETS / "LICENSES.txt").read_text(encoding="utf-8")
    imported = {name: version for name, version in package["dependencies"].items() if f'from "{name}"' in code}
    assert {"preact", "@observablehq/plot"} <= set(imported)
    for name, version in imported.items():
        assert re.search(rf"^{re.escape(name)} {re.escape(version)} \(", text, re.MULTILINE), name
    assert text.count("Copyright") >= len(imported)


def test_versions_are_exact_and_locked():
    package = json.loads((FRONTEND / "package.json").read_text(encoding="utf-8"))
    lock = json.loads((FRONTEND / "package-lock.json").read_text(encoding="utf-8"))
    wanted = {**package["dependencies"], **package["devDependencies"]}
    for name, version in wanted.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), f"{name} must be pinned, got {version}"
        locked = lock["packages"][f"node_modules/{name}"]
        assert locked["version"] == version
    assert all("integrity" in entry for path, entry in lock["packages"].items() if path)


def test_every_string_exists_in_both_languages():
    text = (FRONTEND / "src" / "parts" / "strings.ts").read_text(encoding="utf-8")
    text = re.sub(r'"\s*\+\s*"', "", text)  # long strings span several lines
    entries = re.findall(r"(\w+): \{\s*en:\s*\"((?:[^\"\\]|\\.)*)\",\s*zh: \"((?:[^\"\\]|\\.)*)\",?\s*\}", text)
    assert len(entries) == len(re.findall(r"\ben:\s*\"", text)) > 100
    for name, english, chinese in entries:
        has_words = re.search("[a-z]", re.sub(r"\{\w+\}", "", english))
        assert not has_words or re.search("[\u4e00-\u9fff]", chinese), f"{name} must be Chinese, got {chinese!r}"
        places = [sorted(re.findall(r"\{\w+\}", words)) for words in (english, chinese)]
        assert places[0] == places[1], f"{name} must fill in the same values in both languages"


def test_a_rebuild_gives_the_same_bytes(tmp_path):
    node = shutil.which("node")
    if node is None or not (FRONTEND / "node_modules" / "esbuild").is_dir():
        pytest.skip("needs Node.js and its packages: `make frontend` makes them run")
    subprocess.run([node, "build.mjs", str(tmp_path)], cwd=FRONTEND, check=True, capture_output=True, timeout=120)
    for name in (*bundles(), "LICENSES.txt"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes(), f"`make frontend` writes another {name}"
