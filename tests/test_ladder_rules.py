"""Rules that hold for the tree as a whole, read from its files."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kda_lab import native, registry
from kda_lab.profiling import recorded

ROOT = Path(__file__).resolve().parents[1]


def tracked(*patterns: str) -> list[Path]:
    """Files under version control that match the patterns."""
    command = ["git", "ls-files", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def readme_table():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tools" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_registry_is_what_the_library_reports():
    library = native.load("cpu").steps
    assert [(s.number, s.slug, s.devices) for s in registry.steps()] == [(s.number, s.slug, s.devices) for s in library]


def test_registry_is_what_steps_def_lists():
    text = re.sub(r"//[^\n]*", "", (native.csrc_dir() / "steps.def").read_text(encoding="utf-8"))
    listed = re.findall(r"KDA_STEP\((\d+), (\w+), ([\w| ]+),", text)
    bits = {"KDA_DEVICE_CPU": "cpu", "KDA_DEVICE_CUDA": "cuda"}
    expected = [(int(n), slug, tuple(bits[name.strip()] for name in devices.split("|"))) for n, slug, devices in listed]
    assert expected
    assert [(step.number, step.slug, step.devices) for step in registry.steps()] == expected


@pytest.mark.parametrize(("device", "suffix"), [("cpu", ".cpp"), ("cuda", ".cu")])
def test_every_step_has_its_file_and_every_file_its_step(device, suffix):
    here = [step for step in registry.steps() if device in step.devices]
    assert [step.sources[device][0].name for step in here] == [f"{step.number}_{step.slug}{suffix}" for step in here]
    assert set(tracked(f"csrc/{device}/steps/*")) == {path for step in here for path in step.sources[device]}


def test_every_part_of_a_step_is_compiled_with_it():
    for step in registry.steps():
        for main, *parts in step.sources.values():
            text = main.read_text(encoding="utf-8")
            assert all(f'#include "{step.name}/{part.name}"' in text for part in parts), main.name


def test_readme_shows_the_ladder_as_it_is():
    """Number, linked name, idea and devices of every step; the measured columns are `tools/readme_table.py`'s."""
    module = readme_table()
    readme = module.README.read_text(encoding="utf-8")
    table = readme.split(module.BEGIN)[1].split(module.END)[0]
    rows = [line.strip("|").split("|")[:4] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert [[cell.strip() for cell in row] for row in rows] == module.names()
    assert re.search(r"Measured on .+, \d{4}-\d\d-\d\d, commit \w+", table)
    assert table.strip().endswith("\n".join(module.recorded_tables()))


def test_readme_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_readme_maps_every_lesson():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in tracked("notebooks/*.ipynb"):
        assert f"(notebooks/{path.name})" in readme, path.name


def test_readme_table_is_rewritten_in_place():
    module = readme_table()
    row = {"step": 1, "median_ms": 30.0, "error_rms": 1e-3, "B": 1, "T": 2, "H": 3, "K": 4, "V": 5}
    machine = {"cpu": "a CPU", "threads": 2, "date": "2026-01-02", "commit": "abc"}
    table = module.render({"rows": [row, row | {"step": 2, "median_ms": 10.0}], "machine": machine})
    lines = table.splitlines()
    assert lines[3].endswith("| 1.0e-03 | 30.0 |  |")
    assert lines[4].endswith("| 1.0e-03 | 10.0 | 3.0 |")
    assert "not measured" in lines[2]
    assert "a CPU, 2 threads, 2026-01-02, commit abc: B 1, T 2, H 3, K 4, V 5" in table
    text = f"before\n{module.BEGIN}\nold\n{module.END}\nafter"
    assert module.rewrite(text, "new") == f"before\n{module.BEGIN}\nnew\n{module.END}\nafter"


def test_readme_table_of_a_recording_without_the_published_kernel(tmp_path):
    module, shipped = readme_table(), recorded.load()
    content = shipped.ladder()
    for part in (content, content["short_calls"]):
        part["rows"] = [row for row in part["rows"] if row.get("peer") != "flash_kda"]
    (tmp_path / "ladder.json").write_text(json.dumps(content))
    lines = module._recorded_table(recorded.load(tmp_path))
    assert "FlashKDA not measured" in lines[-1].replace("\n", " ")
    (shape,) = (line for line in lines if line.startswith("| T 8192, H 96 |"))
    assert shape.endswith(" | not measured | not measured |")


FAST_MATH = re.compile(
    r"-?-(use_)?fast[_-]math|-ffast-math|-Ofast|-ffinite-math|-funsafe-math|-fassociative-math|fp-model"
)


def test_no_fast_math_anywhere_in_the_build():
    """The flag would turn step 1 into step 2. Comments may speak of it."""
    paths = tracked("csrc", "kda_lab/native", "Makefile", "pyproject.toml", "tools", ".ci/run")
    assert len(paths) > 20
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = re.sub(r"(//|#(?!pragma)).*", "", line)
            assert not FAST_MATH.search(code), f"{path.relative_to(ROOT)}:{number}: {line}"
            assert not re.search(r"pragma.*(fast-math|fast_math)", line), f"{path.relative_to(ROOT)}:{number}: {line}"


# Who may import whom: a module imports only from its own layer or one above. Data flows one way: inputs to notebooks.
LAYERS = (
    ("native", "arguments", "inputs", "annotate", "compare", "sandbox"),
    ("registry", "reference", "rounding", "call_plan"),
    ("ops", "sass", "dataflow"),
    ("numeric_range", "bench", "microbench", "peers"),
    ("profiling", "doctor"),
    ("record", "claims", "expforms", "own_step", "plots"),
    ("show",),
    ("controls", "quiz", "profiling.figures", "profiling.sass_view"),
    ("widgets", "magics", "exercises", "profiling.explorer", "profiling.views"),
    ("grade", "book"),
    ("tour",),
    ("cli",),
)
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def layer(module: str) -> int:
    """The layer of "profiling.ncu" or "plots_gpu": its own if it has one, else that of "profiling" or "plots"."""
    name = module
    while name not in LAYER:
        name = re.sub(r"[._]?[^._]*$", "", name)
        assert name, f"kda_lab.{module} has no layer: say in this test where it stands"
    return LAYER[name]


def imports_of(path: Path) -> set[str]:
    """Modules of kda_lab, by their names inside it, that the file imports anywhere but under `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = ROOT / node.module.replace(".", "/")
            submodules = {alias.name for alias in node.names if (module / f"{alias.name}.py").exists()}
            submodules |= {alias.name for alias in node.names if (module / alias.name / "__init__.py").exists()}
            found |= {f"{node.module}.{name}" for name in submodules} or {node.module}
    return {name.removeprefix("kda_lab.") for name in found if name.startswith("kda_lab.")}


def test_imports_point_one_way():
    seen = 0
    for path in tracked("kda_lab/*.py"):
        parts = path.relative_to(ROOT / "kda_lab").with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for imported in imports_of(path) if module else ():
            assert layer(imported) <= layer(module), (
                f"kda_lab.{module} imports kda_lab.{imported}, which stands after it"
            )
            seen += 1
    assert seen > 40


def test_the_core_needs_no_notebook_package():
    code = (
        "import sys\n"
        "missing = ('nvtx', 'ipywidgets', 'jupyterlab', 'matplotlib', 'pandas', 'IPython')\n"
        "sys.modules |= dict.fromkeys(missing)  # None makes an import of it fail\n"
        "import kda_lab\n"
        "from kda_lab import bench, cli, compare, doctor, inputs, numeric_range, ops, reference, registry, rounding\n"
        "kda_lab.forward(inputs.make_inputs(T=17), step=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_notebooks_are_committed_without_outputs():
    notebooks = tracked("*.ipynb")
    assert notebooks
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert "widgets" not in notebook["metadata"], path.name
        for cell in notebook["cells"]:
            assert not cell.get("outputs"), path.name
            assert cell.get("execution_count") is None, path.name


def test_no_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.$}])/(work|home|Users|root)/\w")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"


def test_csrc_never_ends_the_process():
    """An error in a library is a status and a text; nothing else ends a user's notebook."""
    for path in (path for path in tracked("csrc") if path.suffix in {".cpp", ".cu", ".cuh", ".h"}):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"(?<![\w.])(exit|abort|assert|terminate)\s*\(", code), path.name
