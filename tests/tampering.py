"""Checkpoint folders changed by hand, and their manifests made to fit."""

from __future__ import annotations

import json

from safetensors.torch import load_file, save_file

from hfgpt.checkpointing.checkpoint import MANIFEST, file_facts


def sealed(folder):
    """The folder with a manifest that fits what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    facts = {path.relative_to(folder).as_posix(): file_facts(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"files": facts}))


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(change):
    def apply(folder):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return apply


def louder(tensors):
    return {name: value * 1.5 for name, value in tensors.items()}
