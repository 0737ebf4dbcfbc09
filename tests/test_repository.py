"""The house keeps its own rules: imports point down, files stay small, nothing of one machine is in the files."""

import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import diffusiongemma

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "diffusiongemma"
TOP = "(top)"  # __init__.py and __main__.py, which may use everything
STATIONS = [TOP, "cli", "serve", "bench", "train", "tasks", "engine", "text", "diffusion", "checkpoint", "model", "ops"]
STATIONS += ["config", "errors"]  # the floor
NAMES = {"__version__"}  # what any module may take from the package itself
PARTS = (".ci", "docs", "recipes", "scripts", "src", "tests")
TOP_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "README.md", "pyproject.toml", "requirements.lock")


def station_of(module: str) -> str:
    """diffusiongemma.model.cache -> model"""
    parts = module.split(".")
    return TOP if len(parts) == 1 or parts[1] in ("__init__", "__main__") else parts[1]


def height(station: str) -> int:
    assert station in STATIONS, f"{station} is no station of docs/architecture.md"
    return -STATIONS.index(station)


def imported(source: str) -> Iterator[tuple[str, bool]]:
    """Every imported module as (dotted name, at module level), wherever in the file it is imported."""
    tree = ast.parse(source)
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in inner


def upward_imports(module: str, source: str) -> list[str]:
    own = station_of(module)
    if own == TOP:
        return []
    wrong = []
    for name, _ in imported(source):
        parts = name.split(".")
        if parts[0] != "diffusiongemma" or (len(parts) == 2 and parts[1] in NAMES):
            continue
        # `from diffusiongemma import ModelConfig` reaches as high as the module that the name comes from.
        target = station_of(diffusiongemma._EXPORTS.get(parts[1], name) if len(parts) > 1 else name)
        if target != own and height(target) > height(own):
            wrong.append(f"{module} ({own}) imports {name} ({target})")
    return wrong


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def tracked_files() -> list[Path]:
    """What git knows; without git, or where it distrusts the owner of the folder, what an unpacked archive holds.

    Nothing else: whoever runs the tests may leave a log beside them, and that says where it is.
    """
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    if listing is not None and listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    found = [f for name in PARTS for f in (ROOT / name).rglob("*") if f.is_file()]
    found += [ROOT / name for name in TOP_FILES if (ROOT / name).is_file()]
    return [f for f in found if "__pycache__" not in f.parts and ".egg-info" not in str(f)]


def test_imports_point_down() -> None:
    wrong = [line for file in modules() for line in upward_imports(dotted(file), file.read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "from diffusiongemma.checkpoint import load_model",
        "import diffusiongemma.cli.inspect",
        "def f():\n    from diffusiongemma import load_model",
        "import diffusiongemma",
    ],
)
def test_an_upward_import_is_noticed(source: str) -> None:
    assert len(upward_imports("diffusiongemma.model.network", source)) == 1


def test_downward_imports_are_fine() -> None:
    source = "import torch\nfrom diffusiongemma import ModelConfig, __version__\nfrom diffusiongemma.ops import norm"
    assert upward_imports("diffusiongemma.model.network", source) == []


def test_transformers_is_not_on_the_run_time_path() -> None:
    """Only `bench/` may import it, inside the function that compares with it."""
    wrong = []
    for file in modules():
        for name, at_top in imported(file.read_text(encoding="utf-8")):
            if name.split(".")[0] == "transformers" and (at_top or station_of(dotted(file)) != "bench"):
                wrong.append(f"{dotted(file)} imports {name}")
    assert wrong == []


def test_nothing_unpickles() -> None:
    names = {name.split(".")[0] for file in modules() for name, _ in imported(file.read_text(encoding="utf-8"))}
    assert not names & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert not [f for f in modules() if re.search(r"\btorch\.load\(", f.read_text(encoding="utf-8"))]


def test_files_stay_small() -> None:
    lines = {dotted(f): len(f.read_text(encoding="utf-8").splitlines()) for f in modules()}
    assert {m: n for m, n in lines.items() if n > (400 if station_of(m) == "model" else 500)} == {}


MACHINE = re.compile(r"(?<![\w.~/])/(?:work|root|opt|home|Users|mnt)/\w")
REGISTRY = re.compile(r"pypi\.(?:org|python)|pythonhosted\.|download\.pytorch\.|(?:index-url|find-links)[ =]+\S*[/.]")


def test_no_path_or_registry_of_one_machine() -> None:
    wrong = []
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if file == Path(__file__):
            continue  # holds the patterns
        wrong += [f"{file.relative_to(ROOT)}: {m[0]}" for p in (MACHINE, REGISTRY) for m in p.finditer(text)]
    assert wrong == []


def test_without_git_the_same_files_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {file for file in tracked_files() if file.name[0] != "." and file.name != "LICENSE"}
    monkeypatch.setenv("GIT_DIR", str(ROOT / "no-such-folder"))
    assert known <= set(tracked_files())


def test_patterns_would_find_them() -> None:
    assert MACHINE.search("open('/home/me/x')")
    assert not MACHINE.search("src/work/x and https://host/opt/x")
    assert REGISTRY.search("--extra-index-url https://x")
    assert REGISTRY.search("files.pythonhosted.org")


def test_two_commands_and_continuous_integration() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("run", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE)
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111, ".ci/run must be executable"
    assert "make test" in ci.read_text(encoding="utf-8")


def test_package_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == diffusiongemma.__version__
    assert "torch>=2.11,<2.14" in project["dependencies"]  # an open range would pull another CUDA on top of the old one
    assert not any(name.startswith("transformers") for name in project["dependencies"])


def test_public_names() -> None:
    assert set(diffusiongemma.__all__) == {*diffusiongemma._EXPORTS, "__version__"}
    for name in diffusiongemma.__all__:
        assert getattr(diffusiongemma, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = diffusiongemma.no_such_name


def test_documents_link_to_files_that_exist() -> None:
    broken = []
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")):
            if "://" not in target and not (file.parent / target).exists():
                broken.append(f"{file.relative_to(ROOT)} -> {target}")
    assert broken == []
