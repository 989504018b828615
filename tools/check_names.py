"""Check the names in Python code by its syntax tree: `check_names.py [--counts] [PROJECT]`.

- Variables, parameters, fields and attributes do not have names that say nothing, such as `it` or `found`.
- No two classes or type aliases of histopipe have the same name, and no two modules the same file name.
- No code asks which task it has: no `isinstance` on tasks, scores, metrics and thresholds, no comparison of a task with
  None or of its name with a text.

An exception needs a reason in the tables below; one that is not needed any more is an error too.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("histopipe", "tests", "tools")
NAMES = {
    *("it", "found", "own", "known", "wanted", "given", "shown", "more", "others", "everything"),
    *("figures", "judge", "judged", "certainty", "holders", "facts", "kinds", "together"),
    *("appearing", "covering", "storable", "tried"),
}
"""Names that are not used for variables. The classes and functions that had them have other names."""
CLASSES = {
    "judged",
    "judgesettings",
    "participant",
    "problem",
    "trainedpatches",
    "together",
    "facts",
}
TASKS = ("Task", "Classification", "Multilabel", "Regression", "Survival")
TASKS_VALUES = (*TASKS, "Scores", "Metrics", "Thresholds", "Predictions")
"""Ends of the names of classes that differ between tasks, or could."""
TASK_NAMES = {"classification", "multilabel", "regression", "survival"}

ALLOWED_NAMES = {
    (
        "histopipe/errors.py",
        "found",
    ): "public: what an error has found, between its subject and `expected`",
    (
        "histopipe/diagnostics/encoder_checks.py",
        "found",
    ): "public: a column of `doctor`, also in its JSON",
    ("histopipe/diagnostics/encoder_checks.py", "facts"): "public: in the JSON of `doctor`",
    ("histopipe/diagnostics/info.py", "facts"): "public: in the JSON of `info`",
}
ALLOWED_CLASSES: dict[str, str] = {}
ALLOWED_MODULES = {
    "options": "the options of the commands that each package has",
}
ALLOWED_QUESTIONS = {
    (f"histopipe/{module}.py", "compared with None"): f"a {meaning}, not the task of a model"
    for module, meaning in {
        "system/cluster_parts": "match of a pattern",
        "ingestion/ingest_slides": "type of a filesystem",
        "diagnostics/info": "kind of a folder",
        "slides/staging": "type of a filesystem",
        "search/shared_search": "type of a filesystem",
        "system/folders": "kind of a folder",
        "system/worker_pool": "type of an exception",
    }.items()
}


def python_files(project: Path, folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path in the project and the syntax tree of each file."""
    for path in sorted((project / folder).rglob("*.py")):
        yield path.relative_to(project).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that is bound to a value, and its line: variables, parameters, fields, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node.lineno


def class_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each class, and each type alias of a module, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if is_alias(name):
                yield name, node.lineno


def is_alias(name: str) -> bool:
    """Return whether a name is written as type aliases are: in CamelCase."""
    plain = name.lstrip("_")
    return plain[:1].isupper() and not plain.isupper()


def task_questions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each place that asks which task it has, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, classes]):
                named = [part.id for part in ast.walk(classes) if isinstance(part, ast.Name)]
                if any(name.endswith(TASKS_VALUES) for name in named):
                    yield f"asked for its class: {', '.join(named)}", node.lineno
            case ast.Compare(left=left, comparators=[right]):
                if is_task(left) and isinstance(right, ast.Constant) and right.value is None:
                    yield "compared with None", node.lineno
                values = {part.value for part in ast.walk(right) if isinstance(part, ast.Constant)}
                if is_task(left) and values & TASK_NAMES:
                    yield "compared with the name of a task", node.lineno


def is_task(node: ast.expr) -> bool:
    """Return whether an expression is called `task`, `kind` or `task.name`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in ("task", "kind"):
            return True
        case ast.Attribute(value=inner, attr="name"):
            return is_task(inner)
    return False


class Checked:
    """What is wrong in a project, the exceptions that were needed, and counts."""

    def __init__(self, project: Path) -> None:
        self.wrong: list[str] = []
        self.needed: set[object] = set()
        self.counts: Counter[str] = Counter()
        self._classes: dict[str, list[str]] = defaultdict(list)
        self._modules: dict[str, list[str]] = defaultdict(list)
        for folder in FOLDERS:
            for path, tree in python_files(project, folder):
                self._check_variables(path, tree)
                if folder == "histopipe":
                    self._check_package(path, tree)
        self._check_equal("classes or aliases", self._classes, ALLOWED_CLASSES)
        self._check_equal("modules", self._modules, ALLOWED_MODULES)

    def _report(self, key: object, exceptions: Mapping[Any, str], message: str) -> None:
        self.needed.add(key)
        if key not in exceptions:
            self.wrong.append(message)

    def _check_variables(self, path: str, tree: ast.Module) -> None:
        for name, line in bound_names(tree):
            if name.lstrip("_") in NAMES:
                self.counts["variables with a forbidden name"] += 1
                message = f"{path}:{line}: `{name}` is no name for a variable"
                self._report((path, name.lstrip("_")), ALLOWED_NAMES, message)

    def _check_package(self, path: str, tree: ast.Module) -> None:
        if not path.endswith("__init__.py"):
            self._modules[Path(path).stem].append(path)
        for name, line in class_names(tree):
            self._classes[name.lstrip("_").lower()].append(f"{path}:{line} {name}")
            if name.lstrip("_").lower() in CLASSES:
                self.wrong.append(f"{path}:{line}: `{name}` is no name for a class")
        for question, line in task_questions(tree):
            self.counts[f"tasks that are {question}"] += 1
            message = f"{path}:{line}: a task is {question}; make it a method of the task"
            self._report((path, question), ALLOWED_QUESTIONS, message)

    def _check_equal(
        self, subject: str, places: Mapping[str, list[str]], exceptions: Mapping[str, str]
    ) -> None:
        self.counts[subject] += sum(map(len, places.values()))
        for name, equal in places.items():
            if len(equal) > 1:
                self.counts[f"{subject} of equal name"] += len(equal)
                self._report(name, exceptions, f"{subject} have the same name: {', '.join(equal)}")


def main() -> int:
    """Print what is wrong, and the counts if asked for. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--counts", action="store_true", help="print the numbers of names")
    options = parser.parse_args()
    checked = Checked(options.project)
    if options.project == ROOT:
        exceptions = {*ALLOWED_NAMES, *ALLOWED_CLASSES, *ALLOWED_MODULES, *ALLOWED_QUESTIONS}
        unneeded = exceptions - checked.needed
        checked.wrong += [f"tools/check_names.py: {key!r} needs no exception" for key in unneeded]
    for message in checked.wrong:
        print(message)
    if options.counts:
        for subject, count in sorted(checked.counts.items()):
            print(f"{count:6} {subject}")
    print(f"{len(checked.wrong)} wrong names")
    return int(bool(checked.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
