"""The house rules that a program can check: who imports whom, words, lengths, what ships."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kvstore"
MODULE_LINES_MAX = 500
TEST_LINES_MAX = 700
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True)
class Room:
    """What the code of one folder may import, besides the standard library and itself."""

    ours: frozenset[str]
    third_party: frozenset[str]


def room(ours: str = "", third_party: str = "") -> Room:
    """A row of the import table."""
    return Room(frozenset(ours.split()), frozenset(third_party.split()))


# The import table of the README.
ROOMS = {
    "engine_adapter": room(  # rich is for the demo
        "kvstore kernels",
        "numpy torch vllm pydantic huggingface_hub transformers tokenizers safetensors gguf "
        "accelerate rich",
    ),
    "kvstore": room(
        "prefix_index tiers",
        "numpy pydantic pydantic_core typer rich tokenizers typing_extensions "
        "grpc grpc_health grpc_reflection google cryptography prometheus_client "
        "zmq msgspec opentelemetry matplotlib starlette uvicorn",
    ),
    "prefix_index": room("", "numpy xxhash typing_extensions"),
    "tiers": room("", "numpy lmdb redis xxhash zstandard torch typing_extensions cryptography"),
    "kernels": room("", "numpy torch triton"),
}
LINKED = [name for name in ROOMS if name != PACKAGE]
# These speak for a whole library in their room: one module imports it, the others ask that one.
ONE_MODULE_A_ROOM = {
    "lmdb",
    "redis",
    "xxhash",
    "zstandard",
    "cryptography",
    "pydantic",
    "tokenizers",
    "gguf",
    "triton",
}
# The store must start without it: of the tiers, only the one whose memory is torch's imports it.
TORCH_IN_TIERS = {"tiers/device_tier.py"}
# What the store's users see is written by these; elsewhere print is a forgotten debug line.
MAY_PRINT = re.compile(r"kvstore/cli\w*\.py|engine_adapter/demo\w*\.py|bench/.*|tests/crash/.*")
# Entry points, reached by a command line and not by an import.
ENTRY_POINTS = {
    "kvstore.cli",
    "kvstore.engine_adapter.demo",
    "kvstore.engine_adapter.demo_service",
    "kvstore.engine_adapter.demo_vllm",
    "kvstore.engine_adapter.demo_vllm_worker",
    "kvstore.engine_adapter.vllm_connector",  # both are named to vLLM
    "kvstore.engine_adapter.vllm_plugin",
}

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"torch.load", "yaml.load", "np.load", "numpy.load", "joblib.load"}
LEFTOVERS = re.compile(r"\b(FIXME|TODO|XXX|HACK|breakpoint\(\)|pdb\.set_trace)\b")


def room_files(folder: str) -> list[Path]:
    """The modules of one room; not what `make proto` generates."""
    return sorted(file for file in (ROOT / folder).glob("*.py") if "_pb2" not in file.stem)


LIBRARY = [file for folder in ROOMS for file in room_files(folder)]
OTHERS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])
EVERYTHING = LIBRARY + OTHERS


def name_of(file: Path) -> str:
    """A file as messages and ids show it."""
    return file.relative_to(ROOT).as_posix()


def module_of(file: Path) -> str:
    """The name under which a library file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(part for part in parts if part != "__init__")


@cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file, parsed once."""
    return ast.parse(file.read_bytes(), filename=str(file))


def imports_of(file: Path) -> list[tuple[int, str]]:
    """Line and full name of everything a file imports, at any depth, for types or at run time."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def wrong_import(folder: str, name: str) -> str:
    """Why a room may not import a name; empty if it may."""
    top, *rest = name.split(".")
    if not top:
        return "relative imports; say kvstore..."
    if top in LINKED:
        return f"bare; say kvstore.{top}"
    if top in sys.stdlib_module_names:
        return "never: it runs code from data" if top in FORBIDDEN_MODULES else ""
    if top != PACKAGE:
        return "" if top in ROOMS[folder].third_party else "a library of another room"
    target = rest[0] if rest and rest[0] in LINKED else PACKAGE
    return "" if target in {folder, *ROOMS[folder].ours} else f"{folder} knows nothing of {target}"


@pytest.mark.parametrize("file", LIBRARY, ids=name_of)
def test_imports_run_one_way(file: Path) -> None:
    folder = file.parent.name
    wrong = [
        f"{name_of(file)}:{line}: {name}: {why}"
        for line, name in imports_of(file)
        if (why := wrong_import(folder, name))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_table_refuses_what_it_should() -> None:
    """The rules above can fail."""
    for folder, name in [
        ("tiers", "kernels.gather"),
        ("kvstore", "kernels"),
        ("kvstore", "kvstore.engine_adapter.demo"),
        ("kvstore", "kvstore.kernels"),
        ("tiers", "kvstore.prefix_index.index"),
        ("tiers", "kvstore.errors"),
        ("prefix_index", "torch"),
        ("kvstore", "torch"),
        ("prefix_index", "lmdb"),
        ("engine_adapter", "kvstore.tiers.tier"),
        ("kvstore", "lmdb"),
        ("kvstore", "pickle"),
        ("kvstore", ".spec"),
    ]:
        assert wrong_import(folder, name), (folder, name)
    for folder, name in [
        ("tiers", "kvstore.tiers.tier"),
        ("kvstore", "kvstore.tiers.tier"),
        ("engine_adapter", "kvstore.Store"),
        ("tiers", "os.path"),
    ]:
        assert not wrong_import(folder, name), (folder, name)


@pytest.mark.parametrize("file", OTHERS, ids=name_of)
def test_rooms_are_imported_through_the_package(file: Path) -> None:
    """`kernels` is also somebody else's package; ours is kvstore.kernels, in tests too."""
    bare = [name for _, name in imports_of(file) if name.split(".")[0] in LINKED]
    assert not bare, f"{name_of(file)} imports {bare}"


@pytest.mark.parametrize("folder", ROOMS)
def test_a_client_library_is_imported_in_one_module_of_a_room(folder: str) -> None:
    users: dict[str, set[str]] = {}
    for file in room_files(folder):
        for _, name in imports_of(file):
            users.setdefault(name.split(".")[0], set()).add(name_of(file))
    many = {name: files for name, files in users.items() if len(files) > 1}
    assert not {name: many[name] for name in ONE_MODULE_A_ROOM & set(many)}


def test_of_the_tiers_only_the_device_tier_imports_torch() -> None:
    users = {
        name_of(file)
        for file in room_files("tiers")
        for _, name in imports_of(file)
        if name.split(".")[0] == "torch"
    }
    assert users <= TORCH_IN_TIERS


def calls_that_run_data(file: Path) -> list[str]:
    """Calls that turn bytes into code, anywhere in a file."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FORBIDDEN_CALLS:
                found.append(f"{name_of(file)}:{node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            found.append(f"{name_of(file)}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", EVERYTHING, ids=name_of)
def test_nothing_runs_code_from_data(file: Path) -> None:
    names = {name.split(".")[0] for _, name in imports_of(file)}
    assert not names & FORBIDDEN_MODULES
    assert not calls_that_run_data(file)


@pytest.mark.parametrize("file", EVERYTHING, ids=name_of)
def test_source_is_ascii_and_short_enough(file: Path) -> None:
    content = file.read_bytes()
    assert content.isascii(), f"{name_of(file)} is not ASCII"
    lines = content.count(b"\n")
    most = TEST_LINES_MAX if name_of(file).startswith("tests/") else MODULE_LINES_MAX
    assert lines <= most, f"{name_of(file)}: {lines} lines, at most {most}"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{name_of(file)}: {node.name}: {length} lines"


@pytest.mark.parametrize("file", EVERYTHING, ids=name_of)
def test_nothing_is_left_over(file: Path) -> None:
    if file == Path(__file__).resolve():
        return
    left = [
        f"{name_of(file)}:{number}: {line.strip()}"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if LEFTOVERS.search(line)
    ]
    assert not left, "\n".join(left)


@pytest.mark.parametrize("file", LIBRARY, ids=name_of)
def test_library_code_does_not_print(file: Path) -> None:
    if MAY_PRINT.fullmatch(name_of(file)):
        return
    prints = [
        node.lineno
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("print", "pprint")
    ]
    assert not prints, f"{name_of(file)} prints in lines {prints}"


def without_docstring(file: Path) -> list[str]:
    """Public modules, classes, functions and methods that don't say what they promise."""
    found = [] if ast.get_docstring(tree_of(file)) else ["the module"]
    for node in tree_of(file).body:
        found += undocumented(node, "")
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                found += undocumented(member, node.name + ".")
    return found


def undocumented(node: ast.stmt, prefix: str) -> list[str]:
    """The name of a public definition without a docstring, if it is one.

    A method of a single statement may leave it to its name.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    if node.name.startswith("_") or ast.get_docstring(node):
        return []
    short_method = prefix and len(node.body) == 1 and not isinstance(node, ast.ClassDef)
    return [] if short_method else [prefix + node.name]


@pytest.mark.parametrize("file", OTHERS, ids=name_of)
def test_tests_and_benches_say_what_they_are(file: Path) -> None:
    assert ast.get_docstring(tree_of(file)), f"{name_of(file)} has no docstring"


def test_every_module_is_used() -> None:
    """A module that only tests import is dead; benches count as use."""
    users = [*LIBRARY, *sorted((ROOT / "bench").rglob("*.py"))]
    used = set(ENTRY_POINTS)
    for file in users:
        own = module_of(file)
        for _, name in imports_of(file):
            used |= {name, name.rpartition(".")[0]} - {own}
        text = file.read_text()
        used |= set(re.findall(r"[\"'](kvstore(?:\.\w+)+)[\"']", text)) - {own}
    dead = {module_of(file) for file in LIBRARY if file.name != "__init__.py"} - used
    assert not dead, f"no one imports {sorted(dead)}"


@pytest.mark.parametrize("folder", LINKED)
def test_rooms_hang_in_the_package_by_relative_links(folder: str) -> None:
    link = ROOT / PACKAGE / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


THIRD_PARTY = {name for each in ROOMS.values() for name in each.third_party} | {"grpc", "redis"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["prefix_index", "tiers", "kvstore"])
def test_a_room_loads_no_library_of_another(folder: str) -> None:
    """All modules of one room, in a fresh process: sys.modules holds its own libraries only."""
    rooms = [folder, *ROOMS[folder].ours]
    libraries = {name for each in rooms for name in ROOMS[each].third_party}
    if "redis" in libraries:
        libraries |= {"cryptography", "opentelemetry"}  # that client loads them where they are
    modules = [module_of(file) for file in room_files(folder)]
    loaded = fresh(f"import sys, {', '.join(modules)}\nprint(*sys.modules)").split()
    assert not {name.split(".")[0] for name in loaded} & (THIRD_PARTY - libraries)
    strangers = {f"{PACKAGE}.{name}" for name in LINKED if name not in rooms}
    assert not strangers & set(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["kvstore", "kvstore.kernels", "kvstore.engine_adapter"])
def test_importing_a_front_door_loads_no_library(module: str) -> None:
    loaded = fresh(f"import sys, {module}\nprint(*sys.modules)").split()
    assert not {name.split(".")[0] for name in loaded} & THIRD_PARTY


@pytest.mark.slow
def test_a_store_needs_no_command_line_and_no_engine() -> None:
    loaded = fresh("import sys, kvstore.store, kvstore.spec, kvstore.config\nprint(*sys.modules)")
    unneeded = {"torch", "transformers", "typer", "rich", "tokenizers"}
    assert not {name.split(".")[0] for name in loaded.split()} & unneeded


def fresh(script: str) -> str:
    """What a new interpreter prints for a script."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout


def tracked_files() -> list[str]:
    """Files of this checkout that git knows or would take; skips where there is no checkout."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files to compare with")
    command = [git, "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = set(done.stdout.split("\0")) - {""}
    return sorted(name for name in names if os.path.lexists(ROOT / name))


@pytest.mark.slow
def test_a_wheel_holds_what_is_tracked(tmp_path: Path) -> None:
    """Built from a copy of the tracked files, so that leftovers of this checkout don't count."""
    pytest.importorskip("setuptools", reason="the wheel is built offline, with setuptools here")
    files = [name for name in tracked_files() if "/" not in name or name.split("/")[0] in ROOMS]
    checkout = tmp_path / "checkout"
    for name in files:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir"]
    done = subprocess.run(
        [*command, str(tmp_path), str(checkout)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    links = {f"{PACKAGE}/{folder}" for folder in LINKED}
    expected = {name for name in files if name.split("/")[0] == PACKAGE} - links
    expected |= {f"{PACKAGE}/{name}" for name in files if name.split("/")[0] in LINKED}
    assert packed == expected
