# SPDX-License-Identifier: Apache-2.0
"""The project's own files, for the tools beside this one."""
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = (".h", ".cc", ".cu", ".cuh")
# Build output, and what git or editors keep.
SKIPPED_FOLDERS = {"build", ".git", ".cache", "__pycache__", ".venv"}


def files(suffixes=None):
    """Paths relative to the root, sorted; all files when no suffixes are given."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if suffixes is None or name.endswith(suffixes):
                found.append(pathlib.Path(folder, name).relative_to(ROOT))
    return found
