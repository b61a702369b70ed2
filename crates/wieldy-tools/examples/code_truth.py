"""Prints what CPython's own parser finds in each file of a tree, one line of JSON for each file.

Usage: code_truth.py FOLDER NAME...
"""

import ast
import json
import os
import sys

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ARGUMENTS = set(sys.argv[2:])


def targets(node):
    """Returns the names and attributes that an assignment binds, in order."""
    found = []
    todo = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
    while todo:
        target = todo.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            todo = list(target.elts) + todo
        elif isinstance(target, ast.Starred):
            todo.insert(0, target.value)
        else:
            found.append(target)
    return found


def inside(body):
    """Returns the statements of a body and of the blocks in it, without those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, FUNCTIONS + (ast.ClassDef,)):
            continue
        # In the order of the text.
        yield from inside(getattr(node, "body", []) or [])
        for part in (getattr(node, "handlers", []) or []) + (getattr(node, "cases", []) or []):
            yield from inside(part.body)
        yield from inside(getattr(node, "orelse", []) or [])
        yield from inside(getattr(node, "finalbody", []) or [])


def truth(text):
    tree = ast.parse(text)
    definitions, bound = [], set()
    for scope in [tree] + [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        seen = set()
        statements = list(inside(scope.body))
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in targets(node):
                    if isinstance(target, ast.Name) and target.id not in seen:
                        seen.add(target.id)
                        definitions.append((target.id, target.lineno))
                        bound.add((target.lineno, target.col_offset))
            if isinstance(scope, ast.ClassDef) and isinstance(node, FUNCTIONS):
                for inner in inside(node.body):
                    if isinstance(inner, (ast.Assign, ast.AnnAssign)):
                        for target in targets(inner):
                            own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                            if own and target.value.id == "self" and target.attr not in seen:
                                seen.add(target.attr)
                                definitions.append((target.attr, target.end_lineno))
    references = set()

    def refer(name, line):
        if name in ARGUMENTS:
            references.add((name, line))

    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS + (ast.ClassDef,)):
            # The line of the name; decorators stand before it.
            definitions.append((node.name, node.lineno))
        elif isinstance(node, ast.Name) and (node.lineno, node.col_offset) not in bound:
            refer(node.id, node.lineno)
        elif isinstance(node, ast.Attribute):
            refer(node.attr, node.end_lineno)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for part in (getattr(node, "module", None) or "").split("."):
                refer(part, node.lineno)
            for alias in node.names:
                for part in alias.name.split("."):
                    refer(part, alias.lineno)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                refer(name, node.lineno)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            refer(node.name, node.lineno)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            refer(node.name, node.lineno)
    return {"definitions": sorted(set(definitions)), "references": sorted(references)}


for folder, _, names in sorted(os.walk(sys.argv[1])):
    for name in sorted(names):
        if name.endswith(".py"):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                text = file.read()
            try:
                print(json.dumps({"path": path, **truth(text)}))
            except (SyntaxError, ValueError):
                pass
