"""The rules of the house that a reader of one file cannot see: who may import whom, and what no file may do.

Each rule is a function from one source file to the breaches in it. It is applied to every file of the package, and to
a few lines that break it, so that a rule that sees nothing is noticed.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ultrascale"

ORDER = (
    "config", "mesh", "comm", "precision", "kernels", "parallel", "models", "pipeline", "optim", "data", "checkpoint",
    "observe", "assembly", "step", "description", "wishes", "trainer", "planner", "verify", "generation",
    "generation_command", "reshard", "checkpoint_command", "train", "cli",
)  # fmt: skip
"""A package or module imports only what stands before it."""

DYNAMIC = {
    "cli.py": "the module of the one command that was asked for",
    "config/collect.py": "every package's check.py",
    "models/family.py": "a family by its name",
}
"""Files that may import a module by a name that is only known when they run, and which."""

NEEDS_TORCH = (
    "checkpoint/background.py", "checkpoint/first_weights.py", "checkpoint/read.py", "checkpoint/snapshots.py",
    "checkpoint/state.py", "checkpoint/write.py",
    "comm/agreement.py", "comm/collectives.py", "comm/differentiable.py", "comm/group.py", "comm/p2p.py",
    "comm/process_groups.py", "comm/turns.py",
    "kernels/attention", "kernels/grouped_gemm.py", "kernels/private_torch.py", "kernels/reference.py",
    "models/batch.py", "models/deepseek.py", "models/head.py", "models/llama.py", "models/mixtral.py", "models/mla.py",
    "models/moe.py", "models/mtp.py", "models/qwen3.py", "models/qwen3_moe.py", "models/rope.py", "models/stage.py",
    "models/transformer.py",
    "optim/adamw.py", "optim/algorithm.py", "optim/muon.py", "optim/offload.py", "optim/optimizer.py",
    "optim/segments.py", "optim/sgd.py", "optim/whole_matrices.py",
    "parallel/buckets.py", "parallel/context/attention.py", "parallel/context/gather.py", "parallel/context/ring.py",
    "parallel/context/ulysses.py", "parallel/cross_entropy.py", "parallel/experts/all_gather.py",
    "parallel/experts/all_to_all.py", "parallel/experts/capacity.py", "parallel/experts/deep_ep.py",
    "parallel/experts/dispatch.py", "parallel/experts/dispatchers.py", "parallel/experts/grouped.py",
    "parallel/experts/jitter.py", "parallel/experts/load.py", "parallel/experts/router.py",
    "parallel/experts/weighted_sum.py", "parallel/gradients.py",
    "parallel/init.py", "parallel/module.py", "parallel/objective.py", "parallel/passes.py", "parallel/reduction.py",
    "parallel/replicas.py", "parallel/store.py", "parallel/tensor.py", "parallel/weights.py",
    "parallel/whole_tokens.py",
    "pipeline/engine.py",
    "precision/policy.py",
    "assembly.py", "description.py", "generation.py", "reshard.py", "step.py", "trainer.py",
)  # fmt: skip
"""Every other file answers without torch: configs, plans, schedules, token files, manifests, commands."""

LINES = 600


@dataclass(eq=False)
class Source:
    """One file, or lines that claim to be one; `path` is relative to the package."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        return "ultrascale." + self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def unit(self) -> str:
        """The part of ORDER that it belongs to."""
        return self.path.split("/")[0].removesuffix(".py")


SOURCES = [Source(str(path.relative_to(PACKAGE)), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]

Breaches = Iterator[tuple[int, str]]
"""(line, what is wrong)"""
RULES: dict[str, Callable[[Source], Breaches]] = {}


def rule(function: Callable[[Source], Breaches]) -> Callable[[Source], Breaches]:
    RULES[function.__name__] = function
    return function


def imported(source: Source, node: ast.AST) -> list[str]:
    """Full names that an import statement reaches, relative ones resolved."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
    return [f"{base}.{alias.name}" for alias in node.names]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def aliases(source: Source) -> dict[str, str]:
    """Local name → full name, of everything that is imported anywhere in the file."""
    found: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
            found |= dict(zip(names, imported(source, node), strict=True))
    return found


@cache
def reached(source: Source) -> list[tuple[int, str]]:
    """(line, full name) of every import and of every attribute chain that begins at an imported name."""
    names, found = aliases(source), []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.stmt):
            found += [(node.lineno, name) for name in imported(source, node)]
        first, dot, rest = dotted(node).partition(".")
        if isinstance(node, ast.expr) and first in names:
            found.append((node.lineno, names[first] + dot + rest))
    return found


@rule
def imports_go_down_the_order(source: Source) -> Breaches:
    """Types count too: a signature that names a later package's class depends on it, whenever it is imported."""
    if source.unit == "__init__":
        return
    if source.unit not in ORDER:
        yield 1, f"{source.unit} has no place in the order {' '.join(ORDER)}; give it one"
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.stmt):
            continue
        for name in imported(source, node):
            parts = name.split(".")
            if parts[0] != "ultrascale" or len(parts) < 2 or parts[1] == source.unit:
                continue
            if parts[1] not in ORDER or ORDER.index(parts[1]) > ORDER.index(source.unit):
                yield node.lineno, f"{source.unit} imports {name}, which does not stand before it"


@rule
def names_are_imported_in_sight(source: Source) -> Breaches:
    """An import by a computed name hides from the rule above; who needs one is listed, with what it imports."""
    for line, name in reached(source):
        if name == "importlib.import_module" and source.path not in DYNAMIC:
            yield line, f"{name}: imports by name are for {', '.join(DYNAMIC)}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "__import__":
            yield node.lineno, "__import__"


@rule
def package_files_are_empty(source: Source) -> Breaches:
    if source.path.endswith("__init__.py") and source.text.strip():
        yield 1, "an __init__.py runs whenever anything below it is imported; keep it empty"


@rule
def collectives_go_through_comm(source: Source) -> Breaches:
    """So that the ledger sees every call. Who is outside may start and end the job, and ask whether it runs."""
    allowed = {"init_process_group", "destroy_process_group", "is_initialized", "is_available"}
    if source.unit == "comm":
        return
    for line, name in reached(source):
        if name.startswith("torch.distributed.") and name.split(".")[2] not in allowed:
            yield line, f"{name}: call it through ultrascale.comm"


@rule
def nothing_is_unpickled(source: Source) -> Breaches:
    """What can run code when it is read is neither a checkpoint nor a message."""
    for line, name in reached(source):
        library = name.split(".")[0]
        if name in ("torch.load", "torch.save") or library in ("pickle", "marshal", "shelve", "cloudpickle", "dill"):
            yield line, name
        if library == "pickletools" and source.path != "checkpoint/import_dcp.py":
            yield line, f"{name}: pickles of others are read in checkpoint/import_dcp.py alone, which runs nothing"
        if name.startswith("torch.distributed.") and "_object" in name:  # torch pickles these
            yield line, name
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle"


GROUPS = {"Group", "Groups", "ProcessGroup", "new_group", "WORLD", "DeviceMesh", "init_device_mesh"}


@rule
def no_group_is_global(source: Source) -> Breaches:
    """A group is passed in. So no module or class holds one, and no function writes to its module's names: the one
    that may keeps a worker process's tokenizer."""
    bodies: list[ast.Module | ast.ClassDef] = [source.tree]
    bodies += [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    for body in bodies:
        for node in body.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue  # a class that says its instances have a group holds none itself
            made: list[ast.AST] = [part.func for part in ast.walk(node.value) if isinstance(part, ast.Call)]
            made += [part for part in ast.walk(node.value) if isinstance(part, ast.Attribute) and part.attr == "WORLD"]
            if isinstance(node, ast.AnnAssign) and isinstance(body, ast.Module):
                made += list(ast.walk(node.annotation))
            if found := {dotted(part).split(".")[-1] for part in made} & GROUPS:
                yield node.lineno, f"holds {', '.join(sorted(found))} for the whole process; pass it in"
    for written in ast.walk(source.tree):
        if isinstance(written, ast.Global) and (source.path, written.names) != ("data/prepare.py", ["_worker"]):
            yield written.lineno, f"global {', '.join(written.names)}"


@rule
def private_torch_stays_in_one_file(source: Source) -> Breaches:
    """kernels/private_torch.py has a reason for each name."""
    if source.path == "kernels/private_torch.py":
        return
    for line, name in reached(source):
        parts = name.split(".")
        if parts[0] == "torch" and any(part.startswith("_") and not part.endswith("__") for part in parts):
            yield line, name


@rule
def names_of_files_say_something(source: Source) -> Breaches:
    name = Path(source.path).stem
    if name.rstrip("s") in ("util", "helper", "misc", "common", "tool"):
        yield 1, f"{name} says nothing; a function lives with what it helps"


@rule
def files_fit_in_a_head(source: Source) -> Breaches:
    if (lines := source.text.count("\n")) > LINES:
        yield LINES, f"{lines} lines; at most {LINES}"


@pytest.mark.parametrize("name", RULES)
def test_every_file_keeps_the_rule(name: str) -> None:
    breaches = [f"{source.path}:{line}: {what}" for source in SOURCES for line, what in RULES[name](source)]
    assert not breaches, f"{name}: {RULES[name].__doc__ or ''}\n" + "\n".join(breaches)


BROKEN = [
    ("imports_go_down_the_order", "mesh/axes.py", "from ultrascale.parallel.layout import Layout"),
    ("imports_go_down_the_order", "mesh/axes.py", "from ultrascale import parallel"),
    ("imports_go_down_the_order", "mesh/axes.py", "from ..comm import ledger"),
    ("imports_go_down_the_order", "data/loader.py", "def f():\n    import ultrascale.observe.console"),
    ("imports_go_down_the_order", "pipeline/a.py", "if TYPE_CHECKING:\n    from ultrascale.optim import adamw"),
    ("imports_go_down_the_order", "verify.py", "from ultrascale.cli import main"),
    ("imports_go_down_the_order", "extras/more.py", ""),
    ("names_are_imported_in_sight", "mesh/axes.py", "from importlib import import_module\nimport_module(name)"),
    ("names_are_imported_in_sight", "mesh/axes.py", "__import__('ultrascale.parallel')"),
    ("package_files_are_empty", "mesh/__init__.py", "from ultrascale.mesh.axes import Mesh"),
    ("collectives_go_through_comm", "parallel/a.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ("collectives_go_through_comm", "parallel/a.py", "import torch\ntorch.distributed.broadcast(x, 0)"),
    ("collectives_go_through_comm", "trainer.py", "from torch.distributed import all_gather"),
    ("collectives_go_through_comm", "mesh/a.py", "from torch import distributed\ndistributed.new_group([0])"),
    ("nothing_is_unpickled", "checkpoint/read.py", "import torch\ntorch.load(path)"),
    ("nothing_is_unpickled", "checkpoint/read.py", "from pickle import loads"),
    ("nothing_is_unpickled", "checkpoint/import_dcp.py", "import pickle\npickle.Unpickler(file)"),
    ("nothing_is_unpickled", "checkpoint/dcp_folder.py", "from pickletools import genops"),
    ("nothing_is_unpickled", "comm/collectives.py", "import torch.distributed as dist\ndist.all_gather_object(x, y)"),
    ("nothing_is_unpickled", "data/indexed.py", "np.load(path, allow_pickle=True)"),
    ("no_group_is_global", "parallel/a.py", "import torch.distributed as dist\nTENSOR = dist.new_group([0, 1])"),
    ("no_group_is_global", "parallel/a.py", "GROUPS: dict[str, Group] = {}"),
    ("no_group_is_global", "parallel/a.py", "class Layer:\n    group = Group((), (0,), 0, None, ledger)"),
    ("no_group_is_global", "parallel/a.py", "def start():\n    global _group\n    _group = make()"),
    ("private_torch_stays_in_one_file", "kernels/a.py", "import torch\ntorch._dynamo.reset()"),
    ("names_of_files_say_something", "parallel/utils.py", ""),
    ("files_fit_in_a_head", "trainer.py", "x = 1\n" * (LINES + 1)),
]


@pytest.mark.parametrize(("name", "path", "text"), BROKEN)
def test_rule_sees_a_breach(name: str, path: str, text: str) -> None:
    assert list(RULES[name](Source(path, text)))


def test_every_rule_was_broken_once() -> None:
    assert {name for name, _, _ in BROKEN} == set(RULES)


def test_files_of_the_torch_free_list_import_no_torch() -> None:
    """One after the other in one process: once torch is there, the file that was just imported brought it."""
    free = [source.module for source in SOURCES if not source.path.startswith(NEEDS_TORCH)]
    program = f"""
import importlib, sys
for name in {free}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{{name}} imports torch")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert len(free) > 60  # the list above lets through no more than it says


def test_files_that_need_torch_are_there() -> None:
    """A name in the list that no file has would free the next file of that name without anybody's decision."""
    paths = [source.path for source in SOURCES]
    for entry in NEEDS_TORCH:
        assert any(path.startswith(entry) for path in paths), f"{entry} is in NEEDS_TORCH and not in the package"
